"""Tensors cut into tiles: which stretches of a matrix have tiles of one shape, and the largest elements of each."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparsecomm.basis.layout import Segment
from lightning_sparsecomm.kernels import kernels_for


class Region(NamedTuple):
    """Rows `top` to `bottom` and columns `left` to `right` of a matrix, in which all tiles are `height` × `width`."""

    top: int
    bottom: int
    height: int
    left: int
    right: int
    width: int

    @property
    def tiles(self) -> int:
        """How many tiles there are."""
        return (self.bottom - self.top) // self.height * ((self.right - self.left) // self.width)


def matrix_of(segment: Segment) -> tuple[int, int]:
    """A tensor as a matrix: of its first dimension's rows, or of one row where it has no more than one dimension."""
    rows = segment.shape[0] if segment.size and len(segment.shape) > 1 else 1
    return rows, segment.size // rows


# Elements of a region. On CPUs, what is computed of it stays in the caches.
_MOST, _MOST_ELSEWHERE = 1 << 17, 1 << 25


def regions(matrix: tuple[int, int], tile: tuple[int, int], device: torch.device | None = None) -> Iterator[Region]:
    """A matrix in tiles of a shape: the whole ones, in strips, and what is left at its right and lower edges.

    Strips are narrow on the CPU, which `device` is by default.
    """
    most = _MOST if device is None or device.type == "cpu" else _MOST_ELSEWHERE
    for (top, bottom, height), (left, right, width) in product(*map(_cuts, matrix, tile)):
        wide = max(1, most // (height * width)) * width
        for begin in range(left, right, wide):
            end = min(begin + wide, right)
            high = max(1, most // (height * (end - begin))) * height
            for start in range(top, bottom, high):
                yield Region(start, min(start + high, bottom), height, begin, end, width)


def _cuts(length: int, tile: int) -> list[tuple[int, int, int]]:
    """Whole tiles and the rest: where each begins and ends, and how long a tile is in it."""
    whole = length - length % tile
    return [(begin, end, min(tile, end - begin)) for begin, end in ((0, whole), (whole, length)) if begin < end]


def largest_in_tiles(matrix: Tensor, tile: tuple[int, int], k_of_size: Callable[[int], int]) -> Tensor:
    """Sorted positions, in the flattened matrix, of each tile's min(k, non-zeros) largest magnitudes.

    Args:
        matrix: `[rows, columns]`.
        tile: The shape of its tiles.
        k_of_size: k for a tile of so many elements.
    """
    rows, columns = matrix.shape
    found = []
    for top, bottom, height, left, right, width in regions((rows, columns), tile, matrix.device):
        part = matrix[top:bottom, left:right]
        blocks = part.unflatten(0, (-1, height)).unflatten(2, (-1, width)).transpose(1, 2).reshape(-1, height * width)
        at = kernels_for(blocks.device, blocks.dtype).largest_in_rows(blocks, k_of_size(height * width))
        if rows == 1:
            # Tiles are in order.
            found.append(at.add_(left))
            continue
        # Where that is: block by block, and row by row in each.
        block, within = at // (height * width), at % (height * width)
        across = (right - left) // width
        row = top + block // across * height + within // width
        found.append(row * columns + left + block % across * width + within % width)
    positions = torch.cat(found) if found else matrix.new_empty(0, dtype=torch.int64)
    return positions if rows == 1 else positions.sort().values
