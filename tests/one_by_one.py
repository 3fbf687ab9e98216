"""Sparse vectors that notice whether an earlier one is still held."""

import weakref
from collections.abc import Iterator

import torch

from lightning_sparsecomm.basis import SparseVector


class OneByOne:
    """Makes vectors, and counts those that are still held when the next one is made.

    Attributes:
        held: One number for each vector.
    """

    def __init__(self) -> None:
        self.held: list[int] = []
        self._made: list[weakref.ref[torch.Tensor]] = []

    def note(self, vector: SparseVector) -> SparseVector:
        """A new vector."""
        self.held.append(sum(each() is not None for each in self._made))
        # It stays as long as its vector does.
        self._made.append(weakref.ref(vector.indices))
        return vector

    def vectors(self, count: int, size: int) -> Iterator[SparseVector]:
        """So many full vectors."""
        for _ in range(count):
            yield self.note(SparseVector(torch.arange(size), torch.ones(size), size))
