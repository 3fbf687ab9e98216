"""The ranks' status: which gradients they have, and whose is not finite. Here ranks are joined by hand."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout, Round, SparseVector, Vector, Wire
from lightning_sparsecomm.codecs import Envelope, PayloadError
from lightning_sparsecomm.exchange.status import (
    NonFiniteGradientError,
    agree,
    masked,
    read_counts,
    read_envelopes,
    union_of,
    write_counts_,
)

LAYOUT = Layout([("a", (2,)), ("b", (3,)), ("c", (1,))])
CONTEXT = Round(LAYOUT, step=4)


def vector(present: Sequence[bool] = (), nonfinite_segment: int | None = None) -> Vector:
    return Vector(torch.zeros(LAYOUT.size), present, nonfinite_segment=nonfinite_segment)


RANKS = [
    ([[True, True, True], []], [True, True, True]),
    ([[False, False, True], [False, True, False]], [False, True, True]),
    ([[False] * 3, [False] * 3], [False] * 3),
    ([[True, False, False]], [True, False, False]),
]


class OneAfterAnother:
    """A wire that joins each bitmap with those before it, as if ranks came one after another."""

    def __init__(self) -> None:
        self.joined = torch.zeros(1, dtype=torch.uint8)

    def all_reduce_or_(self, bitmap: Tensor) -> Tensor:
        self.joined = self.joined | bitmap
        return self.joined


@pytest.mark.parametrize(("ranks", "anyone"), RANKS)
def test_present_is_who_has_a_gradient_on_any_rank_however_it_travels(
    wire: Wire, ranks: list[list[bool]], anyone: list[bool]
) -> None:
    vectors = [vector(present) for present in ranks]
    joining: Any = OneAfterAnother()
    assert [agree(each, CONTEXT, joining) for each in vectors][-1] == anyone
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        counts = torch.zeros(len(vectors), 3, dtype=dtype)
        for row, each in zip(counts, vectors, strict=True):
            write_counts_(row, each)
        assert read_counts(counts.sum(0), vectors[0], CONTEXT, wire) == anyone
    nothing = torch.empty(0, dtype=torch.uint8)
    envelopes = [Envelope(nothing, present or None, None) for present in ranks]
    assert read_envelopes(envelopes, CONTEXT) == anyone
    assert wire.ledger.rows == {}


def test_positions_share_a_bitmap_with_the_status() -> None:
    joining: Any = OneAfterAnother()
    union_of(torch.tensor([0, 1]), 2, vector([True, False, False]), CONTEXT, joining)
    # Two positions, then two bits for each of three segments.
    assert joining.joined.tolist() == [0b00000111]
    joining.joined = torch.tensor([0b00001010], dtype=torch.uint8)
    found, present = union_of(torch.tensor([0]), 2, vector([True, False, False]), CONTEXT, joining)
    assert (found.tolist(), present) == ([0, 1], [True, True, False])


def test_a_rank_agrees_with_itself(wire: Wire) -> None:
    assert agree(vector(), CONTEXT, wire) == [True] * 3
    assert agree(vector([False, True, False]), CONTEXT, wire) == [False, True, False]
    # Two bits for each of three tensors.
    assert wire.ledger.handed_bytes() == 2


def test_one_that_is_not_finite_is_named_however_it_travels(wire: Wire) -> None:
    bad, text = vector(nonfinite_segment=1), r"rank 0 has a gradient that is not finite, for parameter 'b' in step 4"
    counts = torch.zeros(3)
    write_counts_(counts, bad)
    assert [math.isnan(count) for count in counts.tolist()] == [False, True, False]
    envelopes = [Envelope(torch.empty(0, dtype=torch.uint8), None, 1)]
    for find in (
        lambda: agree(bad, CONTEXT, wire),
        lambda: union_of(torch.tensor([1]), 2, bad, CONTEXT, wire),
        lambda: read_counts(counts + torch.ones(3), bad, CONTEXT, wire),
        lambda: read_envelopes(envelopes, CONTEXT),
    ):
        with pytest.raises(NonFiniteGradientError, match=text):
            find()


def test_the_first_envelope_that_says_so_is_the_one_named() -> None:
    nothing = torch.empty(0, dtype=torch.uint8)
    envelopes = [Envelope(nothing, None, None), Envelope(nothing, None, 2), Envelope(nothing, None, 0)]
    with pytest.raises(NonFiniteGradientError, match=r"rank 1 .*'c'"):
        read_envelopes(envelopes, CONTEXT)


def test_the_message_names_what_is_exchanged() -> None:
    error = NonFiniteGradientError.of(0, Round(LAYOUT, step=9, quantity="weight update"), rank=3)
    assert "rank 3 has a weight update that is not finite, for parameter 'a' in step 9" in str(error)


def _sparse(x: Tensor) -> SparseVector:
    return SparseVector(x.nonzero().view(-1), x[x != 0], x.numel())


@pytest.mark.parametrize(
    ("present", "kept"),
    [
        ([True, False, True], [1, 2, 0, 0, 0, 6]),
        ([False, True, False], [0, 0, 0, 4, 5, 0]),
        ([False] * 3, [0] * 6),
        ([True] * 3, [1, 2, 0, 4, 5, 6]),
        ([], [1, 2, 0, 4, 5, 6]),
        (None, [1, 2, 0, 4, 5, 6]),
    ],
)
def test_masked_drops_what_belongs_to_segments_that_are_not_present(
    present: Sequence[bool] | None, kept: list[float]
) -> None:
    x = torch.tensor([1.0, 2, 0, 4, 5, 6])
    sparse = masked(_sparse(x), present, LAYOUT)
    assert isinstance(sparse, SparseVector)
    assert sparse.size == 6
    assert sparse.indices.tolist() == torch.tensor(kept).nonzero().view(-1).tolist()
    assert sparse.dense().tolist() == kept
    dense = masked(x, present, LAYOUT)
    assert isinstance(dense, Tensor)
    assert dense.tolist() == kept
    # All ranks may share what it was given.
    assert x.tolist() == [1, 2, 0, 4, 5, 6]


@pytest.mark.parametrize("lost", range(5))
def test_a_union_without_what_this_rank_gave_was_altered(lost: int) -> None:
    class Altering(OneAfterAnother):
        def all_reduce_or_(self, bitmap: Tensor) -> Tensor:
            return super().all_reduce_or_(bitmap) & ~(1 << lost)

    joining: Any = Altering()
    with pytest.raises(PayloadError, match="in step 4, as received, lacks what this rank gave"):
        union_of(torch.tensor([0, 1]), 2, vector(), CONTEXT, joining)
