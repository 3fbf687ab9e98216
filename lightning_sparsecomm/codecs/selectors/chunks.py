"""The largest elements of every chunk."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparsecomm.basis.arguments import check_booleans, check_whole_number
from lightning_sparsecomm.basis.layout import Segment
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.schedules import Density, check_density
from lightning_sparsecomm.codecs.selectors.base import Selector, k_of
from lightning_sparsecomm.codecs.tiles import largest_in_tiles, matrix_of, regions


@dataclass(frozen=True)
class ChunkTopK(Selector):
    """Selects the elements of largest magnitude in every chunk of every tensor.

    A chunk is `chunk` consecutive elements of a tensor; the last one may have fewer. With `tiles`, a chunk of a matrix
    is a square of √chunk × √chunk, less at its right and lower edges. A tensor of more dimensions counts as a matrix of
    its first one, and one of a single dimension has chunks. Of m elements, exactly the
    min(k, non-zeros) largest are sent, with k = min(m, max(1, round(density·m))). Zeros are never sent. Ties for the
    last places may be broken differently on different devices; ranks need not agree, as each sends the positions it
    chose. Exact and biased, like `TopK`, but every part of a tensor is represented.

    Source: SparseLoCo (Sarfi et al. 2025), with 64 of 4096. Here a chunk is consecutive in row-major order, whatever
    the tensor's shape; the public code has tiles.

    >>> from lightning_sparsecomm.basis.layout import Layout
    >>> x = torch.tensor([3.0, -4.0, 0.0, 2.0, -0.5, 1.0])
    >>> ChunkTopK(0.5, chunk=2).select(x, Round(Layout([("weight", (5,)), ("bias", (1,))])))
    tensor([1, 3, 4, 5])

    Args:
        density: Fraction of each chunk to send, in (0, 1], or a schedule of it.
        chunk: Elements in a chunk.
        tiles: Whether chunks of matrices are squares.

    Raises:
        ValueError: `density` is outside (0, 1], or `chunk` is not a whole number of at least 1, or with `tiles` no
            square.
        TypeError: `density` is neither a number nor a schedule, or `tiles` neither True nor False.
    """

    density: Density = 1 / 64
    chunk: int = 4096
    tiles: bool = False

    def __post_init__(self) -> None:
        check_density("density", self.density)
        check_whole_number("chunk", self.chunk, 1, "the elements in a chunk", "Leave it out for its default.")
        check_booleans(tiles=self.tiles)
        if self.tiles and math.isqrt(self.chunk) ** 2 != self.chunk:
            raise ValueError(f"chunk must be a square number with tiles=True; got {self.chunk}. Use 4096, 64 × 64.")

    def select(self, x: Tensor, context: Round) -> Tensor:
        density = context.density(self.density)
        parts = [
            largest_in_tiles(
                x[segment.offset : segment.offset + segment.size].view(matrix), tile, lambda size: k_of(density, size)
            )
            + segment.offset
            for segment, matrix, tile in self._tiled(context)
        ]
        return torch.cat(parts) if parts else x.new_empty(0, dtype=torch.int64)

    def count(self, context: Round) -> int:
        density = context.density(self.density)
        return sum(
            region.tiles * k_of(density, region.height * region.width)
            for _, matrix, tile in self._tiled(context)
            for region in regions(matrix, tile)
        )

    def _tiled(self, context: Round) -> Iterator[tuple[Segment, tuple[int, int], tuple[int, int]]]:
        """Each tensor as a matrix, and the shape of its tiles; chunks are those of a matrix with one row."""
        side = math.isqrt(self.chunk)
        for segment in context.layout.segments:
            rows, columns = matrix_of(segment)
            if self.tiles and rows > 1:
                yield segment, (rows, columns), (side, side)
            else:
                yield segment, (1, segment.size), (1, self.chunk)
