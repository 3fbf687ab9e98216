"""The definition of every sketch kernel, in torch operations that run on any device."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Weyl constant and multipliers of SplitMix64 (Steele, Lea, Flood 2014).
GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

# Elements hashed together if a row has that many columns: one for each bit of the word that holds their signs.
BLOCK = 64

# Elements processed together; a multiple of every block size.
_PIECE = 1 << 18


class Candidates(NamedTuple):
    """Elements whose estimates reach a threshold in magnitude.

    Attributes:
        positions: `[m]`, sorted; int32 if the vector has at most 2^31 elements, else int64.
        estimates: `[m]` in the table's dtype.
    """

    positions: Tensor
    estimates: Tensor


def block_of(columns: int) -> int:
    """How many consecutive elements are hashed together: a power of two, at most `columns`."""
    return min(BLOCK, 1 << columns.bit_length() - 1)


def keys_of(seed: int, rows: int) -> list[int]:
    """The key of each row's hash, as an unsigned 64-bit integer."""
    return [mixed(seed + (row + 1) * GOLDEN) for row in range(rows)]


def as_int64(number: int) -> int:
    """The int64 with the low 64 bits of `number`, in two's complement."""
    return (number + 2**63) % 2**64 - 2**63


def sampled_size(size: int, width: int, stride: int) -> int:
    """How many of `size` elements lie in every `stride`-th block of `width`, starting with the first block."""
    whole, rest = divmod(size, width)
    return -(-whole // stride) * width + (rest if whole % stride == 0 else 0)


class SketchKernels:
    """The kernels in torch. Subclasses are faster.

    All give the same bits when they estimate, and all on the CPU give the same bits when they insert. docs/formats.md
    specifies the hash, bit by bit.

    Arguments that methods share:
        table: `[rows, columns]` float32 or float64, contiguous, with 1 to 2^31 columns. Values and estimates have its
            dtype.
        size: How many elements the vector has.
        positions: `[m]` int64, none negative.
        seed: Taken modulo 2^64.
    """

    def insert_(self, table: Tensor, x: Tensor, seed: int) -> None:
        """Adds `x` (`[n]`, the table's dtype) to each row in place; on the CPU, in order of position."""
        width = block_of(table.shape[1])
        for start in range(0, x.numel(), _PIECE):
            values = x[start : start + _PIECE]
            first = start // width
            blocks = torch.arange(first, first - (-values.numel() // width), device=x.device)
            self._add_(table, blocks[:, None], torch.arange(width, device=x.device), values, seed)

    def insert_at_(self, table: Tensor, positions: Tensor, values: Tensor, seed: int) -> None:
        """Adds elements with given positions and `values` (`[m]`) to each row in place; on the CPU, in that order."""
        width = block_of(table.shape[1])
        for at, part in zip(positions.split(_PIECE), values.split(_PIECE)):
            self._add_(table, at // width, at % width, part, seed)

    def query(self, table: Tensor, size: int, seed: int, stride: int = 1) -> Tensor:
        """Estimates a vector's elements, or only those in every `stride`-th block: `[m]`, in order of position."""
        estimates = table.new_empty(sampled_size(size, block_of(table.shape[1]), stride))
        for start, part in self._pieces(table, size, seed, stride):
            estimates[start : start + part.numel()] = part
        return estimates

    def query_at(self, table: Tensor, positions: Tensor, seed: int) -> Tensor:
        """Estimates the elements at `positions`: `[m]`."""
        width = block_of(table.shape[1])
        parts = positions.split(_PIECE)
        return torch.cat([self._estimates(table, part // width, part % width, seed) for part in parts])

    def reaching(self, table: Tensor, size: int, threshold: float, capacity: int, seed: int) -> Candidates | None:
        """Finds the elements whose estimates reach a positive threshold in magnitude; None if more than `capacity`.

        Other estimates are not kept, so they take no memory.
        """
        positions = [torch.empty(0, dtype=position_dtype(size), device=table.device)]
        estimates, held = [table.new_empty(0)], 0
        for start, part in self._pieces(table, size, seed):
            reached = (part.abs() >= threshold).nonzero().view(-1)
            held += reached.numel()
            if held > capacity:
                return None
            positions.append((reached + start).to(position_dtype(size)))
            estimates.append(part[reached])
        return Candidates(torch.cat(positions), torch.cat(estimates))

    def _pieces(self, table: Tensor, size: int, seed: int, stride: int = 1) -> Iterator[tuple[int, Tensor]]:
        """What `query` returns, in pieces; each comes with its start in that result."""
        width = block_of(table.shape[1])
        total = sampled_size(size, width, stride)
        for start in range(0, total, _PIECE):
            stop = min(start + _PIECE, total)
            blocks = torch.arange(start // width, -(-stop // width), device=table.device) * stride
            offsets = torch.arange(width, device=table.device)
            yield start, self._estimates(table, blocks[:, None], offsets, seed)[: stop - start]

    def _add_(self, table: Tensor, blocks: Tensor, offsets: Tensor, values: Tensor, seed: int) -> None:
        for key, row in zip(keys_of(seed, table.shape[0]), table):
            buckets, negative = _hashed(key, blocks, offsets, table.shape[1])
            buckets, negative = buckets[: values.numel()], negative[: values.numel()]
            row.index_add_(0, buckets, torch.where(negative, -values, values))

    def _estimates(self, table: Tensor, blocks: Tensor, offsets: Tensor, seed: int) -> Tensor:
        """Medians over the rows; with an even number of rows, half the sum of the middle two. Zeros become +0."""
        estimates = []
        for key, row in zip(keys_of(seed, table.shape[0]), table):
            buckets, negative = _hashed(key, blocks, offsets, table.shape[1])
            read = row[buckets]
            estimates.append(torch.where(negative, -read, read))
        rows = len(estimates)
        ordered = torch.stack(estimates).sort(0).values
        median = ordered[rows // 2] if rows % 2 else (ordered[rows // 2 - 1] + ordered[rows // 2]) * 0.5
        return median + 0.0


def position_dtype(size: int) -> torch.dtype:
    """The dtype of positions in a vector of `size`."""
    return torch.int32 if size <= 2**31 else torch.int64


def _hashed(key: int, blocks: Tensor, offsets: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The columns of elements in a row, `[m]` int64, and whether they are negated there, `[m]` bool.

    Works in int64: torch's products and sums wrap around on all devices, so they have the same low 64 bits as those of
    unsigned integers. Tests compare them with Python integers. `offsets` are broadcast with `blocks`.
    """
    state = (2 * blocks + 1) * as_int64(GOLDEN) + as_int64(key)
    # Never negative: 32 bits times at most 2³¹.
    starts = _shifted_right(_mix64(state), 32) * columns >> 32
    words = _mix64(state + as_int64(GOLDEN))
    buckets = starts + offsets
    buckets = torch.where(buckets < columns, buckets, buckets - columns)
    return buckets.view(-1), (words >> offsets & 1).bool().view(-1)


def _shifted_right(x: Tensor, bits: int) -> Tensor:
    """A logical right shift; torch's own shifts in the sign."""
    return x >> bits & (1 << 64 - bits) - 1


def _mix64(x: Tensor) -> Tensor:
    """SplitMix64's finalizer."""
    x = (x ^ _shifted_right(x, 30)) * as_int64(MULTIPLIERS[0])
    x = (x ^ _shifted_right(x, 27)) * as_int64(MULTIPLIERS[1])
    return x ^ _shifted_right(x, 31)


def mixed(x: int) -> int:
    """SplitMix64's finalizer, for a Python integer."""
    x %= 2**64
    x = (x ^ x >> 30) * MULTIPLIERS[0] % 2**64
    x = (x ^ x >> 27) * MULTIPLIERS[1] % 2**64
    return x ^ x >> 31
