"""Ok-Topk in plain NumPy, all ranks in one process: algorithm 1 of the paper, with what ours adds to it.

Ours finds its two thresholds anew in each step: a rank's own exactly, the result's by classes of magnitudes. Where
results are shared out makes no difference to what they are.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

CLASSES = 64


class OkTopKReference:
    """The largest elements of the sum over ranks of what each selects, and what stays in the residuals."""

    def __init__(self, ranks: int, size: int, k: int, balance_every: int) -> None:
        self.residuals = [np.zeros(size) for _ in range(ranks)]
        self.k, self.balance_every = k, balance_every
        self.steps = 0
        self.bounds: list[int] = []

    def step(self, gradients: list[Vector]) -> Vector:
        """One round: what all ranks share. Updates the residuals."""
        ranks, size = len(gradients), len(gradients[0])
        selected = []
        for residual, gradient in zip(self.residuals, gradients):
            residual += gradient
            selected.append(sorted(np.argsort(-abs(residual))[: self.k].tolist()))
        if self.steps % self.balance_every == 0:
            self.bounds = regions(selected, size)
        self.steps += 1
        means = np.zeros(size)
        for residual, chosen in zip(self.residuals, selected):
            means[chosen] += residual[chosen] / ranks
        owned = [
            sorted((i for i in range(*self.bounds[owner : owner + 2]) if means[i] != 0), key=lambda i: -abs(means[i]))
            for owner in range(ranks)
        ]
        kept = largest(owned, means, self.k)
        for residual, chosen in zip(self.residuals, selected):
            for position in set(chosen) & set(kept):
                residual[position] = 0
        shared = np.zeros(size)
        shared[kept] = means[kept]
        return shared


def regions(selected: list[list[int]], size: int) -> list[int]:
    """Bounds that divide a sample of all ranks' positions evenly."""
    ranks = len(selected)
    count = min(max(8 * ranks, 64), 1024)
    sample = sorted(own[(i * len(own) + len(own) // 2) // count] for own in selected if own for i in range(count))
    return [0, *(sample[rank * len(sample) // ranks] for rank in range(1, ranks)), size]


def largest(owned: list[list[int]], means: Vector, k: int) -> list[int]:
    """Of each owner's positions, sorted by magnitude, the classes whose least magnitudes are greatest; at most k."""
    if sum(map(len, owned)) <= k:
        return [position for mine in owned for position in mine]
    classes = []
    for mine in owned:
        ends = [len(mine) * number // CLASSES for number in range(CLASSES + 1)]
        classes += [mine[begin:end] for begin, end in pairwise(ends) if end > begin]
    kept: list[int] = []
    for each in sorted(classes, key=lambda positions: -abs(means[positions[-1]])):
        if len(kept) + len(each) > k:
            break
        kept += each
    return kept
