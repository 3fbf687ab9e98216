"""Qsparse-local-SGD (Basu et al. 2019), algorithm 1, in plain NumPy, all ranks in one process.

What a rank steps along is given: its velocity, or Adam's direction. Each rank has weights and an error of its own; the
error is a change of weights. The first step exchanges, and then every H-th.

With `error_in_weights`, a rank goes on from the shared weights with its error in them, as in CSER (Xie et al. 2020),
algorithm 2, where all are sent whole from time to time, which is left out here.
"""

import numpy as np
from numpy.typing import NDArray

from tests.reference.selection import k_of, top_k

Vector = NDArray[np.float64]


class LocalSteps:
    """Each tensor is a vector; `dense` says which of them are sent whole."""

    def __init__(
        self,
        weights: list[Vector],
        dense: list[bool],
        ranks: int,
        density: float,
        every: int,
        error_in_weights: bool = False,
    ) -> None:
        self.error_in_weights = error_in_weights
        self.shared = [w.astype(np.float64) for w in weights]
        self.dense, self.ranks, self.density, self.every = dense, ranks, density, every
        self.weights = [[w.copy() for w in self.shared] for _ in range(ranks)]
        self.errors = [[np.zeros_like(w) for w in self.shared] for _ in range(ranks)]
        self.number = 0

    def step(self, directions: list[list[Vector]], lr: float) -> None:
        """One step of all ranks along `directions[rank][tensor]`, and the exchange, if it is due."""
        for own, along in zip(self.weights, directions):
            for weight, direction in zip(own, along):
                weight -= lr * direction
        if self.number % self.every == 0:
            self._exchange()
        self.number += 1

    def _exchange(self) -> None:
        for t, shared in enumerate(self.shared):
            total = np.zeros_like(shared)
            for rank in range(self.ranks):
                x = shared - self.weights[rank][t]
                if not self.error_in_weights:
                    x = x + self.errors[rank][t]
                count = len(x) if self.dense[t] else k_of(self.density, len(x))
                chosen = top_k(x, count, seed=0)
                total[chosen] += x[chosen]
                x[chosen] = 0
                self.errors[rank][t] = x
            shared -= total / self.ranks
            for rank in range(self.ranks):
                self.weights[rank][t] = shared - self.errors[rank][t] if self.error_in_weights else shared.copy()

    def finish(self) -> list[Vector]:
        """The shared weights, with all that ranks have trained and not sent."""
        if self.error_in_weights:
            return [np.mean([own[t] for own in self.weights], axis=0) for t in range(len(self.shared))]
        return [
            shared + np.mean([self.weights[r][t] - shared - self.errors[r][t] for r in range(self.ranks)], axis=0)
            for t, shared in enumerate(self.shared)
        ]
