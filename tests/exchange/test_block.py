"""Blocks that any rank sends, summed exactly or in a sketch; here of one rank."""

from typing import Any

import pytest
import torch

from lightning_sparsecomm.basis import Layout, Round, SparseVector, Vector, Wire
from lightning_sparsecomm.codecs import TopBlocks
from lightning_sparsecomm.exchange import BlockReduce, NonFiniteGradientError

LAYOUT = Layout([("table", (8, 4)), ("bias", (3,))])
CONTEXT = Round(LAYOUT)


def rows(*numbers: int) -> torch.Tensor:
    """A vector whose table is non-zero in some rows."""
    x = torch.zeros(LAYOUT.size)
    for number in numbers:
        x[4 * number : 4 * number + 4] = torch.arange(1.0, 5.0) + number
    return x


def test_all_blocks_that_are_not_zero_are_shared_exactly(wire: Wire) -> None:
    x = rows(1, 6)
    shared, sent, present = BlockReduce().exchange(Vector(x, [True, True]), CONTEXT, wire)
    assert isinstance(shared, SparseVector)
    assert isinstance(sent, SparseVector)
    assert torch.equal(shared.dense(), x)
    assert torch.equal(sent.dense(), x)
    assert shared.indices.numel() == 8
    assert present == [True, True]


def test_the_largest_blocks_are_chosen(wire: Wire) -> None:
    x = rows(0, 1, 2, 3, 4, 5, 6, 7)
    _, sent, _ = BlockReduce(TopBlocks(density=0.25, sparse_below=0.0)).exchange(Vector(x), CONTEXT, wire)
    assert isinstance(sent, SparseVector)
    assert torch.equal(sent.dense()[:32], rows(6, 7)[:32])


def test_a_sparse_vector_is_shared_as_one(wire: Wire) -> None:
    x = rows(1, 6)
    indices = x.nonzero().view(-1)
    whole = BlockReduce().exchange(Vector(x), CONTEXT, wire)
    sparse = BlockReduce().exchange(Vector(x[indices], indices=indices), CONTEXT, wire)
    for ours, theirs in zip(sparse[:2], whole[:2], strict=True):
        assert isinstance(ours, SparseVector)
        assert isinstance(theirs, SparseVector)
        assert torch.equal(ours.dense(), theirs.dense())


@pytest.mark.parametrize("sized_by", ["union", "rank"])
def test_bytes_of_the_sketch(wire: Wire, sized_by: Any) -> None:
    """A bit for each of 9 blocks and two for each of 2 tensors; the sketch; the size of a rank's own, if asked for."""
    exchange = BlockReduce(sketch_ratio=0.5, sized_by=sized_by)
    shared, sent, _ = exchange.exchange(Vector(rows(1, 2, 5, 6)), CONTEXT, wire)
    assert wire.ledger.handed_bytes() == 2 + 4 * 8 + (8 if sized_by == "rank" else 0)
    assert isinstance(shared, SparseVector)
    assert isinstance(sent, SparseVector)
    # What memories forget is exact even so.
    assert torch.equal(sent.dense(), rows(1, 2, 5, 6))
    assert shared.indices.tolist() == sent.indices.tolist()


def test_nothing_to_send(wire: Wire) -> None:
    shared, sent, present = BlockReduce().exchange(Vector(torch.zeros(LAYOUT.size), [False, True]), CONTEXT, wire)
    assert isinstance(shared, SparseVector)
    assert isinstance(sent, SparseVector)
    assert shared.indices.numel() == sent.indices.numel() == 0
    assert present == [False, True]
    assert wire.ledger.handed_bytes() == 2


def test_a_gradient_that_is_not_finite_is_reported(wire: Wire) -> None:
    with pytest.raises(NonFiniteGradientError, match="'table'"):
        BlockReduce().exchange(Vector(torch.zeros(LAYOUT.size), nonfinite_segment=0), CONTEXT, wire)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sketch_ratio": 0}, "sketch_ratio must be a positive number.*got 0"),
        ({"sketch_ratio": True}, "sketch_ratio must be a positive number.*got True"),
        ({"sketch_ratio": float("inf")}, "sketch_ratio must be a positive number.*got inf"),
        ({"sized_by": "most"}, "sized_by must be 'union' .*or 'rank'.*got 'most'"),
        ({"always_sketch": True}, "always_sketch=True needs a sketch; got sketch_ratio=None"),
        ({"sketch_ratio": 0.5, "rows": 0}, "rows must be"),
    ],
)
def test_refuses(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        BlockReduce(**options)
