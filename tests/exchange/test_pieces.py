"""Tensors cut into a piece for each rank, and joined."""

import pytest
import torch

from lightning_sparsecomm.basis import Layout, SparseVector
from lightning_sparsecomm.exchange.pieces import Pieces
from tests.one_by_one import OneByOne


@pytest.mark.parametrize("count", [1, 3, 4, 7])
@pytest.mark.parametrize("sizes", [[], [0], [3], [0, 1, 7, 16], [210, 30, 30, 1]])
@pytest.mark.parametrize("held", [0.0, 0.05, 0.5, 1.0])
def test_joined_is_what_was_cut(sizes: list[int], count: int, held: float) -> None:
    """`held`: the part of all elements that pieces hold, and the others are zero."""
    layout = Layout((str(i), (size,)) for i, size in enumerate(sizes))
    generator = torch.Generator().manual_seed(count)
    # Those that fill up a piece are zero in a sound message, but a message may hold anything.
    vector = torch.rand(layout.size, generator=generator) + 1
    pieces = Pieces(layout, count)
    cut = pieces.cut(vector)
    sparse, kept = [], torch.zeros_like(cut, dtype=torch.bool)
    for number, piece in enumerate(cut):
        kept[number] = torch.rand(piece.shape, generator=generator) < held
        indices = kept[number].nonzero()[:, 0]
        sparse.append(SparseVector(indices, piece[indices] + (piece[indices] == 0), len(piece)))
    expected = torch.zeros_like(vector)
    for segment, part in zip(layout.segments, pieces.layout.segments):
        for place in range(segment.size):
            number, within = divmod(place, part.size)
            if kept[number, part.offset + within]:
                expected[segment.offset + place] = vector[segment.offset + place]
    joined = pieces.joined(sparse)
    assert isinstance(joined, SparseVector) == (int(kept.sum()) <= layout.size // 8)
    if isinstance(joined, SparseVector):
        assert bool((joined.indices.diff() > 0).all())
        joined = joined.dense()
    assert torch.equal(joined, expected)
    assert torch.equal(pieces.joined(list(cut)), vector)
    assert torch.equal(pieces.joined([sparse[0].dense(), *sparse[1:]]), expected)


def test_no_piece_is_held_while_the_next_is_made() -> None:
    made, pieces = OneByOne(), Pieces(Layout([("a", (40, 10))]), 4)
    pieces.joined(made.vectors(4, pieces.layout.size))
    assert made.held == [0, 0, 0, 0]
