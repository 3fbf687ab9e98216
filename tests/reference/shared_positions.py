"""Random-k and aligned top-k in plain NumPy, all ranks in one process, with the draws of the ranks.

Gradients are one vector of several tensors. What a rank does not send stays in its residual.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


class SharedPositions:
    """Sums at positions that all ranks have in common. `choose` is given all ranks' vectors, and names them."""

    def __init__(self, ranks: int, size: int, choose: Callable[[list[Vector]], list[int]]) -> None:
        self.residuals = [np.zeros(size) for _ in range(ranks)]
        self.choose = choose

    def step(self, gradients: list[Vector]) -> Vector:
        """One round: what all ranks share. Updates the residuals."""
        shared = np.zeros(len(gradients[0]))
        for residual, gradient in zip(self.residuals, gradients):
            residual += gradient
        for position in self.choose(self.residuals):
            shared[position] = sum(residual[position] for residual in self.residuals) / len(self.residuals)
            for residual in self.residuals:
                residual[position] = 0
        return shared


def one_of_each_part(size: int, k: int, chances: Vector) -> list[int]:
    """A position from each of k parts of the vector, by a number in [0, 1) for each."""
    positions = []
    for part in range(k):
        start, end = part * size // k, (part + 1) * size // k
        positions.append(start + int(chances[part] * (end - start)))
    return positions


def largest_blocks(
    vectors: list[Vector], sizes: list[int], density: float, block: int, signs: NDArray[np.int64]
) -> list[int]:
    """The blocks of each tensor whose sum over ranks has the largest products with the signs."""
    total, positions, start = np.sum(vectors, axis=0), [], 0
    for size in sizes:
        blocks = [list(range(at, min(at + block, start + size))) for at in range(start, start + size, block)]
        energies = [float(np.square(total[places] @ signs[: len(places)]).sum()) for places in blocks]
        k = min(len(blocks), max(1, round(density * len(blocks))))
        for number in sorted(range(len(blocks)), key=lambda i: -energies[i])[:k]:
            positions += blocks[number]
        start += size
    return positions
