"""Gradient Dropping as the paper writes it, in plain NumPy, with all ranks in one process.

Aji & Heafield 2017, algorithm 1; Combining Global Sparse Gradients with Local Gradients, section 2. The papers sum over
ranks; divided by their number, as DDP does.
"""

import itertools

import numpy as np
from numpy.typing import NDArray

from tests.reference.selection import k_of, top_k

Vector = NDArray[np.float32]


class GradientDropping:
    def __init__(self, ranks: int, sizes: list[int], density: float, whole_model: bool, half: bool) -> None:
        self.residuals = [np.zeros(sum(sizes), dtype=np.float32) for _ in range(ranks)]
        bounds = np.cumsum([0, *sizes])
        self.pieces = [slice(0, sum(sizes))] if whole_model else [slice(a, b) for a, b in itertools.pairwise(bounds)]
        self.density, self.half = density, half

    def step(self, gradients: list[Vector]) -> Vector:
        """The shared gradient for each rank's own; the residuals move on."""
        total = np.zeros_like(gradients[0])
        for residual, gradient in zip(self.residuals, gradients):
            residual += gradient
            sent = np.zeros_like(residual)
            for piece in self.pieces:
                # No two magnitudes are equal here, so the seed that breaks ties does not matter.
                chosen = top_k(residual[piece], k_of(self.density, len(residual[piece])), seed=0)
                sent[piece][chosen] = residual[piece][chosen]
            if self.half:
                sent = sent.astype(np.float16).astype(np.float32)
            residual -= sent
            total += sent
        return total / np.float32(len(gradients))
