"""On 2 to 5 ranks, each step of Ok-Topk equals a naive reference; and what it sends is bounded."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout, Round, SparseVector, Vector, Wire
from lightning_sparsecomm.basis.ledger import GRADIENTS, link_bytes
from lightning_sparsecomm.codecs import Auto, Float32, RunLength16, SparseCodec, TopK, TwoBit, ValueCoding
from lightning_sparsecomm.exchange import OkTopK
from lightning_sparsecomm.methods import ok_topk
from tests.distributed.launch import run_ranks
from tests.distributed.test_low_rank_reference import MATRICES, _train
from tests.distributed.test_reference import SHAPES, SIZES, STEPS, gradients_of
from tests.reference.ok_topk import OkTopKReference

WEIGHTS = sum(size for size, shape in zip(SIZES, SHAPES) if len(shape) > 1)
DENSITY, BALANCE_EVERY = 0.2, 7


@pytest.mark.few(2)
@pytest.mark.parametrize("positions", ["fast", "short"])
@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4)), 5])
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


@pytest.mark.few(9)
@pytest.mark.parametrize("values", [Float32(), TwoBit()], ids=["exact", "rounded"])
@pytest.mark.parametrize("kind", ["noise", "in one place", "cancelling", "nothing on rank 1", "nothing", "alike"])
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow), 4])
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
        assert ranks[0][2] == ROUNDS * (2 if kind == "cancelling" and world_size == 4 else 1)
    for count in ranks[0][1]:
        assert count <= k
        assert count >= (0 if kind == "nothing" or cancelled else k - -(-world_size * k // 64))


N_OF_BYTES, K_OF_BYTES = 1_000_000, 10_000
SKEWS = ["noise", "each in a place of its own", "all in a new place in each round", "one rank has nearly all"]


def _link_bytes(rank: int, kind: str) -> float:
    """Of the last of several rounds, with positions and values of 4 bytes each."""
    wire, random = Wire(), torch.Generator().manual_seed(rank)
    exchange, before = OkTopK(SparseCodec(TopK(0.01))), 0.0
    for step in range(3):
        x = torch.randn(N_OF_BYTES, generator=random)
        place = {SKEWS[1]: rank, SKEWS[2]: step * 3 % wire.world_size}.get(kind)
        if place is not None:
            x.view(wire.world_size, -1)[place] *= 100
        if kind == SKEWS[3] and rank > 0:
            x[1:] = 0
        before = wire.ledger.link_bytes(GRADIENTS)
        exchange.exchange(
            Vector(x),
            Round(Layout([("weight", (N_OF_BYTES,))]), step=step, rank=rank, world_size=wire.world_size),
            wire,
        )
        exchange.commit()
    return wire.ledger.link_bytes(GRADIENTS) - before


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", SKEWS)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow), 8])
def test_bytes_are_those_of_an_all_reduce_of_k_elements(tmp_path: Path, world_size: int, kind: str) -> None:
    """Within 15% without skew: headers, magnitudes, uneven regions. However skewed, at most 6k numbers."""
    for sent in run_ranks(tmp_path, world_size, _link_bytes, kind):
        if kind == "noise":
            assert sent / 4 <= 1.15 * 2 * (world_size - 1) / world_size * 2 * K_OF_BYTES
        assert sent / 4 <= 6 * K_OF_BYTES


def test_density_1_takes_the_bytes_of_ddp(tmp_path: Path) -> None:
    """Where all elements are sent, positions take nothing."""
    for sent in run_ranks(tmp_path, 3, _dense_bytes):
        assert sent <= 1.02 * link_bytes("all_reduce", 4 * N, 3)


def _dense_bytes(rank: int) -> float:
    wire = Wire()
    context = Round(LAYOUT, rank=rank, world_size=wire.world_size)
    exchange = OkTopK(SparseCodec(TopK(1.0), indices=RunLength16()))
    exchange.exchange(Vector(torch.randn(N, generator=torch.Generator().manual_seed(rank))), context, wire)
    return wire.ledger.link_bytes(GRADIENTS)


def _rounds_of_regions(rank: int) -> list[list[int]]:
    """Where regions begin after each round; what counts moves after the fourth one."""
    wire, found, layout = Wire(), [], Layout([("weight", (3_000,))])
    exchange = OkTopK(SparseCodec(TopK(0.1)), balance_every=3)
    for number in range(8):
        x = torch.randn(3_000, generator=torch.Generator().manual_seed(10 * number + rank))
        x[slice(0, 1_000) if number < 4 else slice(2_000, 3_000)] *= 100
        # As where weights are exchanged in every second step.
        context = Round(layout, step=2 * number + 1, rank=rank, world_size=wire.world_size)
        exchange.exchange(Vector(x), context, wire)
        exchange.commit()
        found.append(exchange.state_dict().get("bounds", torch.tensor([])).tolist())
    return found


def test_regions_are_made_anew_when_they_are_old_or_uneven(tmp_path: Path) -> None:
    rounds = run_ranks(tmp_path, 3, _rounds_of_regions)[0]
    assert rounds[0] == rounds[1] == rounds[2]
    # Old after three rounds; given up after the fifth, of which one rank got everything, and made anew in the sixth.
    assert rounds[3] not in (rounds[2], [])
    assert rounds[4] == []
    assert rounds[5] == rounds[6] == rounds[7] != rounds[3]
