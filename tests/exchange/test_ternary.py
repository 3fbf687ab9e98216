"""Votes, and sums of −1, 0 and 1."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout, Ledger, Round, Vector, Wire
from lightning_sparsecomm.basis.ledger import GRADIENTS
from lightning_sparsecomm.basis.mirror import MirrorWire
from lightning_sparsecomm.codecs import Digits, PayloadError
from lightning_sparsecomm.exchange import MajorityVote, TernarySum
from lightning_sparsecomm.exchange.ternary import _largest_of
from lightning_sparsecomm.testing import run_ranks
from tests.codecs.draws import DRAWS, check_mean_of

VOTES = [
    [1.0, -2.0, 0.0, 3.0, 1.0, -1.0, 0.0],
    [0.5, -1.0, 0.0, -1.0, 0.0, 1e-30, 2.0],
    [-9.0, -1.0, 0.0, 0.0, 0.0, 0.0, -9.0],
]


def _vote(rank: int) -> tuple[list[float], list[float]]:
    values = torch.tensor(VOTES[rank])
    context = Round(Layout([("weight", (7,))]), rank=rank, world_size=3)
    exchanged = MajorityVote().exchange(Vector(values), context, Wire())
    assert isinstance(exchanged.shared, Tensor) and isinstance(exchanged.sent, Tensor)
    return exchanged.shared.tolist(), exchanged.sent.tolist()


def test_most_ranks_decide_and_zeros_do_not_vote() -> None:
    for votes, (shared, sent) in zip(VOTES, run_ranks(3, _vote)):
        assert shared == [1, -1, 0, 0, 1, 0, 0]
        assert sent == [(v > 0) - (v < 0) for v in votes]


def _absent(rank: int) -> list[float]:
    layout = Layout([("first", (2,)), ("second", (2,)), ("third", (1,))])
    present = [[True, False, False], [True, True, False], [True, True, False]][rank]
    values = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0] if rank == 0 else [1.0, -1.0, -1.0, 1.0, 0.0])
    context = Round(layout, rank=rank, world_size=3)
    exchanged = MajorityVote().exchange(Vector(values, present), context, Wire())
    assert exchanged.present == [True, True, False]
    assert isinstance(exchanged.shared, Tensor)
    return exchanged.shared.tolist()


def test_a_rank_without_a_gradient_does_not_vote() -> None:
    assert run_ranks(3, _absent) == [[1, -1, -1, 1, 0]] * 3


@pytest.mark.parametrize("clip", [None, 2.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_of_many_draws_is_the_vector(clip: float | None, dtype: torch.dtype) -> None:
    """Clipped to 2.5 root mean squares; none of these is larger."""
    x = torch.tensor([0.9, -0.3, 0.0, 0.02, -2.0, 0.5], dtype=dtype)
    many = x.repeat(DRAWS)
    context = Round(Layout([("weight", (many.numel(),))]), step=3, seed=5)
    exchanged = TernarySum(clip).exchange(Vector(many), context, MirrorWire(1))
    assert isinstance(exchanged.shared, Tensor) and isinstance(exchanged.sent, Tensor)
    assert torch.equal(exchanged.shared, exchanged.sent)
    check_mean_of(exchanged.shared, x)


def test_clipping_limits_what_is_drawn_and_the_scale() -> None:
    x = torch.zeros(100)
    x[0], x[1] = 10.0, -5.0
    context = Round(Layout([("weight", (100,)), ("alike", (3,)), ("zero", (2,)), ("empty", (0,))]))
    vector = Vector(torch.cat([x, torch.full((3,), 1e-30), torch.zeros(2)]))
    exchanged = TernarySum(2.5).exchange(vector, context, MirrorWire(1))
    scale = 2.5 * math.sqrt(125 / 100)
    assert isinstance(exchanged.shared, Tensor)
    assert exchanged.shared[:2].tolist() == pytest.approx([scale, -scale])
    # Elements that are alike are their scale, and what is zero stays so.
    assert exchanged.shared[100:].tolist() == pytest.approx([1e-30] * 3 + [0.0] * 2)


def _shares_scales(rank: int) -> tuple[list[float], Ledger]:
    wire = Wire()
    values = torch.tensor([[4.0, 1.0], [-8.0, 0.0], [8.0, -0.5]][rank])
    context = Round(Layout([("first", (1,)), ("second", (1,))]), rank=rank, world_size=3)
    exchanged = TernarySum().exchange(Vector(values), context, wire)
    assert isinstance(exchanged.shared, Tensor)
    return exchanged.shared.tolist(), wire.ledger


def test_ranks_share_a_scale_and_sums_are_whole_multiples() -> None:
    for shared, ledger in run_ranks(3, _shares_scales):
        assert [3 * shared[0] / 8 % 1, 3 * shared[1] % 1] == pytest.approx([0, 0], abs=1e-6)
        assert abs(shared[0]) in (0, pytest.approx(8 / 3))
        # Scales, then a piece of one word for each rank, then a sum of one word: each in an envelope, those with a
        # status with room for it.
        assert ledger.handed_bytes(GRADIENTS) == (17 + 8) + 3 * (17 + 4) + (16 + 2)


@pytest.mark.parametrize("exchange", [MajorityVote, TernarySum])
@pytest.mark.parametrize("sizes", [(), (0,), (1,), (2, 1), (31,), (1000, 7)])
@pytest.mark.parametrize("ranks", [1, 2, 4, 40])
def test_any_length_and_number_of_ranks(exchange: Any, sizes: tuple[int, ...], ranks: int) -> None:
    """Rehearsed: all ranks do the same, but for which piece is theirs."""
    layout = Layout([(f"p{i}", (size,)) for i, size in enumerate(sizes)])
    values = torch.full((layout.size,), -0.5)
    exchanged = exchange().exchange(Vector(values), Round(layout, world_size=ranks), MirrorWire(ranks))
    found = {float(v) for v in exchanged.shared}
    assert len(exchanged.shared) == layout.size
    assert found <= ({-1.0, 0.0} if exchange is MajorityVote else {-0.5, 0.0})


def test_refuses_scales_that_are_none() -> None:
    layout = Layout([("weight", (2,)), ("bias", (2,))])
    context, x = Round(layout), Vector(torch.ones(4))
    assert _largest_of([1.0, 2.0], x, context, MirrorWire(1)) == [1.0, 2.0]
    for bounds, text in (
        ([-1.0, 2.0], "rank 0's payload: scales: one is not a finite number, or negative"),
        ([math.inf, 2.0], "rank 0's payload: scales: one is not a finite number, or negative"),
    ):
        with pytest.raises(PayloadError, match=text):
            _largest_of(bounds, x, context, MirrorWire(1))


@pytest.mark.parametrize("clip", [0, -1.0, True, "2"])
def test_refuses_other_limits(clip: Any) -> None:
    with pytest.raises(ValueError, match=r"^clip must be positive: times a tensor's root mean square; got"):
        TernarySum(clip)


def test_more_ranks_than_numbers_that_fit_need_a_wider_word() -> None:
    assert [Digits(ranks).per_word for ranks in (1, 2, 4, 8, 19, 127, 128)] == [10, 6, 5, 3, 3, 2, 1]
