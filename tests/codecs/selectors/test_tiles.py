"""TileTopK: as many elements of every tile."""

import numpy as np
import pytest
import torch

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.schedules import Warmup
from lightning_sparsecomm.codecs import ChunkTopK, TileTopK
from tests.reference.demo import DeMoReference

LAYOUT = Layout([("weight", (20, 13)), ("bias", (13,)), ("scalar", ()), ("none", (0, 3)), ("filter", (9, 2, 3))])


@pytest.mark.parametrize(("k", "side"), [(1, 1), (3, 4), (7, 5), (100, 64)])
def test_the_largest_of_every_tile(k: int, side: int) -> None:
    x = torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(1))
    x[5:9] = 0
    chosen = torch.zeros(LAYOUT.size, dtype=torch.bool)
    context = Round(LAYOUT)
    selected = TileTopK(k, side).select(x, context)
    assert bool((selected.diff() > 0).all())
    chosen[selected] = True
    most = 0
    for segment, mask, flat in zip(LAYOUT.segments, LAYOUT.flats(chosen), LAYOUT.flats(x)):
        matrix = DeMoReference.matrix(segment.shape)
        for tile in DeMoReference(1, [segment.shape], k, side, 1).tiles(segment.shape) if segment.size else []:
            values = np.abs(flat.view(matrix).numpy()[tile])
            expected = np.sort(values[values > 0].ravel())[::-1][:k]
            assert np.sort(values[mask.view(matrix).numpy()[tile]])[::-1].tolist() == expected.tolist()
            most += min(k, values.size)
    assert TileTopK(k, side).count(context) == most


def test_large_weights_are_selected_as_in_tiles_of_a_density() -> None:
    layout = Layout([("weight", (128, 4480))])
    x = torch.randn(layout.size, generator=torch.Generator().manual_seed(1))
    found = [selector.select(x, Round(layout)) for selector in (TileTopK(32), ChunkTopK(1 / 128, 4096, tiles=True))]
    assert torch.equal(*found)


def test_a_warmup_sends_more() -> None:
    layout = Layout([("weight", (8, 8)), ("bias", (8,))])
    early = Round(layout, step=0, warmup=Warmup(steps=10))
    assert TileTopK(2, 8).count(Round(layout)) == 4
    assert TileTopK(2, 8).count(early) > 20


@pytest.mark.parametrize(
    ("k", "side", "words"),
    [(0, 8, "k must be a whole number, at least 1"), (65, 8, "k must be at most side², .* 64; got 65. Use k=64")],
)
def test_bad_arguments(k: int, side: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TileTopK(k, side)
