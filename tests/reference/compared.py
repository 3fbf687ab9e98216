"""Systems that papers compare with, in plain NumPy, all ranks in one process, written from the papers."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tests.reference.selection import top_k

Array = NDArray[np.float64]


def largest_of_buckets(vector: Array, sizes: Sequence[int], density: float, bucket: int) -> Array:
    """SparCML: the k largest of each bucket; no bucket spans two tensors. No two elements are equal here."""
    kept, start = np.zeros_like(vector), 0
    for size in sizes:
        for begin in range(start, start + size, bucket):
            part = vector[begin : min(begin + bucket, start + size)]
            k = min(len(part), max(1, round(density * len(part))))
            for i in sorted(range(len(part)), key=lambda i: -abs(part[i]))[:k]:
                kept[begin + i] = part[i]
        start += size
    return kept


class SketchedAlgorithm2:
    """Sketched-SGD, algorithms 1 and 2. The caller supplies the count sketch and the order of random elements."""

    def __init__(self, ranks: int, weights: Array, k: int, shift: float) -> None:
        self.weights, self.k, self.shift = weights.astype(np.float64), k, shift
        self.errors = [np.zeros(len(weights)) for _ in range(ranks)]
        self.average, self.total, self.number = np.zeros(len(weights)), 0.0, 0

    def step(
        self,
        gradients: Sequence[Array],
        rate: float,
        insert: Callable[[Array], Array],
        query: Callable[[Array], Array],
        order: Sequence[int],
        seed: int,
    ) -> None:
        corrected = [error + rate * gradient for error, gradient in zip(self.errors, gradients, strict=True)]
        table = np.mean([insert(each) for each in corrected], axis=0)
        chosen = self._heavy_mix(table, query(table), order, seed)
        update = np.zeros(len(self.weights))
        for i in chosen:
            update[i] = np.mean([each[i] for each in corrected])
        self.weights = self.weights - update
        for rank, each in enumerate(corrected):
            left = each.copy()
            left[chosen] = 0
            self.errors[rank] = left
        self.number += 1
        q = (self.shift + self.number) ** 2
        self.total += q
        self.average = self.average + q * self.weights

    def _heavy_mix(self, table: Array, estimates: Array, order: Sequence[int], seed: int) -> list[int]:
        norm2 = float(np.median([sum(float(cell) ** 2 for cell in row) for row in table]))
        heavy = [i for i, estimate in enumerate(estimates) if estimate**2 >= norm2 / self.k]
        heavy = [heavy[i] for i in top_k(estimates[heavy], self.k, seed)]
        light = [i for i in order if i not in heavy]
        return sorted([*heavy, *light[: self.k - len(heavy)]])


class FederatedAveraging:
    """Federated Averaging, algorithm 1: the clients of a round and their weights are given by the caller."""

    def __init__(self, weights: Array, samples: Sequence[float]) -> None:
        self.shared, self.samples = weights.astype(np.float64), samples

    def round(self, trained: Sequence[Array], clients: Sequence[int]) -> Array:
        """What all ranks go on from, given what each has trained."""
        total = sum(self.samples[k] for k in clients)
        self.shared = np.asarray(sum(self.samples[k] / total * trained[k] for k in clients))
        return self.shared
