"""ChunkTopK: the largest elements of every chunk."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.schedules import Stages
from lightning_sparsecomm.codecs import ChunkTopK
from lightning_sparsecomm.codecs.selectors.candidates import HintedSelector
from tests.codecs.selectors.vectors import vectors
from tests.reference.selection import top_k


@given(vectors(), st.integers(1, 29), st.floats(0, 1, exclude_min=True))
def test_chunks_select_the_largest_of_each(vector, chunk, density):
    x, layout = vector
    context = Round(layout)
    selector = ChunkTopK(density, chunk)
    before = x.clone()
    selected = selector.select(x, context)
    assert selected.dtype == torch.int64
    assert bool((selected.diff() > 0).all())
    remaining, most = selected.tolist(), 0
    for segment in layout.segments:
        for start in range(segment.offset, segment.offset + segment.size, chunk):
            stop = min(start + chunk, segment.offset + segment.size)
            wanted = max(1, round(density * (stop - start)))
            most += wanted
            taken = [i for i in remaining if start <= i < stop]
            remaining = remaining[len(taken) :]
            # Compares magnitudes, because torch chooses among ties.
            magnitudes = np.sort(np.abs(x[start:stop].numpy()))[::-1][:wanted]
            assert np.sort(np.abs(x[taken].numpy()))[::-1].tolist() == magnitudes[magnitudes > 0].tolist()
    assert not remaining
    assert selector.count(context) == most
    assert not isinstance(selector, HintedSelector)
    assert x.numpy().tobytes() == before.numpy().tobytes()


def test_chunks_of_long_tensors():
    x = torch.randn(3 * 4096 + 1000, generator=torch.Generator().manual_seed(2))
    selected = ChunkTopK().select(x, Round(Layout([("weight", (x.numel(),))])))
    assert torch.bincount(selected // 4096).tolist() == [64, 64, 64, round(64 * 1000 / 4096)]
    for chunk in range(3):
        expected = top_k(x[4096 * chunk : 4096 * (chunk + 1)].numpy(), 64, 0)
        assert (selected[64 * chunk : 64 * (chunk + 1)] - 4096 * chunk).tolist() == expected


@pytest.mark.parametrize("shape", [(64, 64), (7, 5), (9, 2, 5), (4, 4), (1, 30), (30, 1), (13,), (), (12, 8)])
def test_tiles_select_the_largest_of_each_square(shape):
    side, density = 4, 0.25
    layout = Layout([("bias", (3,)), ("weight", shape)])
    x = torch.randn(layout.size, generator=torch.Generator().manual_seed(5))
    x[4::7] = 0
    selector, context = ChunkTopK(density, side * side, tiles=True), Round(layout)
    selected = selector.select(x, context)
    assert bool((selected.diff() > 0).all())
    # The bias is one short chunk.
    expected, most = {int(x[:3].abs().argmax())}, 1
    numbers = np.arange(3, layout.size)
    matrix = numbers.reshape(shape[0], -1) if len(shape) > 1 and shape[0] > 1 else numbers.reshape(1, -1)
    height, width = (side, side) if matrix.shape[0] > 1 else (1, side * side)
    for top in range(0, matrix.shape[0], height):
        for left in range(0, matrix.shape[1], width):
            tile = matrix[top : top + height, left : left + width].ravel()
            wanted = max(1, round(density * tile.size))
            most += wanted
            ordered = sorted(tile, key=lambda i: -abs(float(x[i])))
            expected |= {int(i) for i in ordered[:wanted] if x[i] != 0}
    assert set(selected.tolist()) == expected
    assert selector.count(context) == most


def test_density_of_chunks_follows_a_schedule():
    x = torch.arange(1.0, 1001.0)
    layout = Layout([("weight", (1000,))])
    selector = ChunkTopK(Stages([0.5, 0.1], steps=[0, 3]), chunk=100)
    counts = [selector.select(x, Round(layout, step=step)).numel() for step in (0, 2, 3)]
    assert counts == [500, 500, 100]
    assert counts == [selector.count(Round(layout, step=step)) for step in (0, 2, 3)]


@pytest.mark.parametrize(
    ("density", "chunk", "error", "text"),
    [
        (0, 4096, ValueError, r"density must be in \(0, 1\].*got 0"),
        (64, 4096, ValueError, r"density must be in \(0, 1\].*got 64"),
        (True, 4096, TypeError, "density must be a number.*got True"),
        (0.5, -1, ValueError, "chunk must be a whole number, at least 1.*got -1"),
        (0.5, 4096.0, ValueError, "chunk must be a whole number, at least 1.*got 4096.0"),
    ],
)
def test_chunks_refuse_arguments_when_built(density, chunk, error, text):
    with pytest.raises(error, match=text):
        ChunkTopK(density, chunk)


def test_tiles_are_squares():
    with pytest.raises(ValueError, match="chunk must be a square number with tiles=True; got 4097"):
        ChunkTopK(0.5, 4097, tiles=True)
    with pytest.raises(TypeError, match="tiles must be True or False"):
        ChunkTopK(0.5, 4096, tiles=1)
