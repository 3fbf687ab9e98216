"""On 2 to 5 ranks, each step of Ok-Topk equals a naive reference; and what it sends is bounded."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout, Round, SparseVector, Vector, Wire
from lightning_sparsecomm.basis.ledger import GRADIENTS
from lightning_sparsecomm.codecs import Auto, Float32, RunLength16, SparseCodec, TopK, TwoBit, ValueCoding
from lightning_sparsecomm.exchange import OkTopK
from lightning_sparsecomm.methods import ok_topk
from tests.distributed.launch import run_ranks
from tests.distributed.test_low_rank_reference import MATRICES, _train
from tests.distributed.test_reference import SHAPES, SIZES, STEPS, gradients_of
from tests.reference.ok_topk import OkTopKReference

WEIGHTS = sum(size for size, shape in zip(SIZES, SHAPES) if len(shape) > 1)
DENSITY, BALANCE_EVERY = 0.2, 7


@pytest.mark.parametrize("positions", ["fast", "short"])
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow), 4, 5])
def test_step_by_step(tmp_path: Path, world_size: int, positions: str) -> None:
    method = ok_topk(DENSITY, positions=positions, balance_every=BALANCE_EVERY)
    ranks = run_ranks(tmp_path, world_size, _train, method, torch.float64)
    reference = OkTopKReference(world_size, WEIGHTS, round(DENSITY * WEIGHTS), BALANCE_EVERY)
    all_gradients = [gradients_of(rank) for rank in range(world_size)]
    for step in range(STEPS):
        gradients = [own[step].astype(np.float64) for own in all_gradients]
        expected = np.mean(gradients, axis=0)
        expected[MATRICES] = reference.step([gradient[MATRICES] for gradient in gradients])
        for trained, own in zip(ranks, reference.residuals, strict=True):
            seen, residual = trained[step]
            assert seen.tobytes() == ranks[0][step][0].tobytes()
            np.testing.assert_allclose(seen, expected, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(residual, own, rtol=1e-12, atol=1e-11)


N, ROUNDS = 40_000, 6
LAYOUT = Layout([("weight", (N,))])


def _dense(vector: SparseVector | Tensor) -> Tensor:
    return vector.dense() if isinstance(vector, SparseVector) else vector


def _gradient(rank: int, step: int, kind: str, random: torch.Generator) -> Tensor:
    noise = torch.randn(N, generator=random)
    if kind == "nothing on rank 1" and rank == 1:
        return torch.zeros(N)
    if kind == "nothing":
        return torch.zeros(N)
    if kind == "alike":
        return torch.ones(N)
    if kind == "cancelling":
        # Ranks 0 and 1 select most in the first half, where their sum is zero; so the results are in the second.
        common = torch.Generator().manual_seed(step)
        noise[: N // 2] = torch.randn(N // 2, generator=common) * 1.6 * (1 - 2 * rank if rank < 2 else 0)
    if kind == "in one place":
        # All that counts is in a stretch that one owner may have, and for other ranks elsewhere.
        noise[rank * 1_000 : rank * 1_000 + 3_000] *= 100
    return noise


def _exchange(rank: int, kind: str, values: ValueCoding, density: float) -> tuple[list[np.ndarray], list[int], int]:
    """Sum of gradients, residual and sum of what was shared; how much was in each result; calls of all-to-alls."""
    wire, random = Wire(), torch.Generator().manual_seed(rank)
    exchange = OkTopK(SparseCodec(TopK(density), values, RunLength16() if values == Float32() else Auto()), 4)
    total, residual, received = torch.zeros(N), torch.zeros(N), torch.zeros(N)
    counts = []
    for step in range(ROUNDS):
        gradient = _gradient(rank, step, kind, random)
        total += gradient
        residual += gradient
        context = Round(LAYOUT, step=step, rank=rank, world_size=wire.world_size)
        exchanged = exchange.exchange(Vector(residual), context, wire)
        exchange.commit()
        residual -= _dense(exchanged.sent)
        received += _dense(exchanged.shared)
        counts.append(int(_dense(exchanged.shared).count_nonzero()))
    return (
        [each.numpy() for each in (total, residual, received)],
        counts,
        wire.ledger.rows[GRADIENTS]["all_to_all"].calls,
    )


@pytest.mark.parametrize("values", [Float32(), TwoBit()], ids=["exact", "rounded"])
@pytest.mark.parametrize("kind", ["noise", "in one place", "cancelling", "nothing on rank 1", "nothing", "alike"])
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_nothing_is_lost_and_k_are_shared(tmp_path: Path, world_size: int, kind: str, values: ValueCoding) -> None:
    """What ranks share and hold is the sum of their gradients; the result has k elements, less at most a class each."""
    k = N // 100
    ranks = run_ranks(tmp_path, world_size, _exchange, kind, values, 0.01)
    total, held = (sum(each[0][i] for each in ranks) / world_size for i in (0, 1))
    received = ranks[0][0][2]
    np.testing.assert_allclose(held + received, total, rtol=0, atol=2e-4 if kind == "in one place" else 2e-5)
    for each in ranks:
        assert each[0][2].tobytes() == received.tobytes()
        assert each[1] == ranks[0][1]
    # Once to owners; once more to share out what one of them has too many of.
    cancelled = kind == "cancelling" and world_size == 2
    if not cancelled:
        assert ranks[0][2] == ROUNDS * (2 if kind == "cancelling" and world_size == 3 else 1)
    for count in ranks[0][1]:
        assert count <= k
        assert count >= (0 if kind == "nothing" or cancelled else k - -(-world_size * k // 64))


def _link_bytes(rank: int, n: int) -> int:
    """Of one round with independent gradients, positions and values of 4 bytes each."""
    wire, random = Wire(), torch.Generator().manual_seed(rank)
    context = Round(Layout([("weight", (n,))]), rank=rank, world_size=wire.world_size)
    OkTopK(SparseCodec(TopK(0.01))).exchange(Vector(torch.randn(n, generator=random)), context, wire)
    return wire.ledger.link_bytes(GRADIENTS)


def test_bytes_are_those_of_an_all_reduce_of_k_elements(tmp_path: Path) -> None:
    """Within 15%: headers, magnitudes, padding, regions that are not quite even. At 8 ranks less than 6k numbers."""
    n, k = 1_000_000, 10_000
    for world_size in (2, 4, 8):
        (tmp_path / str(world_size)).mkdir()
        ranks = run_ranks(tmp_path / str(world_size), world_size, _link_bytes, n)
        numbers = ranks[0] / 4
        assert len(set(ranks)) == 1
        assert numbers <= 1.15 * 2 * (world_size - 1) / world_size * 2 * k
        assert numbers >= 2 * (world_size - 1) / world_size * 2 * k
    assert numbers <= 6 * k
