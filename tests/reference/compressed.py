"""An all-reduce of the largest elements in plain NumPy, all ranks in one process.

Every tensor is cut into one piece for each rank; a rank's share is its piece of all tensors. A rank sends the largest
elements of each other rank's share. The owner adds them to its own share, takes the mean over ranks, and sends the
largest elements of that. What was not sent stays in residuals: the rank's own; and the owner's, W times.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


class CompressedReference:
    """Tensors of these sizes. `rounded` says what becomes of the values sent together."""

    def __init__(self, ranks: int, sizes: list[int], density: float, rounded: Callable[[Vector], Vector]) -> None:
        self.ranks, self.density, self.rounded = ranks, density, rounded
        self.residuals = [np.zeros(sum(sizes)) for _ in range(ranks)]
        self.lengths = [math.ceil(size / ranks) for size in sizes]
        ends = np.cumsum(sizes)
        # The positions of each rank's share, tensor by tensor.
        self.shares = [
            [
                np.arange(end - size, end)[owner * length : (owner + 1) * length]
                for end, size, length in zip(ends, sizes, self.lengths)
            ]
            for owner in range(ranks)
        ]

    def step(self, gradients: list[Vector]) -> Vector:
        """One round: what all ranks share. Updates the residuals."""
        shared = np.zeros_like(gradients[0])
        for residual, gradient in zip(self.residuals, gradients):
            residual += gradient
        for owner, share in enumerate(self.shares):
            positions = np.concatenate(share)
            total = np.zeros(len(positions))
            for rank, residual in enumerate(self.residuals):
                sent = residual[positions] if rank == owner else self.largest(residual, share)
                total += sent
                residual[positions] -= sent
            whole = np.zeros_like(shared)
            whole[positions] = total / self.ranks
            kept = self.largest(whole, share)
            shared[positions] = kept
            self.residuals[owner][positions] += self.ranks * (whole[positions] - kept)
        return shared

    def largest(self, vector: Vector, share: list[NDArray[np.int64]]) -> Vector:
        """Of a share, the largest elements of each tensor, rounded together; zeros elsewhere."""
        chosen: list[bool] = []
        for positions, count in zip(share, self.counts()):
            order = np.argsort(-np.abs(vector[positions]), kind="stable")[:count]
            chosen += [place in order for place in range(len(positions))]
        values, mask = (
            vector[np.concatenate(share)],
            np.array(chosen, dtype=bool) & (vector[np.concatenate(share)] != 0),
        )
        found = np.zeros(len(values))
        found[mask] = self.rounded(values[mask])
        return found

    def counts(self) -> list[int]:
        """How many elements of each tensor's piece: in proportion to the root of its length, at most its length."""
        left, counts = self.density * sum(self.lengths), [0] * len(self.lengths)
        remaining = sorted(range(len(self.lengths)), key=lambda index: self.lengths[index])
        while remaining:
            smallest = remaining[0]
            roots = sum(math.sqrt(self.lengths[index]) for index in remaining)
            if left * math.sqrt(self.lengths[smallest]) / roots < self.lengths[smallest]:
                break
            # It is sent whole, and the larger ones share what it does not need.
            counts[smallest] = self.lengths[smallest]
            left -= self.lengths[remaining.pop(0)]
        for index in remaining:
            counts[index] = max(1, round(left * math.sqrt(self.lengths[index]) / roots))
        return counts
