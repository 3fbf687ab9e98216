"""Optimizers in plain NumPy, as torch.optim documents them. They make local steps, and SGD also the outer step.

Each belongs to one rank and one vector of weights. `mask` sets momentum to 0 where something was sent.
"""

import math

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32] | NDArray[np.float64]


class SGD:
    """buf ← m·buf + g, at first buf ← g; w ← w − lr·buf, with Nesterov's method w − lr·(g + m·buf)."""

    def __init__(self, lr: float, momentum: float = 0.0, nesterov: bool = False) -> None:
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov
        self.buffer: Vector | None = None

    def step(self, weights: Vector, gradient: Vector) -> Vector:
        """The weights after one step. The outer step's gradient is −mean of ΔW*."""
        self.buffer = gradient.copy() if self.buffer is None else self.momentum * self.buffer + gradient
        update = gradient + self.momentum * self.buffer if self.nesterov else self.buffer
        return weights - self.lr * update

    def mask(self, sent: Vector) -> None:
        """Sets momentum to 0 where `sent` is not 0."""
        if self.buffer is not None:
            self.buffer[sent != 0] = 0


class Adam:
    """Without weight decay. `mask` affects the first moment only."""

    def __init__(self, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        self.lr, self.betas, self.eps = lr, betas, eps
        self.first: Vector = np.zeros(0)
        self.second: Vector = np.zeros(0)
        self.steps = 0

    def step(self, weights: Vector, gradient: Vector) -> Vector:
        """The weights after one step."""
        fading, fading_squares = self.betas
        if self.steps == 0:
            self.first, self.second = np.zeros_like(gradient), np.zeros_like(gradient)
        self.steps += 1
        self.first = fading * self.first + (1 - fading) * gradient
        self.second = fading_squares * self.second + (1 - fading_squares) * gradient**2
        root = np.sqrt(self.second) / math.sqrt(1 - fading_squares**self.steps) + self.eps
        return weights - self.lr / (1 - fading**self.steps) * self.first / root

    def mask(self, sent: Vector) -> None:
        """Sets the first moment to 0 where `sent` is not 0."""
        self.first[sent != 0] = 0
