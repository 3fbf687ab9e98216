"""Gradient Dropping as in the paper, in plain NumPy, all ranks in one process.

Aji & Heafield 2017, algorithm 1; Combining Global Sparse Gradients with Local Gradients, sections 2 and 3. The papers
sum over ranks; we divide by their number, as DDP does.
"""

import itertools

import numpy as np
from numpy.typing import NDArray

from tests.reference.selection import k_of, top_k

Vector = NDArray[np.float32]


class GradientDropping:
    def __init__(
        self, ranks: int, sizes: list[int], density: float, whole_model: bool, half: bool, local: str = "none"
    ) -> None:
        self.residuals = [np.zeros(sum(sizes), dtype=np.float32) for _ in range(ranks)]
        bounds = np.cumsum([0, *sizes])
        self.pieces = [slice(0, sum(sizes))] if whole_model else [slice(a, b) for a, b in itertools.pairwise(bounds)]
        self.density, self.half, self.local = density, half, local

    def step(self, gradients: list[Vector]) -> list[Vector]:
        """What each rank's optimizer sees, for each rank's own gradient. Updates the residuals."""
        ranks = np.float32(len(gradients))
        total = np.zeros_like(gradients[0])
        sents, rests = [], []
        for residual, gradient in zip(self.residuals, gradients):
            residual += gradient
            sent = np.zeros_like(residual)
            for piece in self.pieces:
                # No two magnitudes are equal here, so the seed that breaks ties has no effect.
                chosen = top_k(residual[piece], k_of(self.density, len(residual[piece])), seed=0)
                sent[piece][chosen] = residual[piece][chosen]
            if self.half:
                sent = sent.astype(np.float16).astype(np.float32)
            residual -= sent
            rests.append(residual.copy())
            if self.local == "error":
                residual[:] = 0
            sents.append(sent)
            total += sent
        if self.local == "sum":
            return [(total + gradient) / 2 / ranks for gradient in gradients]
        if self.local == "partial":
            return [(total - sent + gradient) / ranks for sent, gradient in zip(sents, gradients)]
        if self.local == "error":
            return [(total + rest) / ranks for rest in rests]
        return [total / ranks for _ in gradients]
