"""On three and four ranks, each step of the literature's quantizers equals a naive reference, with the same draws."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.methods import ef_signsgd, natural, onebit_sgd, qsgd, signsgd, terngrad
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import Method
from tests.distributed.launch import run_ranks
from tests.distributed.test_low_rank_reference import MATRICES
from tests.distributed.test_reference import SHAPES, SIZES, STEPS, Parameters, flat, gradients_of
from tests.reference import quantizers
from tests.reference.quantizers import Array, WithErrorFeedback

WEIGHTS = [shape for shape in SHAPES if len(shape) > 1]
N = int(MATRICES.sum())


def _train(rank: int, method: Method) -> list[tuple[np.ndarray, np.ndarray]]:
    """After each step: the gradient that the optimizer saw, and the residual of the weights; in float64."""
    module = Parameters().to(torch.float64)
    engine = Engine(method, Wire())
    engine.registry.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    trained = []
    for gradient in gradients_of(rank):
        for parameter, part in zip(module.parameters(), torch.from_numpy(gradient).split(SIZES)):
            parameter.grad = part.double().view(parameter.shape)
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            seen = flat(parameter.grad for parameter in module.parameters())
            optimizer.step()
        memories = next(iter(engine.registry.optimizers[0].shares.values())).channel.memories
        trained.append((seen, flat(memories[0].held["residual"].parts) if memories else np.zeros(0)))
    engine.close()
    return trained


def uniform(step: int, rank: int) -> Array:
    generator = Round(Layout([]), step, rank=rank).rank_generator()
    return torch.rand(N, generator=generator).double().numpy()


def mantissas(step: int, rank: int) -> Array:
    """Natural compression draws 23 bits, of float32's mantissa."""
    generator = Round(Layout([]), step, rank=rank).rank_generator()
    return torch.randint(2**23, (N,), generator=generator, dtype=torch.int32).double().numpy() / 2**23


def unbiased(quantize: Callable[[Array, Array], Array], draw: Callable[[int, int], Array]) -> Any:
    def step(number: int, gradients: Sequence[Array]) -> Array:
        sent = [quantize(each, draw(number, rank)) for rank, each in enumerate(gradients)]
        return np.asarray(np.mean(sent, axis=0))

    return lambda world_size: (step, None)


def with_error_feedback(quantize: Callable[[Array], Array]) -> Any:
    def reference(world_size: int) -> Any:
        state = WithErrorFeedback(world_size, N, quantize)
        return lambda number, gradients: state.step(gradients), state.residuals

    return reference


def ternary(number: int, gradients: Sequence[Array], clip: float | None) -> Array:
    draws = [uniform(number, rank) for rank in range(len(gradients))]
    return quantizers.terngrad(gradients, draws, WEIGHTS, clip)


CASES: dict[str, tuple[Method, Any]] = {
    "qsgd": (qsgd(), unbiased(lambda x, u: quantizers.qsgd(x, u, 15, 512, "l2"), uniform)),
    "qsgd, few levels": (
        qsgd(levels=2, bucket=50, norm="max"),
        unbiased(lambda x, u: quantizers.qsgd(x, u, 2, 50, "max"), uniform),
    ),
    "terngrad": (terngrad(), lambda ranks: (lambda number, each: ternary(number, each, 2.5), None)),
    "terngrad, not clipped": (
        terngrad(clip=None),
        lambda ranks: (lambda number, each: ternary(number, each, None), None),
    ),
    "natural": (natural(), unbiased(quantizers.natural, mantissas)),
    "onebit_sgd": (onebit_sgd(), with_error_feedback(lambda x: quantizers.two_means(x, WEIGHTS))),
    "ef_signsgd": (ef_signsgd(), with_error_feedback(lambda x: quantizers.scaled_signs(x, WEIGHTS))),
    "signsgd": (
        signsgd(momentum_correction=False),
        lambda ranks: (lambda number, each: quantizers.majority(each), None),
    ),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("world_size", [3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_step_by_step(tmp_path: Path, name: str, world_size: int) -> None:
    method, make = CASES[name]
    # Its steps are as small as the learning rate for every parameter, so biases are voted on too.
    here = np.ones_like(MATRICES) if name == "signsgd" else MATRICES
    ranks = run_ranks(tmp_path, world_size, _train, method)
    reference, residuals = make(world_size)
    all_gradients = [gradients_of(rank) for rank in range(world_size)]
    for step in range(STEPS):
        gradients = [own[step].astype(np.float64) for own in all_gradients]
        expected = np.mean(gradients, axis=0)
        expected[here] = reference(step, [gradient[here] for gradient in gradients])
        for rank, trained in enumerate(ranks):
            seen, residual = trained[step]
            assert seen.tobytes() == ranks[0][step][0].tobytes()
            # What is decoded is float32, and may cancel out.
            np.testing.assert_allclose(seen, expected, rtol=1e-6, atol=1e-7 * np.abs(expected).max())
            assert residual.size == (0 if residuals is None else N)
            if residuals is not None:
                np.testing.assert_allclose(residual, residuals[rank], rtol=1e-6, atol=1e-6)


def test_momentum_is_applied_before_the_vote(tmp_path: Path) -> None:
    """Signum: ranks vote with the signs of their velocities."""
    ranks = run_ranks(tmp_path, 3, _votes)
    velocities = [np.zeros(sum(SIZES)) for _ in ranks]
    for step in range(STEPS):
        for rank, velocity in enumerate(velocities):
            velocity *= 0.9
            velocity += gradients_of(rank)[step]
        expected = quantizers.majority(velocities)
        for trained in ranks:
            np.testing.assert_array_equal(trained[step], expected)


def _votes(rank: int) -> list[np.ndarray]:
    module = Parameters().to(torch.float64)
    engine = Engine(signsgd(), Wire())
    engine.registry.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9)
    steps, before = [], flat(parameter.detach() for parameter in module.parameters())
    for gradient in gradients_of(rank):
        for parameter, part in zip(module.parameters(), torch.from_numpy(gradient).split(SIZES)):
            parameter.grad = part.double().view(parameter.shape)
        with engine.stepping(optimizer):
            engine.closure(optimizer, lambda: None)()
            optimizer.step()
        after = flat(parameter.detach() for parameter in module.parameters())
        steps.append(before - after)
        before = after
    engine.close()
    return steps
