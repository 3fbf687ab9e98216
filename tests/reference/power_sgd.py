"""PowerSGD in plain NumPy, all ranks in one process: the paper's algorithms 1 and 2, for DDP's gradients.

Vogels et al. 2019. A rank forgets what all ranks share. The caller supplies the first Q of each matrix.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Draw = Callable[[tuple[int, int]], Vector]


class PowerSGDReference:
    """Each rank's gradient is one vector: its tensors, of `shapes`, in order.

    `residuals[rank]` is the paper's: what a rank took in, minus what all ranks share. `own_residuals[rank]` is what is
    left if a rank forgets its own part P Pᵀ M instead.
    """

    def __init__(self, ranks: int, shapes: list[tuple[int, ...]], rank: int, dense_steps: int, draw: Draw) -> None:
        self.ranks, self.dense_steps, self.steps = ranks, dense_steps, 0
        self.tensors: list[tuple[slice, tuple[int, int] | None]] = []
        start = 0
        for shape in shapes:
            size = math.prod(shape)
            matrix = (shape[0], size // shape[0]) if len(shape) > 1 else None
            if matrix is not None and min(rank, *matrix) * sum(matrix) >= size:
                matrix = None
            self.tensors.append((slice(start, start + size), matrix))
            start += size
        self.rank, self.draw = rank, draw
        self.q: dict[int, Vector] = {}
        self.residuals = [np.zeros(start) for _ in range(ranks)]
        self.own_residuals = [np.zeros(start) for _ in range(ranks)]

    def step(self, gradients: list[NDArray[Any]]) -> Vector:
        """One round: what all ranks share. Updates the residuals."""
        shared = np.zeros(len(gradients[0]))
        for index, (place, matrix) in enumerate(self.tensors):
            if matrix is None or self.steps < self.dense_steps:
                given = [residual[place] + g[place] for residual, g in zip(self.residuals, gradients)]
                shared[place] = sum(given) / self.ranks
                for kept in (*self.residuals, *self.own_residuals):
                    kept[place] = 0
            else:
                shared[place] = self.compressed(index, place, matrix, gradients)
        self.steps += 1
        return shared

    def compressed(self, index: int, place: slice, matrix: tuple[int, int], gradients: list[NDArray[Any]]) -> Vector:
        """The part of one matrix."""
        m = [(e[place] + g[place].astype(np.float64)).reshape(matrix) for e, g in zip(self.residuals, gradients)]
        own = [(e[place] + g[place].astype(np.float64)).reshape(matrix) for e, g in zip(self.own_residuals, gradients)]
        if index not in self.q:
            self.q[index] = self.draw((matrix[1], min(self.rank, *matrix)))
        p = sum(each @ self.q[index] for each in m) / self.ranks
        p = orthogonalized(p)
        q = sum(each.T @ p for each in m) / self.ranks
        self.q[index] = q
        for rank in range(self.ranks):
            self.residuals[rank][place] = (m[rank] - p @ q.T).ravel()
            self.own_residuals[rank][place] = (own[rank] - p @ (own[rank].T @ p).T).ravel()
        return np.asarray((p @ q.T).ravel())


def orthogonalized(p: Vector) -> Vector:
    """Gram-Schmidt, as written in books."""
    p = p.copy()
    for column in range(p.shape[1]):
        for _ in range(2):
            for earlier in range(column):
                p[:, column] -= (p[:, earlier] @ p[:, column]) * p[:, earlier]
        p[:, column] /= np.sqrt(p[:, column] @ p[:, column])
    return p
