"""1-bit Adam in plain NumPy, written from algorithm 1 of the paper; see docs/methods/few_bits.md.

A weight is cut into one chunk for each rank. Each rank sends the compressed chunks of others to their servers, which
compress the mean with an error of their own. A server knows its own rank's chunk without compression.
"""

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def compressed(chunk: Vector, length: int) -> Vector:
    """The signs, times the mean magnitude of a chunk that is filled up to `length` with zeros."""
    scale = float(np.float32(sum(abs(float(v)) for v in chunk) / length)) if length else 0.0
    return np.array([scale if v >= 0 else -scale for v in chunk])


class OneBitAdam:
    """Each tensor is a vector; `dense` says which of them are sent whole, and left to Adam on the mean gradient."""

    def __init__(
        self, weights: list[Vector], dense: list[bool], ranks: int, first_steps: int, floor: float, clip: float | None
    ) -> None:
        self.weights = [w.astype(np.float64) for w in weights]
        self.dense, self.ranks, self.first_steps, self.floor, self.clip = dense, ranks, first_steps, floor, clip
        self.first = [np.zeros(len(w)) for w in weights]
        self.second = [np.zeros(len(w)) for w in weights]
        self.steps = [0 for _ in weights]
        self.scales: list[Vector | None] = [None for _ in weights]
        self.late = [False for _ in weights]
        self.worker_errors = [[np.zeros(len(w)) for w in weights] for _ in range(ranks)]
        self.server_errors = [np.zeros(len(w)) for w in weights]
        self.number = 0

    def step(
        self,
        gradients: list[list[Vector | None]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        decoupled: bool,
        maximize: bool = False,
    ) -> None:
        """One optimizer step. Gradients are `gradients[rank][tensor]`, None where a rank has none."""
        own = [[None if g is None else g.astype(np.float64) for g in rank] for rank in gradients]
        if self.clip is not None:
            for rank in own:
                norm = np.sqrt(sum(np.sum(g**2) for g in rank if g is not None))
                factor = min(1.0, self.clip * np.sqrt(self.ranks) / norm)
                rank[:] = [None if g is None else g * factor for g in rank]
        for t, weight in enumerate(self.weights):
            if all(rank[t] is None for rank in own):
                continue
            each = [(0.0 * weight if rank[t] is None else rank[t]) * (-1 if maximize else 1) for rank in own]
            decay = weight_decay * weight if weight_decay and not decoupled else 0.0 * weight
            self.steps[t] += 1
            x = self._direction(t, each, decay, betas, eps)
            if decoupled:
                weight *= 1 - lr * weight_decay
            weight -= lr * x
        self.number += 1

    def _direction(
        self, t: int, gradients: list[Vector], decay: Vector, betas: tuple[float, float], eps: float
    ) -> Vector:
        steps, (b1, b2) = self.steps[t], betas
        before = self.first[t]
        if self.dense[t] or self.number < self.first_steps:
            g = sum(gradients) / self.ranks + decay
            self.first[t] = b1 * before + (1 - b1) * g
            self.second[t] = b2 * self.second[t] + (1 - b2) * g**2
            return self.first[t] / (1 - b1**steps) / (np.sqrt(self.second[t] / (1 - b2**steps)) + eps)
        self.first[t] = self._shared(t, [b1 * before + (1 - b1) * g for g in gradients]) + (1 - b1) * decay
        self.late[t] = self.late[t] or steps == 1
        unbiased = self.first[t] / (1 - b1**steps)
        if self.late[t]:
            g = (self.first[t] - b1 * before) / (1 - b1)
            self.second[t] = b2 * self.second[t] + (1 - b2) * g**2
            return unbiased / (np.sqrt(self.second[t] / (1 - b2**steps)) + eps)
        if self.scales[t] is None:
            frozen = self.second[t] / (1 - b2 ** (steps - 1))
            typical = np.sqrt(np.mean(frozen))
            self.scales[t] = np.where(
                (frozen == 0) & (self.floor > 0), typical, np.maximum(np.sqrt(frozen), self.floor * typical)
            )
        return unbiased / (self.scales[t] + eps)

    def _shared(self, t: int, moments: list[Vector]) -> Vector:
        length = -(-len(moments[0]) // self.ranks)
        result = np.zeros(len(moments[0]))
        for server in range(self.ranks):
            at = slice(server * length, (server + 1) * length)
            total = moments[server][at] + 0.0
            for rank, moment in enumerate(moments):
                if rank != server:
                    corrected = moment[at] + self.worker_errors[rank][t][at]
                    sent = compressed(corrected, length)
                    self.worker_errors[rank][t][at] = corrected - sent
                    total += sent
            mean = total / self.ranks + self.server_errors[t][at]
            result[at] = compressed(mean, length)
            self.server_errors[t][at] = mean - result[at]
        return result
