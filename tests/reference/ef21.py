"""EF21 in plain NumPy, all ranks in one process: Richtárik et al. 2021, algorithm 2; with momentum, Fatkhullin et al.

Each rank i keeps g_i, its estimate of what it has: its gradient, or SGD's velocity of it. Of each tensor it sends the k
largest elements of the difference. All add the mean of what was sent to g, by which they step.
"""

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


class EF21Reference:
    """Tensors of these sizes; those of which `whole` is true are sent whole, and have no estimates."""

    def __init__(
        self, ranks: int, sizes: list[int], whole: list[bool], density: float, momentum: float | None = None
    ) -> None:
        ends = np.cumsum(sizes)
        self.tensors = [slice(end - size, end) for end, size in zip(ends, sizes)]
        self.whole, self.density, self.momentum = whole, density, momentum
        self.velocities: list[Vector] | None = None
        self.g = np.zeros(sum(sizes))
        self.own = [np.zeros(sum(sizes)) for _ in range(ranks)]

    def step(self, gradients: list[Vector]) -> Vector:
        """What all ranks step by."""
        given = gradients
        if self.momentum is not None:
            before = self.velocities
            given = [g if before is None else self.momentum * before[i] + g for i, g in enumerate(gradients)]
            self.velocities = given
        total = np.zeros_like(self.g)
        for own, x in zip(self.own, given):
            difference = x - own
            sent = np.zeros_like(difference)
            for tensor, whole in zip(self.tensors, self.whole):
                part = difference[tensor]
                k = len(part) if whole else max(1, round(self.density * len(part)))
                for place in sorted(range(len(part)), key=lambda i: -abs(part[i]))[:k]:
                    sent[tensor.start + place] = part[place]
            own += sent
            total += sent
        self.g = self.g + total / len(gradients)
        return self.g
