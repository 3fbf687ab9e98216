"""The sums of a low-rank approximation: of first factors, and then of second ones, for some tensors at a time."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout, Vector, Wire, phase
from lightning_sparsecomm.basis.layout import Segment
from lightning_sparsecomm.exchange.factors import orthonormalized
from lightning_sparsecomm.exchange.status import write_counts_
from lightning_sparsecomm.kernels import factor_kernels_for


class Matrix(NamedTuple):
    """A tensor that is sent as two factors: `[rows, columns]`, all dimensions but the first in the columns."""

    name: str
    offset: int
    rows: int
    columns: int
    rank: int

    def of(self, vector: Tensor) -> Tensor:
        """Its view of a vector over the layout."""
        return vector[self.offset : self.offset + self.rows * self.columns].view(self.rows, self.columns)


class Group(NamedTuple):
    """Tensors whose factors travel together, and those that travel whole with them."""

    matrices: list[Matrix]
    whole: list[slice]


def matrix_of(segment: Segment, rank: int) -> Matrix | None:
    """A tensor as a matrix; None where it is sent whole: it has no two dimensions, or its factors are no shorter."""
    if len(segment.shape) < 2 or not segment.size:
        return None
    rows, columns = segment.shape[0], segment.size // segment.shape[0]
    if rank * (rows + columns) >= segment.size:
        return None
    return Matrix(segment.name, segment.offset, rows, columns, rank)


def groups_of(layout: Layout, rank: int, elements: int) -> list[Group]:
    """Groups of neighbouring tensors, each with that many elements or more, but the last; one at least.

    Args:
        layout: Of the vector.
        rank: Most columns of a factor; 0 to send everything whole.
        elements: Least size of a group.
    """
    groups, size = [Group([], [])], 0
    for segment in layout.segments:
        if size >= elements and segment.size:
            groups.append(Group([], []))
            size = 0
        matrix = matrix_of(segment, rank) if rank else None
        if matrix is not None:
            groups[-1].matrices.append(matrix)
        else:
            groups[-1].whole.append(slice(segment.offset, segment.offset + segment.size))
        size += segment.size
    return groups


class FactorSums:
    """The two sums of one group, which are on the wire one after the other. The first one starts at once.

    Factors are held transposed: a library multiplies a few long rows several times as fast as a few long columns.

    Args:
        group: Whose tensors.
        x: What this rank brings.
        directions: Q' of each matrix, `[rank, columns]`, equal on all ranks; no larger than 1 / columns.
        status: For how many segments the first sum also says who is present; 0 for none.
        wire: Where to communicate.
    """

    def __init__(self, group: Group, x: Vector, directions: Sequence[Tensor], status: int, wire: Wire) -> None:
        self.group, self._values, self._wire = group, x.values, wire
        wholes = [each.stop - each.start for each in group.whole]
        with phase("encode"):
            sizes = [*wholes, *(each.rows * each.rank for each in group.matrices), status]
            self._first = x.values.new_empty(sum(sizes))
            *parts, counts = self._first.split(sizes)
            self.whole, flats = parts[: len(wholes)], parts[len(wholes) :]
            for part, stretch in zip(self.whole, group.whole):
                part.copy_(x.values[stretch])
            self._p = [flat.view(each.rank, each.rows) for flat, each in zip(flats, group.matrices)]
            for p, matrix, q in zip(self._p, group.matrices, directions):
                torch.mm(q, matrix.of(x.values).t(), out=p)
            # Divided before the sum, as in DDP.
            self._first[: len(self._first) - status].div_(wire.world_size)
            if status:
                write_counts_(counts, x)
        self._wait: Callable[[], None] = wire.all_reduce_later_(self._first)
        self.counts = counts

    def wait(self) -> None:
        """Waits for the sum that is on the wire."""
        self._wait()

    def start_second(self) -> None:
        """Orthonormalizes the sums of the first factors, which have arrived, and starts the sum of the second ones."""
        matrices = self.group.matrices
        with phase("encode"):
            self._p = [p.t().contiguous() for p in orthonormalized([p.t() for p in self._p])]
            sizes = [each.columns * each.rank for each in matrices]
            second = self._first.new_empty(sum(sizes))
            self.q = [flat.view(each.rank, each.columns) for flat, each in zip(second.split(sizes), matrices)]
            for q, matrix, p in zip(self.q, matrices, self._p):
                torch.mm(p, matrix.of(self._values), out=q)
            self._own = [q.clone() for q in self.q]
            second.div_(self._wire.world_size)
        self._wait = self._wire.all_reduce_later_(second) if matrices else lambda: None

    def write(self, shared: Tensor, sent: Tensor) -> None:
        """Writes what all ranks share, and what this one has sent, once the second sum has arrived."""
        kernels = factor_kernels_for(shared.device, shared.dtype)
        with phase("decode"):
            for part, stretch in zip(self.whole, self.group.whole):
                shared[stretch] = part
                sent[stretch] = self._values[stretch]
            for matrix, p, q, own in zip(self.group.matrices, self._p, self.q, self._own):
                kernels.product_(matrix.of(shared), p, q)
                kernels.product_(matrix.of(sent), p, own)
