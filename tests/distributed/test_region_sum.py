"""A sum in regions has the bits of a gather, and sends each position once; which way is taken follows from the cost."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout, Round, SparseVector, Vector, Wire
from lightning_sparsecomm.basis.ledger import GRADIENTS
from lightning_sparsecomm.codecs import (
    Auto,
    BFloat16,
    Float16,
    Float32,
    IndexCoding,
    RunLength16,
    SparseCodec,
    TopK,
    ValueCoding,
)
from lightning_sparsecomm.exchange import Exchange, Gather, NonFiniteGradientError, RegionSum, Sparse
from tests.distributed.launch import run_ranks

N, ROUNDS = 40_000, 5
LAYOUT = Layout([("weight", (N - 300,)), ("bias", (300,))])
KINDS = ["noise", "alike", "in one place", "nothing on rank 1", "no bias on rank 0", "nothing"]


def _dense(vector: SparseVector | Tensor) -> Tensor:
    return vector.dense() if isinstance(vector, SparseVector) else vector


def _vector(rank: int, kind: str, random: torch.Generator, dtype: torch.dtype = torch.float32) -> Vector:
    values = torch.randn(N, generator=random).to(dtype)
    if kind == "nothing" or (kind, rank) == ("nothing on rank 1", 1):
        values.zero_()
    if kind == "alike":
        # Ranks select mostly the same elements, of which some cancel each other.
        values = values * 0.01 + torch.linspace(-3, 3, N, dtype=dtype) * (-1) ** (rank % 2)
    if kind == "in one place":
        values[rank * 1_000 : rank * 1_000 + 3_000] *= 100
    present = [True, True]
    if (kind, rank) == ("no bias on rank 0", 0):
        present[1], values[-300:] = False, 0
    return Vector(values, present)


def _both(
    rank: int, kind: str, density: float, values: ValueCoding, indices: IndexCoding, dtype: torch.dtype
) -> list[tuple[bytes, ...]]:
    """What ranks share, what this one has sent, which segments are present: of a gather, and of a sum in regions."""
    found, codec = [], SparseCodec(TopK(density), values, indices)
    exchanges: list[Exchange] = [Gather(codec), RegionSum(codec, balance_every=3)]
    for exchange in exchanges:
        wire, random = Wire(), torch.Generator().manual_seed(rank)
        for step in range(ROUNDS):
            context = Round(LAYOUT, dtype=dtype, step=step, rank=rank, world_size=wire.world_size)
            exchanged = exchange.exchange(_vector(rank, kind, random, dtype), context, wire)
            exchange.commit()
            # Zero is zero, be it held or not, and whatever its sign.
            parts = [_dense(each).add(0.0).numpy().tobytes() for each in (exchanged.shared, exchanged.sent)]
            found.append((*parts, bytes(exchanged.present)))
    return found


@pytest.mark.few(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow), 4, 5])
def test_shares_the_bits_of_a_gather(tmp_path: Path, world_size: int, kind: str) -> None:
    _check_bits(tmp_path, world_size, kind, 0.01, Float32(), RunLength16(), torch.float32)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("density", "values", "indices", "dtype"),
    [
        (0.01, Float16(), Auto(), torch.float32),
        (0.3, BFloat16(), RunLength16(), torch.float32),
        (0.3, Float32(), Auto(), torch.float32),
        (0.4, Float32(), RunLength16(), torch.float32),
        (0.05, Float32(), RunLength16(), torch.float64),
    ],
)
def test_with_other_codecs_too(
    tmp_path: Path, density: float, values: ValueCoding, indices: IndexCoding, dtype: torch.dtype
) -> None:
    _check_bits(tmp_path, 3, "no bias on rank 0", density, values, indices, dtype)


def _check_bits(tmp_path: Path, world_size: int, *case: object) -> None:
    ranks = run_ranks(tmp_path, world_size, _both, *case)
    for found in ranks:
        gathered, added = found[:ROUNDS], found[ROUNDS:]
        assert gathered == added
        assert [each[::2] for each in found] == [each[::2] for each in ranks[0]]
    if case[0] != "nothing":
        assert np.frombuffer(ranks[0][0][0], np.float32).any()


def _not_finite(rank: int) -> str:
    exchange = RegionSum(SparseCodec(TopK(0.01)))
    context = Round(LAYOUT, rank=rank, world_size=3)
    with pytest.raises(NonFiniteGradientError) as caught:
        exchange.exchange(Vector(torch.zeros(N), nonfinite_segment=1 if rank == 1 else None), context, Wire())
    exchange.abort()
    assert exchange.state_dict() == {}
    return str(caught.value)


def test_all_ranks_are_told_of_a_gradient_that_is_not_finite(tmp_path: Path) -> None:
    (message, *others) = run_ranks(tmp_path, 3, _not_finite)
    assert others == [message] * 2
    assert "bias" in message


def _link_bytes(rank: int, kind: str) -> tuple[float, int]:
    """Of the last of several rounds; and how many positions all ranks have selected."""
    wire, random = Wire(), torch.Generator().manual_seed(rank)
    exchange, before, union = RegionSum(SparseCodec(TopK(0.02))), 0.0, 0
    for step in range(3):
        before = wire.ledger.link_bytes(GRADIENTS)
        context = Round(LAYOUT, step=step, rank=rank, world_size=wire.world_size)
        exchanged = exchange.exchange(_vector(rank, kind, random), context, wire)
        exchange.commit()
        union = int(_dense(exchanged.shared).count_nonzero())
    return wire.ledger.link_bytes(GRADIENTS) - before, union


@pytest.mark.parametrize("kind", ["noise", "alike"])
@pytest.mark.parametrize("world_size", [2, 6])
def test_each_position_is_sent_once(tmp_path: Path, world_size: int, kind: str) -> None:
    """A rank sends what it has selected in others' regions, and its part of the union to each other rank."""
    k = N // 50
    ranks = run_ranks(tmp_path, world_size, _link_bytes, kind)
    union = ranks[0][1]
    # A bitmap where positions are many.
    positions = min(4 * union, N / 8)
    ideal = (8 * k + 4 * union + positions) * (world_size - 1) / world_size
    sent = [each[0] for each in ranks]
    assert np.mean(sent) <= 1.15 * ideal + 400 * world_size
    assert min(sent) >= 0.5 * ideal


def _moving(rank: int) -> list[float]:
    """Bytes of each round, where gradients are in one half of the vector and then in the other."""
    wire, random = Wire(), torch.Generator().manual_seed(rank)
    exchange, found = RegionSum(SparseCodec(TopK(0.05), indices=RunLength16())), []
    for step in range(6):
        x = torch.randn(N, generator=random)
        x[: N // 2] *= step % 2
        x[N // 2 :] *= 1 - step % 2
        before = wire.ledger.link_bytes(GRADIENTS)
        context = Round(Layout([("weight", (N,))]), step=step, rank=rank, world_size=wire.world_size)
        exchange.exchange(Vector(x), context, wire)
        exchange.commit()
        found.append(wire.ledger.link_bytes(GRADIENTS) - before)
    return found


def test_regions_that_do_not_fit_cost_no_more_than_evening_out(tmp_path: Path) -> None:
    ranks = run_ranks(tmp_path, 8, _moving)
    rounds = np.mean(ranks, axis=0)
    assert np.max(rounds) <= 2 * np.min(rounds)


def _overflowing(rank: int) -> tuple[float, float]:
    x = torch.zeros(10)
    x[3], x[7] = 3e38, 1.0
    exchanged = RegionSum(SparseCodec(TopK(0.2))).exchange(
        Vector(x), Round(Layout([("weight", (10,))]), rank=rank, world_size=2), Wire()
    )
    shared = _dense(exchanged.shared)
    return float(shared[3]), float(shared[7])


def test_a_sum_that_overflows_is_the_largest_number(tmp_path: Path) -> None:
    largest = float(torch.finfo(torch.float32).max)
    assert run_ranks(tmp_path, 2, _overflowing) == [(largest, 1.0)] * 2


def _chosen(rank: int, kind: str, density: float) -> list[tuple[str, float]]:
    exchange, wire, random = Sparse(SparseCodec(TopK(density))), Wire(), torch.Generator().manual_seed(rank)
    found = []
    for step in range(ROUNDS):
        context = Round(Layout([("weight", (N,))]), step=step, rank=rank, world_size=wire.world_size)
        # Beyond what calls take.
        way = exchange.way(context, wire.world_size, wire.far)
        exchange.exchange(Vector(_vector(rank, kind, random).values), context, wire)
        exchange.abort() if step == 0 else exchange.commit()
        state = exchange.state_dict()
        found.append((way, float(state["positions"]) if "positions" in state else 0.0))
    again = Sparse(SparseCodec(TopK(density)))
    again.load_state_dict(exchange.state_dict())
    assert again.way(context, wire.world_size) == exchange.way(context, wire.world_size)
    return found


def test_the_way_follows_what_ranks_have_selected(tmp_path: Path) -> None:
    alike, apart = (run_ranks(tmp_path, 4, _chosen, kind, 0.25) for kind in ("alike", "in one place"))
    for ranks in (alike, apart):
        assert all(found == ranks[0] for found in ranks)
        # An aborted round tells nothing.
        assert ranks[0][0][1] == 0
    assert alike[0][-1][0] == "regions"
    assert alike[0][-1][1] < 1.5
    assert 2 < apart[0][-1][1] < 4
