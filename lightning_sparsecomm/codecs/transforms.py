"""Invertible maps of a vector, after which few elements hold most of it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lightning_sparsecomm.basis.arguments import check_whole_number
from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.parts import Part
from lightning_sparsecomm.codecs.tiles import Region, matrix_of, regions


class Transform(Part, ABC):
    """Maps a vector over a layout to another one, tensor by tensor, and back. Linear, orthonormal, frozen and pure.

    Linear: the mean over ranks may be taken of what is transformed. Orthonormal: norms stay, so what is largest in the
    transform is what matters most. A tensor of zeros stays one.

    >>> class Reversed(Transform):
    ...     # Each tensor from its end to its beginning.
    ...     def forward(self, x: Tensor, layout: Layout) -> Tensor:
    ...         return torch.cat([flat.flip(0) for flat in layout.flats(x)])
    ...     def inverse(self, x: Tensor, layout: Layout) -> Tensor:
    ...         return self.forward(x, layout)
    >>> Reversed().forward(torch.tensor([1.0, 2.0, 5.0]), Layout([("weight", (2,)), ("bias", (1,))]))
    tensor([2., 1., 5.])
    """

    @abstractmethod
    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """The transform of `x`, `[layout.size]` float32 or wider: of the same shape and dtype, in other memory."""

    @abstractmethod
    def inverse(self, x: Tensor, layout: Layout) -> Tensor:
        """The vector whose transform is `x`, to the round-off of float32; arguments and result as for `forward`.

        Equal vectors give equal bits, on every device and with any number of threads: ranks invert what they share.
        """


@dataclass(frozen=True)
class TiledDCT(Transform):
    """The discrete cosine transform of every tile of every tensor (DCT-II, orthonormal), in the tile's own place.

    A tile X of h × w elements becomes D_h · X · D_wᵀ, where D_n[i, j] = √(2/n) · cos(π·i·(2j + 1) / 2n), and D_n[0, j]
    = √(1/n). Tiles are those of `TileTopK`: squares of `side` × `side` of a matrix, less at its edges; chunks of `side`
    elements of a tensor of one dimension. Takes 4 · side multiplications and additions for each element, in two
    products of matrices.

    A library's product may round differently on another processor, and signs would turn. So the way back multiplies
    whole numbers, in float64: every tile in units of 2^-23 of its largest element, and cosines of 2^-24. Their sums are
    exact, and errors about those of float32.

    Source: DeMo (Peng et al. 2024). Its public code takes the largest divisor of a dimension up to 64 as a tile's side;
    there are no smaller tiles at the edges, but tiles of one element where a dimension is a prime above 64.

    >>> x = torch.tensor([1.0, 2.0, 3.0, 6.0])
    >>> transformed = TiledDCT(side=2).forward(x, Layout([("weight", (2, 2))]))
    >>> transformed.round(decimals=4)
    tensor([ 6., -2., -3.,  1.])
    >>> TiledDCT(side=2).inverse(transformed, Layout([("weight", (2, 2))])).round(decimals=4)
    tensor([1., 2., 3., 6.])

    Args:
        side: Elements in a row of a tile, and rows in it.

    Raises:
        ValueError: `side` is no whole number from 1 to 1,024.
    """

    side: int = 64

    def __post_init__(self) -> None:
        check_whole_number("side", self.side, 1, "the elements in a row of a tile", "Use 64, as the paper does.")
        if self.side > _LARGEST_SIDE:
            raise ValueError(
                f"side must be at most {_LARGEST_SIDE}, up to which sums are exact; got {self.side}. Use 64, as the"
                " paper does."
            )

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        return self._applied(x, layout, _forward)

    def inverse(self, x: Tensor, layout: Layout) -> Tensor:
        return self._applied(x, layout, _inverse)

    def _applied(self, x: Tensor, layout: Layout, of_region: Callable[[Tensor, Region], Tensor]) -> Tensor:
        result = torch.empty_like(x)
        for segment, flat, into in zip(layout.segments, layout.flats(x), layout.flats(result)):
            matrix = matrix_of(segment)
            for region in regions(matrix, (self.side, self.side), x.device):
                top, bottom, _, left, right, _ = region
                part = flat.view(matrix)[top:bottom, left:right]
                into.view(matrix)[top:bottom, left:right] = of_region(part, region).view(part.shape)
        return result


@lru_cache(maxsize=256)
def cosines(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The orthonormal DCT-II as a matrix: `[n, n]`, whose rows are the cosines."""
    i = torch.arange(n, dtype=torch.float64)
    matrix = torch.cos(math.pi / (2 * n) * i[:, None] * (2 * i + 1)) * math.sqrt(2 / n)
    matrix[0] = math.sqrt(1 / n)
    return matrix.to(device, dtype)


def _forward(part: Tensor, region: Region) -> Tensor:
    """All tiles of a region."""
    if region.height > 1:
        part = cosines(region.height, part.dtype, part.device) @ part.unflatten(0, (-1, region.height))
    if region.width > 1:
        part = part.reshape(-1, region.width) @ cosines(region.width, part.dtype, part.device).T
    return part


def _inverse(part: Tensor, region: Region) -> Tensor:
    """All tiles of a region, back. Sums are of whole numbers below 2^53: exact in float64, in whatever order."""
    _, _, height, _, _, width = region
    tiles: Tensor = part.double().unflatten(0, (-1, height)).unflatten(2, (-1, width))
    if height > 1:
        whole, unit = _whole_numbers(tiles)
        summed = _whole_cosines(height, part.device).T @ whole.flatten(2)
        tiles = summed.view(tiles.shape) * (unit * _COSINE_UNIT)
    if width > 1:
        whole, unit = _whole_numbers(tiles)
        summed = whole.reshape(-1, width) @ _whole_cosines(width, part.device)
        tiles = summed.view(tiles.shape) * (unit * _COSINE_UNIT)
    return tiles.to(part.dtype)


# A value has 23 bits, a cosine 24. Cosines that are summed have norm 1, and so their magnitudes add up to √n at most: a
# sum of products is below √n · 2^47.
_VALUE_BITS = 23
_COSINE_UNIT = 2.0**-24
_LARGEST_SIDE = 1024


@lru_cache(maxsize=256)
def _whole_cosines(n: int, device: torch.device) -> Tensor:
    # Rounded, so that processors whose cosine differs in its last bit have the same.
    whole: Tensor = cosines(n, torch.float64, torch.device("cpu")) / _COSINE_UNIT
    return whole.round().to(device)


def _whole_numbers(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Tiles as whole multiples, at most 2^23, of a power of two for each, `[Y, height, X, width]`."""
    largest = tiles.abs().amax((1, 3), keepdim=True)
    # Made of its bits: a power, as a function, may be rounded.
    exponent = torch.frexp(largest).exponent.clamp(min=-900).long() - _VALUE_BITS
    unit = torch.bitwise_left_shift(exponent + 1023, 52).view(torch.float64)
    return (tiles / unit).round(), unit
