"""On 3, 4 and 5 ranks, each step of PowerSGD equals a naive reference written from the paper."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.methods import powersgd
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import Method
from tests.distributed.launch import run_ranks
from tests.distributed.test_reference import SHAPES, SIZES, STEPS, Parameters, flat, gradients_of
from tests.reference.power_sgd import PowerSGDReference

MATRICES = np.concatenate([np.full(size, len(shape) > 1) for shape, size in zip(SHAPES, SIZES)])


def drawing(step: int) -> Any:
    """Draws the first Q of each matrix, in order, as all ranks do in this step."""
    generator = Round(Layout([]), step).shared_generator()

    def draw(shape: tuple[int, int]) -> NDArray[np.float64]:
        # The product draws row by row of the transpose.
        return torch.randn(shape[::-1], generator=generator).t().double().numpy()

    return draw


def _train(rank: int, method: Method, dtype: torch.dtype) -> list[tuple[np.ndarray, np.ndarray]]:
    """After each step: the gradient that the optimizer saw, and the residual of the compressed tensors."""
    module = Parameters().to(dtype)
    engine = Engine(method, Wire())
    engine.registry.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    trained = []
    for gradient in gradients_of(rank):
        for parameter, part in zip(module.parameters(), torch.from_numpy(gradient).split(SIZES)):
            parameter.grad = part.to(dtype).view(parameter.shape)
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            seen = flat(parameter.grad for parameter in module.parameters())
            optimizer.step()
        share = next(iter(engine.registry.optimizers[0].shares.values()))
        trained.append((seen, flat(share.channel.memories[0].held["residual"].parts)))
    engine.close()
    return trained


CASES = [
    (1, 0, torch.float64, STEPS, 1e-6),
    # With rank 5, the second matrix is sent whole.
    (5, 3, torch.float64, STEPS, 1e-6),
    # Round-off grows from step to step: these gradients are noise, of which no column is the largest for long.
    (2, 0, torch.float32, 8, 1e-4),
]
RANKS = [3, 4, 5]


# Quickly each case and each number of ranks once; all pairs run with the slow tests.
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("rank", "dense_steps", "dtype", "steps", "tolerance", "world_size"),
    [
        pytest.param(*case, ranks, marks=() if CASES.index(case) == RANKS.index(ranks) else pytest.mark.slow)
        for case in CASES
        for ranks in RANKS
    ],
)
def test_powersgd(
    tmp_path: Path, rank: int, dense_steps: int, dtype: torch.dtype, steps: int, tolerance: float, world_size: int
) -> None:
    ranks = run_ranks(tmp_path, world_size, _train, powersgd(rank, dense_steps), dtype)
    reference = PowerSGDReference(world_size, SHAPES, rank, dense_steps, drawing(dense_steps))
    all_gradients = [gradients_of(rank) for rank in range(world_size)]
    for step in range(steps):
        expected = reference.step([gradients[step] for gradients in all_gradients])
        atol = tolerance * float(np.abs(expected).max())
        for trained, own in zip(ranks, reference.own_residuals, strict=True):
            seen, residual = trained[step]
            assert seen.tobytes() == ranks[0][step][0].tobytes()
            np.testing.assert_allclose(seen, expected, rtol=0, atol=atol)
            np.testing.assert_allclose(residual, own[MATRICES], rtol=0, atol=atol)
        # A rank forgets its own part. Over all ranks, that is what the paper's ranks forget.
        mean = np.mean([trained[step][1] for trained in ranks], axis=0)
        np.testing.assert_allclose(mean, np.mean(reference.residuals, axis=0)[MATRICES], rtol=0, atol=atol)


def test_residuals_of_different_ranks_do_not_drift_apart() -> None:
    """The paper's do: differences between ranks within the columns of P are never sent."""
    reference = PowerSGDReference(3, SHAPES, 2, 0, drawing(0))
    all_gradients = [gradients_of(rank) for rank in range(3)]
    for step in range(STEPS):
        reference.step([gradients[step] for gradients in all_gradients])
    ours, papers = (
        np.linalg.norm([each[MATRICES] for each in residuals])
        for residuals in (reference.own_residuals, reference.residuals)
    )
    assert ours < 0.8 * papers
