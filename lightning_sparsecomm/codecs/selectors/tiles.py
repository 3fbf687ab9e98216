"""As many elements of every tile."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparsecomm.basis.arguments import check_whole_number
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.codecs.selectors.base import Selector, k_of
from lightning_sparsecomm.codecs.tiles import largest_in_tiles, matrix_of, regions


@dataclass(frozen=True)
class TileTopK(Selector):
    """Selects the k elements of largest magnitude of every tile, whatever the size of the tile.

    A tile is a square of `side` × `side` elements of a matrix, less at its right and lower edges; a tensor of more
    dimensions counts as a matrix of its first one. A tensor of a single dimension has chunks of `side` elements. These
    are the tiles of `TiledDCT`. Of m elements, exactly min(k, non-zeros) are sent, also where k is most of m. Exact and
    biased, like `ChunkTopK`, from which only k differs: there it is a part of the tile's elements.

    A callback's warm-up sends more: it counts k as a density of k / side².

    Source: DeMo (Peng et al. 2024), with 32 of 64 × 64 coefficients.

    >>> x = torch.tensor([3.0, -4.0, 0.0, 2.0, -0.5, 1.0])
    >>> TileTopK(1, side=2).select(x, Round(Layout([("weight", (2, 2)), ("bias", (2,))])))
    tensor([1, 5])

    Args:
        k: Elements of a tile.
        side: Elements in a row of a tile, and rows in it.

    Raises:
        ValueError: `side` is no whole number of at least 1, or `k` none from 1 to side².
    """

    k: int = 32
    side: int = 64

    def __post_init__(self) -> None:
        check_whole_number("side", self.side, 1, "the elements in a row of a tile", "Use 64, as the paper does.")
        check_whole_number("k", self.k, 1, "the elements of each tile that are sent", "Use 32, as the paper does.")
        if self.k > self.side**2:
            raise ValueError(
                f"k must be at most side², the elements of a tile, {self.side**2}; got {self.k}. Use k={self.side**2}"
                " to send them all."
            )

    def select(self, x: Tensor, context: Round) -> Tensor:
        tile = (self.side, self.side)
        parts = [
            largest_in_tiles(flat.view(matrix_of(segment)), tile, lambda size: self._k_of(size, context))
            + segment.offset
            for segment, flat in zip(context.layout.segments, context.layout.flats(x))
            if segment.size
        ]
        return torch.cat(parts) if parts else x.new_empty(0, dtype=torch.int64)

    def count(self, context: Round) -> int:
        return sum(
            region.tiles * self._k_of(region.height * region.width, context)
            for segment in context.layout.segments
            for region in regions(matrix_of(segment), (self.side, self.side))
        )

    def _k_of(self, size: int, context: Round) -> int:
        return min(size, max(self.k, k_of(context.density(self.k / self.side**2), size)))
