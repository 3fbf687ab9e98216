"""The discrete cosine transform of tiles."""

import numpy as np
import pytest
import torch

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.codecs import TiledDCT
from lightning_sparsecomm.codecs.transforms import _whole_cosines, _whole_numbers, cosines
from tests.reference.demo import DeMoReference, dct, of_tile

SHAPES = [(20, 13), (13,), (), (0, 3), (9, 2, 3), (1, 9)]
LAYOUT = Layout((str(number), shape) for number, shape in enumerate(SHAPES))


def x_of(layout: Layout, seed: int = 0) -> torch.Tensor:
    return torch.randn(layout.size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("n", [1, 2, 7, 64])
def test_cosines_are_the_definition_and_orthonormal(n: int) -> None:
    matrix = cosines(n, torch.float64, torch.device("cpu"))
    x = x_of(Layout([("x", (n,))]))
    np.testing.assert_allclose((matrix @ x).numpy(), dct(x.numpy()), atol=1e-12)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(n, dtype=torch.float64))


@pytest.mark.parametrize("side", [1, 4, 9, 64])
def test_tiles_are_transformed_in_place_and_back(side: int) -> None:
    x, transform = x_of(LAYOUT), TiledDCT(side)
    before = x.clone()
    transformed = transform.forward(x, LAYOUT)
    assert torch.equal(x, before)
    torch.testing.assert_close(transform.inverse(transformed, LAYOUT), x, rtol=0, atol=2e-6)
    for segment, found, own in zip(LAYOUT.segments, LAYOUT.flats(transformed), LAYOUT.flats(x)):
        matrix = DeMoReference.matrix(segment.shape)
        for tile in DeMoReference(1, [segment.shape], 1, side, 1).tiles(segment.shape) if segment.size else []:
            expected = of_tile(own.view(matrix).numpy()[tile])
            np.testing.assert_allclose(found.view(matrix).numpy()[tile], expected, atol=1e-12)


def test_large_tensors_are_transformed_in_strips() -> None:
    layout = Layout([("weight", (200, 2100)), ("long", (300_000,))])
    x = x_of(layout)
    transformed = TiledDCT().forward(x, layout)
    torch.testing.assert_close(TiledDCT().inverse(transformed, layout), x, rtol=0, atol=2e-6)
    # What lies in different strips is transformed alike.
    weight, long = layout.views(x)
    matrix = cosines(64, torch.float64, torch.device("cpu"))
    torch.testing.assert_close(
        layout.views(transformed)[0][128:192, 1984:2048], matrix @ weight[128:192, 1984:2048] @ matrix.T
    )
    torch.testing.assert_close(layout.views(transformed)[1][299_904:299_968], matrix @ long[299_904:299_968])


def test_float32_is_exact_to_round_off() -> None:
    x = x_of(LAYOUT).float()
    there = TiledDCT().forward(x, LAYOUT)
    assert there.dtype == torch.float32
    torch.testing.assert_close(there.norm(), x.norm())
    torch.testing.assert_close(TiledDCT().inverse(there, LAYOUT), x, rtol=0, atol=2e-6)


def test_the_way_back_has_the_same_bits_in_any_order() -> None:
    """Its sums are of whole numbers that float64 holds, even of the largest that can occur."""
    layout = Layout([("weight", (128, 192))])
    x = x_of(layout, 3).float() * torch.logspace(-30, 30, 192).repeat(128)
    # A tile whose coefficients are all as large as its units allow.
    x.view(128, 192)[:64, :64] = 2.0**20
    whole = TiledDCT().inverse(x, layout).view(128, 192)
    one = Layout([("tile", (64, 64))])
    for top, left in ((0, 0), (64, 0), (64, 128)):
        tile = x.view(128, 192)[top : top + 64, left : left + 64].flatten()
        alone = TiledDCT().inverse(tile, one).view(64, 64)
        assert torch.equal(alone, whole[top : top + 64, left : left + 64])
        values, unit = (part.view(-1, part.shape[-1]) for part in _whole_numbers(tile.double().view(1, 64, 1, 64)))
        cosines_ = _whole_cosines(64, torch.device("cpu"))
        assert float(values.abs().max()) >= 2**22
        # NumPy sums integers exactly.
        exact = cosines_.T.long().numpy() @ values.long().numpy()
        assert np.abs(exact).max() < 2**53
        assert ((cosines_.T @ values).numpy() == exact).all()
        assert float(unit.log2()) % 1 == 0


def test_small_tiles_beside_large_ones_are_not_rounded_away() -> None:
    layout = Layout([("weight", (64, 128)), ("zeros", (64,))])
    x = x_of(layout).float()
    x.view(-1)[layout.segments[1].offset :] = 0
    layout.views(x)[0][:, 64:] *= 1e-30
    back = TiledDCT().inverse(TiledDCT().forward(x, layout), layout)
    torch.testing.assert_close(layout.views(back)[0][:, 64:], layout.views(x)[0][:, 64:], rtol=1e-3, atol=1e-36)
    assert not layout.views(back)[1].any()


@pytest.mark.parametrize("side", [0, 2.5, True, 2000])
def test_a_side_is_a_whole_number(side: object) -> None:
    with pytest.raises((ValueError, TypeError), match=r"side must be (a whole number, )?at (least 1|most 1024)"):
        TiledDCT(side)  # type: ignore[arg-type]
