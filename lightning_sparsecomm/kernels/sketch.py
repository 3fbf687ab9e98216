"""What the kernels of count sketches compute, in torch operations that run on any device."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Weyl constant and multipliers of SplitMix64 (Steele, Lea, Flood 2014).
GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

# Elements hashed together, where a row has that many columns: one for each bit of the word that holds their signs.
BLOCK = 64

# Elements looked at together; a multiple of every block.
_PIECE = 1 << 18


class Candidates(NamedTuple):
    """Elements whose estimates reach a threshold.

    Attributes:
        positions: `[m]`, sorted; int32 where all that there could be are below 2^31, else int64.
        estimates: `[m]` in the table's dtype.
    """

    positions: Tensor
    estimates: Tensor


def block_of(columns: int) -> int:
    """How many consecutive elements are hashed together: a power of two, never more than a row has columns."""
    return min(BLOCK, 1 << columns.bit_length() - 1)


def keys_of(seed: int, rows: int) -> list[int]:
    """The key of each row's hash, 64 bits without sign."""
    return [_mixed_int(seed + (row + 1) * GOLDEN) for row in range(rows)]


def signed(number: int) -> int:
    """The number with the same 64 bits in two's complement, from −2^63 to 2^63 − 1."""
    return (number + 2**63) % 2**64 - 2**63


def sampled(size: int, width: int, stride: int) -> int:
    """How many of `size` elements are in every `stride`-th block of `width`, from the first on."""
    whole, rest = divmod(size, width)
    return -(-whole // stride) * width + (rest if whole % stride == 0 else 0)


class SketchKernels:
    """The kernels. Subclasses are faster. Estimates have the same bits everywhere, and what is inserted on the CPU has.

    docs/formats.md has the hash, bit by bit. `table` is `[rows, columns]` float32 or float64, contiguous, 1 to 2^31
    columns; `positions` are `[m]` int64, none negative; `seed` is taken modulo 2^64.
    """

    def insert_(self, table: Tensor, x: Tensor, seed: int) -> None:
        """Adds every element of `x`, `[n]` in the table's dtype, to each row; on the CPU, in order of position."""
        width = block_of(table.shape[1])
        for start in range(0, x.numel(), _PIECE):
            values = x[start : start + _PIECE]
            first = start // width
            blocks = torch.arange(first, first - (-values.numel() // width), device=x.device)
            self._add_(table, blocks[:, None], _offsets(table), values, seed)

    def insert_at_(self, table: Tensor, positions: Tensor, values: Tensor, seed: int) -> None:
        """Adds `values`, `[m]` in the table's dtype, as the elements at `positions`; on the CPU, in their order."""
        width = block_of(table.shape[1])
        for start in range(0, positions.numel(), _PIECE):
            part = positions[start : start + _PIECE]
            self._add_(table, part // width, part % width, values[start : start + _PIECE], seed)

    def query(self, table: Tensor, size: int, seed: int, stride: int = 1) -> Tensor:
        """Estimates of the elements below `size` in every `stride`-th block, in order of position, `[m]`."""
        estimates = table.new_empty(sampled(size, block_of(table.shape[1]), stride))
        for start, part in self._pieces(table, size, seed, stride):
            estimates[start : start + part.numel()] = part
        return estimates

    def query_at(self, table: Tensor, positions: Tensor, seed: int) -> Tensor:
        """Estimates of the elements at `positions`, `[m]`."""
        width = block_of(table.shape[1])
        estimates = table.new_empty(positions.numel())
        for start in range(0, positions.numel(), _PIECE):
            part = positions[start : start + _PIECE]
            estimates[start : start + _PIECE] = self._estimates(table, part // width, part % width, seed)
        return estimates

    def reaching(self, table: Tensor, size: int, threshold: float, capacity: int, seed: int) -> Candidates | None:
        """The elements below `size` the magnitude of whose estimates reaches a positive threshold; None where they are
        more than `capacity`. Takes no memory for the others' estimates."""
        positions, estimates, held = [], [], 0
        for start, part in self._pieces(table, size, seed):
            reached = (part.abs() >= threshold).nonzero().view(-1)
            held += reached.numel()
            if held > capacity:
                return None
            positions.append((reached + start).to(position_dtype(size)))
            estimates.append(part[reached])
        if not positions:
            return Candidates(torch.empty(0, dtype=position_dtype(size), device=table.device), table.new_empty(0))
        return Candidates(torch.cat(positions), torch.cat(estimates))

    def _pieces(self, table: Tensor, size: int, seed: int, stride: int = 1) -> Iterator[tuple[int, Tensor]]:
        """What `query` returns, piece by piece, each with the place where it begins there."""
        width = block_of(table.shape[1])
        total = sampled(size, width, stride)
        for start in range(0, total, _PIECE):
            stop = min(start + _PIECE, total)
            blocks = torch.arange(start // width, -(-stop // width), device=table.device) * stride
            yield start, self._estimates(table, blocks[:, None], _offsets(table), seed)[: stop - start]

    def _add_(self, table: Tensor, blocks: Tensor, offsets: Tensor, values: Tensor, seed: int) -> None:
        for key, row in zip(keys_of(seed, table.shape[0]), table):
            buckets, negative = _hashed(key, blocks, offsets, table.shape[1])
            buckets, negative = buckets[: values.numel()], negative[: values.numel()]
            row.index_add_(0, buckets, torch.where(negative, -values, values))

    def _estimates(self, table: Tensor, blocks: Tensor, offsets: Tensor, seed: int) -> Tensor:
        """Medians over the rows; of an even number of them, half the sum of the middle two. A zero is +0."""
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
    """What holds candidates' positions below `size`."""
    return torch.int32 if size <= 2**31 else torch.int64


def _offsets(table: Tensor) -> Tensor:
    return torch.arange(block_of(table.shape[1]), device=table.device)


def _hashed(key: int, blocks: Tensor, offsets: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Where in a row elements are, and whether they are negated there; `blocks` and `offsets` are broadcast.

    In int64, whose products and sums have the same low 64 bits as those of integers without sign: torch's wrap around
    on all devices, which tests hold against Python's integers.
    """
    state = (2 * blocks + 1) * signed(GOLDEN) + signed(key)
    # 32 bits times 2³¹ at most: never negative.
    starts = _shifted(_mixed(state), 32) * columns >> 32
    words = _mixed(state + signed(GOLDEN))
    buckets = starts + offsets
    buckets = torch.where(buckets < columns, buckets, buckets - columns)
    return buckets.view(-1), (words >> offsets & 1).bool().view(-1)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """`x` shifted to the right, with zeros from the left: torch shifts in the sign."""
    return x >> bits & (1 << 64 - bits) - 1


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * signed(MULTIPLIERS[0])
    x = (x ^ _shifted(x, 27)) * signed(MULTIPLIERS[1])
    return x ^ _shifted(x, 31)


def _mixed_int(x: int) -> int:
    x %= 2**64
    x = (x ^ x >> 30) * MULTIPLIERS[0] % 2**64
    x = (x ^ x >> 27) * MULTIPLIERS[1] % 2**64
    return x ^ x >> 31
