"""Deep Gradient Compression in plain NumPy, all ranks in one process: the paper's algorithm, for DDP's gradients.

Section 3.2 (momentum correction, local clipping), 3.3 (masking), appendix B (Nesterov). Momentum, dampening and weight
decay follow the documentation of torch.optim.SGD. Decay is not sent, and has a momentum of its own.
"""

import numpy as np
from numpy.typing import NDArray

from tests.reference.selection import k_of, top_k

Vector = NDArray[np.float32]


class DeepGradientCompression:
    """Each tensor is a vector; `dense` says which of them are sent whole."""

    def __init__(
        self,
        weights: list[Vector],
        dense: list[bool],
        ranks: int,
        density: float,
        mask: bool = True,
        clip: float | None = None,
    ) -> None:
        self.weights = [w.copy() for w in weights]
        self.dense, self.ranks, self.density, self.mask, self.clip = dense, ranks, density, mask, clip
        self.velocities = [[np.zeros_like(w) for w in weights] for _ in range(ranks)]
        self.residuals = [[np.zeros_like(w) for w in weights] for _ in range(ranks)]
        self.shared_velocities = [np.zeros_like(w) for w in weights]
        self.decay_velocities = [np.zeros_like(w) for w in weights]
        self.begun = False

    def step(
        self,
        gradients: list[list[Vector]],
        lr: float,
        momentum: float,
        dampening: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        """One optimizer step. Gradients are `gradients[rank][tensor]`."""
        f = np.float32
        gain = f(1 - dampening) if self.begun else f(1)
        m = f(momentum)
        gradients = [[g.copy() for g in own] for own in gradients]
        if self.clip is not None:
            for own in gradients:
                norm = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in own))
                factor = min(1.0, self.clip * np.sqrt(self.ranks) / norm)
                for g in own:
                    g *= f(factor)
        for t, weight in enumerate(self.weights):
            total = np.zeros_like(weight)
            if self.dense[t]:
                mean = np.mean([own[t] for own in gradients], axis=0, dtype=np.float32)
                u = self.shared_velocities[t]
                u[:] = m * u + gain * mean
                total = mean + m * u if nesterov else u
                total = total * f(self.ranks)
            else:
                for rank in range(self.ranks):
                    g, u, v = gradients[rank][t], self.velocities[rank][t], self.residuals[rank][t]
                    u[:] = m * u + gain * g
                    v[:] = v + g + m * u if nesterov else v + u
                    chosen = top_k(v, k_of(self.density, len(v)), seed=0)
                    total[chosen] += v[chosen]
                    v[chosen] = 0
                    if self.mask:
                        u[chosen] = 0
            z = self.decay_velocities[t]
            decay = f(weight_decay) * weight
            z[:] = m * z + gain * decay
            weight -= f(lr) * (total / f(self.ranks) + (decay + m * z if nesterov else z))
        self.begun = True
