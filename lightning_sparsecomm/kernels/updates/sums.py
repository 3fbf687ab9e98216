"""Sums of sparse vectors, and their elements in a dense one: the definition, in torch operations for any device."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparsecomm.kernels.positions.reference import PositionKernels


class Moves(NamedTuple):
    """Some stretches of a list of elements, and by how much their indices change. All `[s]` int64, on one device.

    Attributes:
        starts: Where in the list each stretch begins.
        counts: How many elements it has.
        shifts: What to add to their indices.
    """

    starts: Tensor
    counts: Tensor
    shifts: Tensor


class Sums:
    """The part of `Reference` that puts together sparse vectors."""

    def add_at_(self, total: Tensor, indices: Tensor, values: Tensor, factor: float) -> None:
        """Adds `factor` times `values`, `[k]`, to the elements of `total`, `[n]`, at distinct `indices`, `[k]` int64.

        `values` has the dtype of `total`.

        Raises:
            IndexError: An index is negative, or not below n. Those before it have been added to.
        """
        total.index_add_(0, indices, values, alpha=factor)

    def put_at_(self, total: Tensor, indices: Tensor, values: Tensor, moves: Moves | None = None) -> None:
        """Sets the elements of `total`, `[n]`, at distinct `indices`, `[k]` int64, to `values`, `[k]`, of its dtype.

        `moves` says which of the elements to set, and by how far beside their indices; all, and there, by default. Its
        stretches must lie within the k elements.

        Raises:
            IndexError: A place is negative, or not below n. Those before it have been set.
        """
        if moves is not None:
            chosen = PositionKernels().spans(moves.starts, moves.counts)
            indices, values = indices[chosen] + moves.shifts.repeat_interleave(moves.counts), values[chosen]
        total.index_copy_(0, indices, values)

    def add_up(self, indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Sums the values of equal indices, in the order in which they appear.

        `indices` (`[m]` int64) concatenate sorted runs. Returns strictly increasing indices and their sums.
        """
        ordered, order = torch.sort(indices, stable=True)
        unique, slots, counts = torch.unique_consecutive(ordered, return_inverse=True, return_counts=True)
        # Start from −0: a single −0 must sum to −0.
        sums = values.new_full((unique.numel(),), -0.0)
        values = values[order]
        # Each pass adds at most one value to each sum, so the order of additions does not depend on the device.
        ordinals = torch.arange(ordered.numel(), device=indices.device) - (counts.cumsum(0) - counts)[slots]
        for ordinal in range(int(counts.max()) if counts.numel() else 0):
            chosen = ordinals == ordinal
            sums[slots[chosen]] += values[chosen]
        return unique, sums
