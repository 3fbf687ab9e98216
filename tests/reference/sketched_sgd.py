"""Sketched-SGD in plain NumPy, all ranks in one process: the paper's algorithm 3, for DDP's gradients.

Ivkin et al. 2019, section 5.1: momentum correction, momentum factor masking, a second round for exact values, biases
dense. We divide by the number of ranks, as DDP does. The caller supplies the count sketch.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tests.reference.selection import k_of, top_k

Vector = NDArray[np.float32] | NDArray[np.float64]
Table = NDArray[np.float32] | NDArray[np.float64]
Insert = Callable[[Vector], Table]
Query = Callable[[Table], Vector]


class SketchedSGD:
    """Each tensor is a vector; `dense` says which of them are sent whole. The others are one vector, in order.

    `candidates` is P: how many coordinates are asked for, for each one that is kept.
    """

    def __init__(
        self,
        weights: list[Vector],
        dense: list[bool],
        ranks: int,
        density: float,
        candidates: int,
        mask: bool = True,
    ) -> None:
        self.weights = [w.copy() for w in weights]
        self.dense, self.ranks, self.mask = dense, ranks, mask
        sketched = np.concatenate([w for w, whole in zip(weights, dense) if not whole])
        self.k = k_of(density, len(sketched))
        self.asked = min(len(sketched), candidates * self.k)
        self.velocities = [np.zeros_like(sketched) for _ in range(ranks)]
        self.residuals = [np.zeros_like(sketched) for _ in range(ranks)]
        self.shared_velocities = [np.zeros_like(w) for w in weights]

    def step(
        self, gradients: list[list[Vector]], lr: float, momentum: float, insert: Insert, query: Query, seed: int = 0
    ) -> list[int]:
        """One optimizer step. Gradients are `gradients[rank][tensor]`. Returns the positions that were kept, in order.

        Estimates tie where elements share their columns. The seed decides which of them are asked for.
        """
        f = self.residuals[0].dtype.type
        for rank, own in enumerate(gradients):
            g = np.concatenate([g for g, whole in zip(own, self.dense) if not whole])
            u, v = self.velocities[rank], self.residuals[rank]
            u[:] = f(momentum) * u + g
            v[:] = v + u
        table = sum(insert(v) for v in self.residuals[1:]) + insert(self.residuals[0])
        asked = top_k(query(table), self.asked, seed)
        exact = np.zeros_like(self.residuals[0])
        for v in self.residuals:
            exact[asked] += v[asked]
        kept = top_k(exact, self.k, seed)
        update = np.zeros_like(exact)
        update[kept] = exact[kept] / f(self.ranks)
        for u, v in zip(self.velocities, self.residuals):
            v[kept] = 0
            if self.mask:
                u[kept] = 0
        start = 0
        for t, weight in enumerate(self.weights):
            if self.dense[t]:
                u = self.shared_velocities[t]
                u[:] = f(momentum) * u + np.mean([own[t] for own in gradients], axis=0, dtype=f)
                weight -= f(lr) * u
            else:
                weight -= f(lr) * update[start : start + len(weight)]
                start += len(weight)
        return kept


def true_top_k(residuals: list[Vector], k: int) -> list[int]:
    """The k largest elements of the mean of all residuals: what a sketch without collisions would find."""
    return top_k(np.mean(residuals, axis=0), k, seed=0)
