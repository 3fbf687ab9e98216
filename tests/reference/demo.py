"""DeMo in plain NumPy, all ranks in one process: Peng et al. 2024, algorithm 1, with rates in δ, as in its public code.

δ ← β·δ + lr·g;   q ← the k largest of each tile's DCT of δ;   δ ← δ − IDCT(q)
w ← (1 − lr·λ)·w − lr·sign(IDCT(the mean of the ranks' q))
"""

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def dct(x: Array) -> Array:
    """Of a list of numbers: the orthonormal DCT-II, as it is defined."""
    n = len(x)
    scales = [math.sqrt(1 / n), *[math.sqrt(2 / n)] * (n - 1)]
    return np.array(
        [scales[i] * sum(x[j] * math.cos(math.pi * i * (2 * j + 1) / (2 * n)) for j in range(n)) for i in range(n)]
    )


def idct(x: Array) -> Array:
    """Its inverse, the orthonormal DCT-III."""
    n = len(x)
    scales = [math.sqrt(1 / n), *[math.sqrt(2 / n)] * (n - 1)]
    return np.array(
        [sum(scales[i] * x[i] * math.cos(math.pi * i * (2 * j + 1) / (2 * n)) for i in range(n)) for j in range(n)]
    )


def of_tile(tile: Array, inverse: bool = False) -> Array:
    """Rows, then columns."""
    one = idct if inverse else dct
    rows = np.array([one(row) for row in tile])
    return np.array([one(column) for column in rows.T]).T


class DeMoReference:
    """Tensors of these shapes."""

    def __init__(self, ranks: int, shapes: list[tuple[int, ...]], k: int, side: int, decay: float) -> None:
        self.shapes, self.k, self.side, self.decay = shapes, k, side, decay
        self.kept = [[np.zeros(self.matrix(shape)) for shape in shapes] for _ in range(ranks)]

    @staticmethod
    def matrix(shape: tuple[int, ...]) -> tuple[int, int]:
        """One row where there is no more than one dimension."""
        size = int(np.prod(shape))
        return (1, size) if len(shape) < 2 else (shape[0], size // max(1, shape[0]))

    def tiles(self, shape: tuple[int, ...]) -> list[tuple[slice, slice]]:
        """Where the tiles of a tensor are."""
        rows, columns = self.matrix(shape)
        return [
            (slice(top, min(top + self.side, rows)), slice(left, min(left + self.side, columns)))
            for top in range(0, rows, self.side)
            for left in range(0, columns, self.side)
        ]

    def largest(self, x: Array) -> Array:
        """The k largest, and zeros elsewhere."""
        order = sorted(np.ndindex(*x.shape), key=lambda place: -abs(x[place]))
        found = np.zeros_like(x)
        for place in order[: self.k]:
            found[place] = x[place]
        return found

    def step(self, weights: list[Array], gradients: list[list[Array]], rate: float, decay: float) -> list[Array]:
        """The next weights. `gradients` holds those of each rank, in the tensors' shapes; `decay` is λ."""
        stepped = []
        for number, shape in enumerate(self.shapes):
            for rank, own in enumerate(gradients):
                self.kept[rank][number] = self.decay * self.kept[rank][number] + rate * own[number].reshape(
                    self.matrix(shape)
                )
            direction = np.zeros(self.matrix(shape))
            for tile in self.tiles(shape):
                total = np.zeros_like(direction[tile])
                for kept in self.kept:
                    sent = self.largest(of_tile(kept[number][tile]))
                    kept[number][tile] -= of_tile(sent, inverse=True)
                    total += sent
                direction[tile] = of_tile(total / len(self.kept), inverse=True)
            stepped.append((1 - rate * decay) * weights[number] - rate * np.sign(direction).reshape(shape))
        return stepped
