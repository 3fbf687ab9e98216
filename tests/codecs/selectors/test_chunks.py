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
