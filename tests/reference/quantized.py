"""A quantized all-reduce in plain NumPy, all ranks in one process.

The vector is cut into one piece for each rank. A rank rounds each piece of its own, by blocks, and sends it to the
piece's owner. The owner adds up what it receives in rank order, rounds the mean, and sends it to all. Both roundings go
to residuals: a rank's own, and the owner's, which is W times what the mean has lost.
"""

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


class QuantizedReference:
    """Each rank's gradient is one vector of `size` elements."""

    def __init__(self, ranks: int, size: int, bits: int, block: int) -> None:
        self.ranks, self.bits, self.block = ranks, bits, block
        self.pieces = np.split(np.arange(size), range(-(-size // ranks), size, -(-size // ranks)))
        self.pieces += [np.arange(0)] * (ranks - len(self.pieces))
        self.residuals = [np.zeros(size) for _ in range(ranks)]

    def step(self, gradients: list[Vector]) -> Vector:
        """One round: what all ranks share. Updates the residuals."""
        shared = np.zeros(len(gradients[0]))
        for residual, gradient in zip(self.residuals, gradients):
            residual += gradient
        for owner, piece in enumerate(self.pieces):
            mean = np.zeros(len(piece))
            for residual in self.residuals:
                rounded = self.rounded(residual[piece])
                mean += rounded / self.ranks
                residual[piece] -= rounded
            shared[piece] = self.rounded(mean)
            self.residuals[owner][piece] += self.ranks * (mean - shared[piece])
        return shared

    def rounded(self, values: Vector) -> Vector:
        """Each block by its largest magnitude, in float32."""
        most = 2 ** (self.bits - 1) - 1
        found = np.zeros(len(values))
        for start in range(0, len(values), self.block):
            block = values[start : start + self.block]
            scale = np.float32(np.abs(block).max() / most)
            for i, value in enumerate(block):
                multiple = round(float(value) / float(scale)) if scale > 0 else 0
                found[start + i] = np.float32(max(-most, min(most, multiple))) * scale
        return found
