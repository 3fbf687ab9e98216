"""On 3, 4 and 5 ranks, each step of the methods that agree on positions equals a naive reference."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_sparsecomm.basis import Ledger
from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.ledger import GRADIENTS
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.methods import aligned_topk, random_k
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import Method
from tests.distributed.launch import run_ranks
from tests.distributed.test_low_rank_reference import MATRICES, _train
from tests.distributed.test_reference import SHAPES, SIZES, STEPS, Parameters, gradients_of
from tests.reference.shared_positions import SharedPositions, largest_blocks, one_of_each_part

DENSITY, BLOCK, PROJECTIONS = 0.1, 8, 3
WEIGHTS = [size for size, shape in zip(SIZES, SHAPES) if len(shape) > 1]
N = sum(WEIGHTS)


def chosen_at_random(step: int, vectors: list[np.ndarray]) -> list[int]:
    k = round(DENSITY * N)
    generator = Round(Layout([]), step).shared_generator()
    return one_of_each_part(N, k, torch.rand(k, dtype=torch.float64, generator=generator).numpy())


def chosen_by_norm(step: int, vectors: list[np.ndarray]) -> list[int]:
    generator = Round(Layout([]), step).shared_generator()
    signs = torch.randint(0, 2, (BLOCK, PROJECTIONS), generator=generator).numpy() * 2 - 1
    return largest_blocks(vectors, WEIGHTS, DENSITY, BLOCK, signs)


METHODS = {
    "random_k": (random_k(DENSITY), chosen_at_random),
    "aligned_topk": (aligned_topk(DENSITY, BLOCK, PROJECTIONS), chosen_by_norm),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("world_size", [3, 4, 5])
@pytest.mark.parametrize("name", METHODS)
def test_step_by_step(tmp_path: Path, name: str, world_size: int) -> None:
    method, choose = METHODS[name]
    ranks = run_ranks(tmp_path, world_size, _train, method, torch.float64)
    at = [0]
    reference = SharedPositions(world_size, N, lambda vectors: choose(at[0], vectors))
    all_gradients = [gradients_of(rank) for rank in range(world_size)]
    for step in range(STEPS):
        at[0] = step
        gradients = [own[step].astype(np.float64) for own in all_gradients]
        expected = np.mean(gradients, axis=0)
        expected[MATRICES] = reference.step([gradient[MATRICES] for gradient in gradients])
        for trained, own in zip(ranks, reference.residuals, strict=True):
            seen, residual = trained[step]
            assert seen.tobytes() == ranks[0][step][0].tobytes()
            np.testing.assert_allclose(seen, expected, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(residual, own, rtol=1e-12, atol=1e-11)


def _ledger(rank: int, method: Method) -> Ledger:
    module = Parameters()
    engine = Engine(method, Wire())
    engine.registry.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    with engine.stepping(optimizer):
        engine.synchronize(optimizer)
        optimizer.step()
    engine.close()
    return engine.wire.ledger


@pytest.mark.parametrize(
    ("method", "numbers"),
    [
        (random_k(DENSITY), round(DENSITY * N) + len(WEIGHTS)),
        (random_k(1.0), N + len(WEIGHTS)),
        (aligned_topk(1.0, BLOCK, PROJECTIONS), N + PROJECTIONS * sum(-(-n // BLOCK) for n in WEIGHTS) + len(WEIGHTS)),
    ],
)
def test_bytes_do_not_depend_on_the_number_of_ranks(tmp_path: Path, method: Any, numbers: int) -> None:
    whole = sum(SIZES) - N + len(SIZES) - len(WEIGHTS)
    for world_size in (2, 4):
        (tmp_path / str(world_size)).mkdir()
        for ledger in run_ranks(tmp_path / str(world_size), world_size, _ledger, method):
            assert ledger.handed_bytes(GRADIENTS) == 4 * (numbers + whole)
