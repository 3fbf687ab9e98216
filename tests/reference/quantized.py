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
        """Each block by its largest magnitude, in float32; with 2 bits, by the means of its smaller and larger ones.

        All pieces are as long as the first: zeros are added, and count in these means.
        """
        if self.bits == 2:
            padded = np.pad(values, (0, len(self.pieces[0]) - len(values)))
            blocks = [padded[start : start + self.block] for start in range(0, len(padded), self.block)]
            return np.concatenate([self._in_two_bits(block) for block in blocks] or [padded])[: len(values)]
        most = 2 ** (self.bits - 1) - 1
        found = np.zeros(len(values))
        for start in range(0, len(values), self.block):
            block = values[start : start + self.block]
            scale = np.float32(np.abs(block).max() / most)
            for i, value in enumerate(block):
                multiple = round(float(value) / float(scale)) if scale > 0 else 0
                found[start + i] = np.float32(max(-most, min(most, multiple))) * scale
        return found

    def _in_two_bits(self, block: Vector) -> Vector:
        magnitudes = np.abs(block)
        large = magnitudes >= min(magnitudes.mean(), magnitudes.max())
        above = _in_half_precision(magnitudes[large].mean())
        below = _in_half_precision(magnitudes[~large].mean()) if (~large).any() else above
        return np.where(block < 0, -1.0, 1.0) * np.where(large, above, below)


def _in_half_precision(mean: float) -> np.float16:
    """The nearest float16. A mean of float16 numbers may lie halfway, where the order of its sum would decide."""
    nearest = np.float16(np.float32(mean))
    for other in (np.nextafter(nearest, np.float16(np.inf)), np.nextafter(nearest, np.float16(-np.inf))):
        assert abs(mean - (float(nearest) + float(other)) / 2) > 1e-9 * mean, "a tie: choose another case"
    return nearest
