"""Optimizers in plain NumPy, as torch.optim documents them: for local steps, and SGD for the outer step too.

Each belongs to one rank and one vector of weights. `mask` is momentum masking: momentum becomes 0 where something was
sent.
"""

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]


class SGD:
    """buf ← m·buf + g, at first buf ← g; w ← w − lr·buf, with Nesterov's method w − lr·(g + m·buf)."""

    def __init__(self, lr: float, momentum: float = 0.0, nesterov: bool = False) -> None:
        self.lr, self.momentum, self.nesterov = np.float32(lr), np.float32(momentum), nesterov
        self.buffer: Vector | None = None

    def step(self, weights: Vector, gradient: Vector) -> Vector:
        """The weights after one step. The outer step's gradient is −mean of ΔW*."""
        self.buffer = gradient.copy() if self.buffer is None else self.momentum * self.buffer + gradient
        update = gradient + self.momentum * self.buffer if self.nesterov else self.buffer
        return weights - self.lr * update

    def mask(self, sent: Vector) -> None:
        """Where `sent` is not 0, momentum becomes 0."""
        if self.buffer is not None:
            self.buffer[sent != 0] = 0


class Adam:
    """Without weight decay. Only the first moment is momentum, and masked."""

    def __init__(self, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        self.lr, self.betas, self.eps = lr, betas, eps
        self.first: Vector = np.zeros(1, dtype=np.float32)
        self.second: Vector = self.first.copy()
        self.steps = 0

    def step(self, weights: Vector, gradient: Vector) -> Vector:
        """The weights after one step."""
        f, (fading, fading_squares) = np.float32, self.betas
        self.steps += 1
        self.first = f(fading) * self.first + f(1 - fading) * gradient
        self.second = f(fading_squares) * self.second + f(1 - fading_squares) * gradient**2
        root = np.sqrt(self.second) / f(np.sqrt(1 - fading_squares**self.steps)) + f(self.eps)
        return weights - f(self.lr / (1 - fading**self.steps)) * self.first / root

    def mask(self, sent: Vector) -> None:
        """Where `sent` is not 0, the first moment becomes 0."""
        self.first[sent != 0] = 0
