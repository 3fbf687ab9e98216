"""Adam and AdamW on local moments in plain NumPy, all ranks in one process; see docs/methods/few_elements.md.

Adam's moments, decay and corrections follow the documentation of torch.optim. Residuals are changes of weights: they
take in learning rate times direction, and have no unit.
"""

import numpy as np
from numpy.typing import NDArray

from tests.reference.selection import k_of, top_k

Vector = NDArray[np.float64]


class LocalAdam:
    """Each tensor is a vector; `dense` says which of them are sent whole, and left to Adam on the mean gradient.

    In the first steps ranks compare their gradients in each, and then in every `every`-th.
    """

    def __init__(
        self,
        weights: list[Vector],
        dense: list[bool],
        ranks: int,
        clip: float | None = None,
        first_steps: int = 300,
        every: int = 8,
    ) -> None:
        self.first_steps, self.every = first_steps, every
        self.weights = [w.astype(np.float64) for w in weights]
        self.dense, self.ranks, self.clip = dense, ranks, clip
        self.firsts, self.seconds, self.residuals, self.directions = (
            [[np.zeros(len(w)) for w in weights] for _ in range(ranks)] for _ in range(4)
        )
        self.steps = [[0 for _ in weights] for _ in range(ranks)]
        # Of each tensor, sums that fade: of squared means over ranks, and of mean squares.
        self.common = [np.zeros(2) for _ in weights]
        self.number = 0
        self.sent = [[np.zeros(len(w)) for w in weights] for _ in range(ranks)]

    def step(
        self,
        gradients: list[list[Vector | None]],
        density: float,
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
            mean = sum((rank[t] if rank[t] is not None else 0.0 * weight) for rank in own) / self.ranks
            change = np.zeros_like(weight)
            entering = []
            for rank in range(self.ranks):
                g = mean if self.dense[t] else own[rank][t]
                # Another rank has one.
                g = 0.0 * weight if g is None else g
                g = -g if maximize else g
                if weight_decay and not decoupled:
                    g = g + weight_decay * weight
                entering.append(g)
                x = self._direction(rank, t, g, betas, eps)
                if self.dense[t]:
                    change += lr * x / self.ranks
                    continue
                self.residuals[rank][t] += lr * x
                self.directions[rank][t] += lr * x
                change += self._send(rank, t, density) / self.ranks
            if decoupled:
                weight *= 1 - lr * weight_decay
            weight -= change
            if not self.dense[t] and (self.number < self.first_steps or self.number % self.every == 0):
                self._compare(t, np.array(entering))
        self.number += 1

    def _compare(self, t: int, gradients: Vector) -> None:
        """Measures on 8 to 32 elements what ranks have in common; `gradients` are `[ranks, n]`."""
        size = gradients.shape[1]
        count = min(32, max(8, size // 32))
        places = [int(i * 0.6180339887498949 % 1 * size) for i in range(32 * self.number, 32 * self.number + count)]
        some = gradients[:, places]
        found = np.array([np.sum(some.mean(0) ** 2), np.sum(some**2) / self.ranks])
        if found[1] > 0:
            self.common[t] = 0.9 * self.common[t] + found

    def _direction(self, rank: int, t: int, g: Vector, betas: tuple[float, float], eps: float) -> Vector:
        self.steps[rank][t] += 1
        fading, fading_squares = betas
        squared_mean, mean_square = self.common[t]
        coherence = np.clip(squared_mean / mean_square, 1 / self.ranks, 1) if mean_square else 1.0
        m = self.firsts[rank][t] = fading * self.firsts[rank][t] + (1 - fading) * g
        v = self.seconds[rank][t] = fading_squares * self.seconds[rank][t] + (1 - fading_squares) * coherence * g**2
        mean = m / (1 - fading ** self.steps[rank][t])
        return mean / (np.sqrt(v / (1 - fading_squares ** self.steps[rank][t])) + eps)

    def _send(self, rank: int, t: int, density: float) -> Vector:
        residual = self.residuals[rank][t]
        sent = np.zeros_like(residual)
        chosen = top_k(residual, k_of(density, len(residual)), seed=0)
        sent[chosen] = residual[chosen]
        residual -= sent
        self.sent[rank][t] += sent
        return sent
