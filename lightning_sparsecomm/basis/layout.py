"""Where each parameter lies in a flat vector; dense and sparse vectors over such a layout."""

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparsecomm.basis.allocation import zeros
from lightning_sparsecomm.kernels import kernels_for

# Positions travel as unsigned 32-bit integers.
MAX_SIZE = 2**32 - 1


class TooLargeError(ValueError):
    """Tensors have more elements together than positions can tell.

    >>> issubclass(TooLargeError, ValueError)
    True
    """


class Segment(NamedTuple):
    """One parameter's place in the flat vector: elements `offset` to `offset + size`."""

    name: str
    shape: tuple[int, ...]
    offset: int
    size: int


class Layout:
    """Names, shapes and offsets of tensors laid out one after another in a flat vector.

    Immutable. Two ranks can exchange positions only if their layouts are equal: payloads carry the `fingerprint`.

    >>> layout = Layout([("weight", (2, 3)), ("bias", (2,))])
    >>> layout.size, [segment.offset for segment in layout.segments]
    (8, [0, 6])

    Args:
        tensors: Name and shape of each tensor, in order. Names must differ.

    Raises:
        ValueError: A name occurs twice.
        TooLargeError: The vector is too long for 32-bit positions.
    """

    def __init__(self, tensors: Iterable[tuple[str, Sequence[int]]]) -> None:
        segments: list[Segment] = []
        offset = 0
        for name, shape in tensors:
            size = prod(shape)
            segments.append(Segment(name, tuple(shape), offset, size))
            offset += size
        repeated = [name for name, count in Counter(segment.name for segment in segments).items() if count > 1]
        if repeated:
            raise ValueError(f"tensors must have different names; got {repeated[0]!r} twice. Name each tensor once.")
        if offset > MAX_SIZE:
            raise TooLargeError(
                f"tensors must have at most {MAX_SIZE:,} elements together, as positions travel as 32-bit integers;"
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
        """Views of `vector` (`[size]`), one for each tensor, in its shape."""
        return [flat.view(segment.shape) for flat, segment in zip(self.flats(vector), self.segments)]

    def flats(self, vector: Tensor) -> list[Tensor]:
        """Flat views of `vector` (`[size]`), one for each tensor: each `[segment.size]`."""
        return [vector[s.offset : s.offset + s.size] for s in self.segments]

    def counts(self, indices: Tensor) -> list[int]:
        """How many of the sorted `indices` (`[k]` int64) lie in each segment."""
        return torch.searchsorted(indices, self.bounds.to(indices.device)).diff().tolist()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.segments == other.segments

    def __hash__(self) -> int:
        return hash(self.segments)

    def __repr__(self) -> str:
        return f"Layout({len(self.segments)} tensors, {self.size:,} elements)"


class Vector(NamedTuple):
    """What one rank brings to a round of communication: a vector over a layout.

    >>> Vector(torch.ones(3)).present  # a gradient for every tensor
    ()

    Attributes:
        values: `[n]` float32 or wider, zero in segments that are not present, unless it `carries`. With `indices`,
            `[k]`: only the elements at those positions. Read only.
        present: For each segment of the layout, whether this rank has a gradient for it. Empty if it has all.
        carries: Whether `values` count in segments without a gradient on this rank too, where another rank has one. The
            same on all ranks.
        hints: For a stretch `(start, stop, k)`, sorted positions that include its k largest elements. Hints make
            selection faster and never change its result.
        nonfinite_segment: The first segment whose gradient is not finite; None if all are finite. If it is given, the
            values are meaningless, and the other ranks must be told.
        indices: `[k]` int64, sorted: the positions of `values`, if the gradients are sparse tensors; else None.
        entering: `[n]`: what this round's gradients have added to a residual that `values` are, for an
            `EnteringCompressor`. None where nothing asks for it, or nothing was there before.
    """

    values: Tensor
    present: Sequence[bool] = ()
    hints: Mapping[tuple[int, int, int], Tensor] = {}
    nonfinite_segment: int | None = None
    indices: Tensor | None = None
    carries: bool = False
    entering: Tensor | None = None


class SparseVector(NamedTuple):
    """Some elements of a vector. All others are zero.

    >>> SparseVector(torch.tensor([1, 3]), torch.tensor([0.5, -2.0]), size=4).dense()
    tensor([ 0.0000,  0.5000,  0.0000, -2.0000])

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
        whole = zeros(self.size, self.values)
        kernels_for(whole.device, whole.dtype).put_at_(whole, self.indices, self.values)
        return whole


def mean(vectors: Iterable[SparseVector | Tensor], dtype: torch.dtype) -> SparseVector | Tensor:
    """The mean of one or more vectors of equal size. Equal vectors in equal order give equal bits on every device.

    The result is sparse if the vectors are and hold at most an eighth of the elements, counted together. Otherwise it
    is dense. The vectors are consumed one by one; none is kept once the sum is dense. `dtype` is that of the sum.
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
            total = _zeros_for(vector, dtype)
            for earlier in sparse:
                add_to_(total, earlier)
            sparse.clear()
        add_to_(total, vector)
        # Before the next one is made.
        del vector
    if total is not None:
        return total.div_(count)
    values = torch.cat([vector.values.to(dtype) for vector in sparse])
    kernels = kernels_for(values.device, dtype)
    indices, sums = kernels.add_up(torch.cat([vector.indices for vector in sparse]), values)
    return SparseVector(indices, sums.div_(count), sparse[0].size)


def _zeros_for(vector: SparseVector | Tensor, dtype: torch.dtype) -> Tensor:
    """A dense vector of zeros, as long as this one."""
    if isinstance(vector, SparseVector):
        return zeros(vector.size, vector.values, dtype)
    return zeros(vector.numel(), vector, dtype)


def add_to_(total: Tensor, vector: SparseVector | Tensor, factor: float = 1) -> Tensor:
    """Adds a vector, times a factor, to `total`, `[n]`, in its dtype. Returns `total`."""
    if isinstance(vector, SparseVector):
        # A vector's indices are distinct, so each element is touched once and the order of sums is fixed.
        values = vector.values.to(total.dtype)
        kernels_for(total.device, total.dtype).add_at_(total, vector.indices, values, factor)
        return total
    return total.add_(vector.to(total.dtype), alpha=factor)


def values_of(vector: SparseVector | Tensor) -> Tensor:
    """The elements that a vector holds."""
    return vector.values if isinstance(vector, SparseVector) else vector


def count_of(vector: SparseVector | Tensor) -> int:
    """How many elements a vector holds."""
    return vector.indices.numel() if isinstance(vector, SparseVector) else vector.numel()
