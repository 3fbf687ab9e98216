"""Which element of a flat vector belongs to which parameter, and a sparse part of such a vector."""

import zlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparsecomm.kernels import kernels_for

# Positions travel as unsigned 32-bit integers.
MAX_SIZE = 2**32 - 1


class Segment(NamedTuple):
    """One parameter's place in the flat vector: elements `offset` to `offset + size`."""

    name: str
    shape: tuple[int, ...]
    offset: int
    size: int


class Layout:
    """Names, shapes and offsets of tensors that lie one after the other in a flat vector.

    Frozen. Two ranks may exchange positions exactly if their layouts are equal; `fingerprint` lets a payload prove it.

    >>> layout = Layout([("weight", (2, 3)), ("bias", (2,))])
    >>> layout.size, [segment.offset for segment in layout.segments]
    (8, [0, 6])

    Args:
        tensors: Name and shape of each tensor, in order. Names must differ.

    Raises:
        ValueError: A name occurs twice, or the vector is too long for 32-bit positions.
    """

    def __init__(self, tensors: Iterable[tuple[str, Sequence[int]]]) -> None:
        segments: list[Segment] = []
        offset = 0
        for name, shape in tensors:
            size = prod(shape)
            segments.append(Segment(name, tuple(shape), offset, size))
            offset += size
        if len({segment.name for segment in segments}) != len(segments):
            raise ValueError("a layout's names must differ; got one twice. Name every parameter once.")
        if offset > MAX_SIZE:
            raise ValueError(
                f"a vector can have at most {MAX_SIZE:,} elements, since positions travel as 32-bit integers;"
                f" got {offset:,}. Give the parameters to more than one optimizer or sync."
            )
        self.segments = tuple(segments)
        self.size = offset

    @classmethod
    def of(cls, named: Iterable[tuple[str, Tensor]]) -> "Layout":
        """The layout of `(name, tensor)` pairs, such as `module.named_parameters()`."""
        return cls((name, tensor.shape) for name, tensor in named)

    @cached_property
    def fingerprint(self) -> int:
        """32-bit checksum of names and shapes: equal layouts have equal fingerprints."""
        return zlib.crc32(repr([(segment.name, segment.shape) for segment in self.segments]).encode())

    @cached_property
    def bounds(self) -> Tensor:
        """Where each segment begins, and where the last one ends. `[segments + 1]` int64."""
        return torch.tensor([segment.offset for segment in self.segments] + [self.size], dtype=torch.int64)

    def views(self, vector: Tensor) -> list[Tensor]:
        """The parts of `vector` (`[size]`) in the tensors' shapes; no copy."""
        return [vector[s.offset : s.offset + s.size].view(s.shape) for s in self.segments]

    def flats(self, vector: Tensor) -> list[Tensor]:
        """The same parts of `vector` (`[size]`), each `[segment.size]`; no copy."""
        return [vector[s.offset : s.offset + s.size] for s in self.segments]

    def counts(self, indices: Tensor) -> list[int]:
        """How many of the sorted `indices` (`[k]` int64) fall into each segment."""
        return torch.searchsorted(indices, self.bounds.to(indices.device)).diff().tolist()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.segments == other.segments

    def __hash__(self) -> int:
        return hash(self.segments)

    def __repr__(self) -> str:
        return f"Layout({len(self.segments)} tensors, {self.size:,} elements)"


class SparseVector(NamedTuple):
    """Some elements of a vector; the others are zero.

    Attributes:
        indices: `[k]` int64, strictly increasing, each in `[0, size)`.
        values: `[k]`, floating point.
        size: Length of the whole vector.
    """

    indices: Tensor
    values: Tensor
    size: int

    def dense(self) -> Tensor:
        """The whole vector, `[size]`, in the values' dtype."""
        return self.values.new_zeros(self.size).index_copy_(0, self.indices, self.values)


def mean(vectors: Iterable[SparseVector | Tensor], dtype: torch.dtype) -> SparseVector | Tensor:
    """The mean of vectors of one size, of at least one; equal bits wherever the same are given in the same order.

    Sparse while the union of the vectors' elements surely is, else dense. The order of each sum is the order of
    `vectors`, on any device. They are taken one after the other, and not held once the sum is dense.
    """
    sparse: list[SparseVector] = []
    elements, count = 0, 0
    total: Tensor | None = None
    for vector in vectors:
        count += 1
        if total is None and isinstance(vector, SparseVector):
            elements += vector.indices.numel()
            if elements <= vector.size // 8:
                sparse.append(vector)
                continue
        if total is None:
            values, size = vector[1:] if isinstance(vector, SparseVector) else (vector, vector.numel())
            total = values.new_zeros(size, dtype=dtype)
            for earlier in sparse:
                _add(total, earlier)
            sparse.clear()
        _add(total, vector)
    if total is not None:
        return total.div_(count)
    values = torch.cat([vector.values.to(dtype) for vector in sparse])
    kernels = kernels_for(values.device, dtype)
    indices, sums = kernels.add_up(torch.cat([vector.indices for vector in sparse]), values)
    return SparseVector(indices, sums.div_(count), sparse[0].size)


def _add(total: Tensor, vector: SparseVector | Tensor) -> None:
    if isinstance(vector, SparseVector):
        # The indices of one vector differ, so this touches an element once.
        total.index_add_(0, vector.indices, vector.values.to(total.dtype))
    else:
        total.add_(vector)
