"""Count sketches in numba: rows are added to and read in blocks of 64 elements, with SIMD instructions.

Indices are unsigned, so numba generates no code for negative ones that count from the end. Inner loops take an array
and an offset rather than a view, because numba counts references to views.
"""

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparsecomm.kernels.numba_jit import Flags, Floats, Positions, Scalar, Words, compiled, prefetch
from lightning_sparsecomm.kernels.sketch.reference import (
    BLOCK,
    GOLDEN,
    MULTIPLIERS,
    Candidates,
    SketchKernels,
    block_of,
    keys_of,
    position_dtype,
    sampled_size,
)
from lightning_sparsecomm.kernels.updates.cpu_flags import FLAGS_PER_WORD, append_flagged, flag

_GOLDEN = np.uint64(GOLDEN)
_FIRST, _SECOND = (np.uint64(multiplier) for multiplier in MULTIPLIERS)
_ONE, _TWO = np.uint64(1), np.uint64(2)

Network = NDArray[np.int64]

# Blocks hashed together. Their estimates, for five rows in float32, stay in the L1 cache.
_GROUP = 16


class CpuSketchKernels(SketchKernels):
    """Numba kernels for float32 and float64 on the CPU."""

    def insert_(self, table: Tensor, x: Tensor, seed: int) -> None:
        _insert(table.numpy(), x.contiguous().numpy(), *_parameters(table, seed))

    def insert_at_(self, table: Tensor, positions: Tensor, values: Tensor, seed: int) -> None:
        arrays = positions.contiguous().numpy(), values.contiguous().numpy()
        _insert_at(table.numpy(), *arrays, *_parameters(table, seed))

    def query(self, table: Tensor, size: int, seed: int, stride: int = 1) -> Tensor:
        keys, width = _parameters(table, seed)
        # Allocated by NumPy, not torch: NumPy asks for huge pages, so fewer page faults follow.
        values = table.numpy()
        estimates = np.empty(sampled_size(size, width, stride), values.dtype)
        _query(values, keys, width, stride, median_network(table.shape[0]), estimates)
        return torch.from_numpy(estimates)

    def query_at(self, table: Tensor, positions: Tensor, seed: int) -> Tensor:
        estimates = table.new_empty(positions.numel())
        network = median_network(table.shape[0])
        arrays = table.numpy(), positions.contiguous().numpy()
        _query_at(*arrays, *_parameters(table, seed), network, estimates.numpy())
        return estimates

    def reaching(self, table: Tensor, size: int, threshold: float, capacity: int, seed: int) -> Candidates | None:
        room = min(capacity, size)
        positions = torch.empty(room + FLAGS_PER_WORD, dtype=position_dtype(size))
        estimates = table.new_empty(room)
        values, network = table.numpy(), median_network(table.shape[0])
        least, found = values.dtype.type(threshold), (positions.numpy(), estimates.numpy())
        count = _reaching(values, *_parameters(table, seed), network, size, least, *found)
        return Candidates(positions[:count], estimates[:count]) if count <= room else None


@lru_cache
def median_network(rows: int) -> Network:
    """Comparisons that put the middle one or two of `rows` in their sorted places: `[comparisons, 2]`, pairs of rows.

    Batcher's odd-even merge sort, without the comparisons that don't matter.
    """
    comparisons = []
    length = 1
    while length < rows:
        gap = length
        while gap:
            for begin in range(gap % length, rows - gap, 2 * gap):
                for low in range(begin, min(begin + gap, rows - gap)):
                    if low // (2 * length) == (low + gap) // (2 * length):
                        comparisons.append((low, low + gap))
            gap //= 2
        length *= 2
    needed = {(rows - 1) // 2, rows // 2}
    kept = []
    for pair in reversed(comparisons):
        if not needed.isdisjoint(pair):
            kept.append(pair)
            needed.update(pair)
    return np.array(kept[::-1], np.int64).reshape(-1, 2)


def _parameters(table: Tensor, seed: int) -> tuple[Words, int]:
    return np.array(keys_of(seed, table.shape[0]), np.uint64), block_of(table.shape[1])


@compiled
def _mix64(x: np.uint64) -> np.uint64:
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


@compiled
def _hash(key: np.uint64, first: int, stride: int, row: Floats, starts: Words, signs: Words, count: int) -> None:
    """Hashes `count` blocks: every `stride`-th, from block `first` on.

    Writes their first columns to `starts` and their sign bits to `signs`, and prefetches the row there. Without the
    prefetch, each block would wait for memory in turn, and waiting would take most of the time.
    """
    columns = np.uint64(row.size)
    for i in range(count):
        state = key + (_TWO * np.uint64(first + i * stride) + _ONE) * _GOLDEN
        starts[i] = (_mix64(state) >> np.uint64(32)) * columns >> np.uint64(32)
        signs[i] = _mix64(state + _GOLDEN)
    # Cache lines of 64 bytes. The counts are constants, so the loops are unrolled.
    if row.itemsize == 4:
        for i in range(count):
            for line in range(BLOCK // 16 + 1):
                prefetch(row, starts[i] + np.uint64(16 * line))
    else:
        for i in range(count):
            for line in range(BLOCK // 8 + 1):
                prefetch(row, starts[i] + np.uint64(8 * line))


@compiled
def _column(start: np.uint64, offset: np.uint64, row: Floats) -> np.uint64:
    column = start + offset
    return column if column < np.uint64(row.size) else column - np.uint64(row.size)


@compiled
def _signed(value: Scalar, signs: np.uint64, offset: np.uint64) -> Scalar:
    return -value if (signs >> offset) & _ONE else value


@compiled
def _add_block(x: Floats, at: np.uint64, row: Floats, start: np.uint64, signs: np.uint64) -> None:
    for i in range(BLOCK):
        j = np.uint64(i)
        row[start + j] += _signed(x[at + j], signs, j)


@compiled
def _read_block(row: Floats, start: np.uint64, signs: np.uint64, out: Floats, at: np.uint64) -> None:
    for i in range(BLOCK):
        j = np.uint64(i)
        out[at + j] = _signed(row[start + j], signs, j)


@compiled
def _insert(table: Floats, x: Floats, keys: Words, width: int) -> None:
    starts, signs = np.empty(_GROUP, np.uint64), np.empty(_GROUP, np.uint64)
    for first in range(0, x.size, _GROUP * width):
        count = min(_GROUP, (x.size - first + width - 1) // width)
        for j in range(table.shape[0]):
            row = table[j]
            _hash(keys[j], first // width, 1, row, starts, signs, count)
            last = np.uint64(max(row.size - BLOCK, 0))
            for i in range(count):
                at = first + i * width
                if width == BLOCK and at + BLOCK <= x.size and starts[i] <= last:
                    _add_block(x, np.uint64(at), row, starts[i], signs[i])
                else:
                    # The block wraps around the row's end, or is shorter than BLOCK.
                    for offset in range(min(width, x.size - at)):
                        column = _column(starts[i], np.uint64(offset), row)
                        row[column] += _signed(x[at + offset], signs[i], np.uint64(offset))


@compiled
def _insert_at(table: Floats, positions: Positions, values: Floats, keys: Words, width: int) -> None:
    start, signs = np.empty(1, np.uint64), np.empty(1, np.uint64)
    for j in range(table.shape[0]):
        row = table[j]
        block = -1
        for i in range(positions.size):
            if positions[i] // width != block:
                block = positions[i] // width
                _hash(keys[j], block, 1, row, start, signs, 1)
            offset = np.uint64(positions[i] - block * width)
            row[_column(start[0], offset, row)] += _signed(values[i], signs[0], offset)


@compiled
def _order(rows: Floats, size: int, low: int, high: int) -> None:
    """Compares the first `size` elements of two rows: leaves the lesser in row `low`, the greater in row `high`."""
    first, second = rows[low], rows[high]
    for i in range(size):
        a, b = first[i], second[i]
        first[i] = a if a < b else b
        second[i] = a if a > b else b


@compiled
def _middle(a: Scalar, b: Scalar, c: Scalar) -> Scalar:
    lesser, greater = a if a < b else b, a if a > b else b
    least = greater if greater < c else c
    return lesser if lesser > least else least


@compiled
def _median(estimates: Floats, network: Network, out: Floats) -> None:
    """Writes to `out` the medians over the rows of `estimates`, whose contents may be reordered.

    `estimates` is `[rows, columns]`; only as many columns as `out` has elements are read.
    """
    rows, size = estimates.shape[0], out.size
    zero, half = out.dtype.type(0), out.dtype.type(0.5)
    # The usual numbers of rows are done in registers. Adding zero turns −0 into +0.
    if rows == 3:
        for i in range(size):
            out[i] = _middle(estimates[0, i], estimates[1, i], estimates[2, i]) + zero
        return
    if rows == 5:
        for i in range(size):
            a, b, c, d = estimates[0, i], estimates[1, i], estimates[2, i], estimates[3, i]
            # The least and the greatest of two pairs cannot be the median. The median of the other three is.
            low, high = a if a < b else b, a if a > b else b
            lower, higher = c if c < d else d, c if c > d else d
            low = low if low > lower else lower
            high = high if high < higher else higher
            out[i] = _middle(low, high, estimates[4, i]) + zero
        return
    for j in range(network.shape[0]):
        _order(estimates, size, network[j, 0], network[j, 1])
    first, second = estimates[(rows - 1) // 2], estimates[rows // 2]
    for i in range(size):
        out[i] = (second[i] if rows % 2 else (first[i] + second[i]) * half) + zero


Scratch = tuple[Words, Words, Floats]


@compiled
def _scratch(table: Floats, width: int) -> Scratch:
    """Memory for one group of blocks: first columns and signs, `[_GROUP]`, and estimates, `[rows, _GROUP·width]`."""
    estimates = np.empty((table.shape[0], _GROUP * width), table.dtype)
    return np.empty(_GROUP, np.uint64), np.empty(_GROUP, np.uint64), estimates


@compiled
def _estimate(
    table: Floats, keys: Words, width: int, first: int, stride: int, network: Network, scratch: Scratch, out: Floats
) -> None:
    """Estimates every `stride`-th block, from block `first` on, until `out` is full: one group of blocks at most."""
    starts, signs, estimates = scratch
    count = (out.size + width - 1) // width
    for j in range(table.shape[0]):
        row, read = table[j], estimates[j]
        _hash(keys[j], first, stride, row, starts, signs, count)
        last = np.uint64(max(row.size - BLOCK, 0))
        for i in range(count):
            at = i * width
            if width == BLOCK and at + BLOCK <= out.size and starts[i] <= last:
                _read_block(row, starts[i], signs[i], read, np.uint64(at))
            else:
                for offset in range(min(width, out.size - at)):
                    value = row[_column(starts[i], np.uint64(offset), row)]
                    read[at + offset] = _signed(value, signs[i], np.uint64(offset))
    _median(estimates, network, out)


@compiled
def _query(table: Floats, keys: Words, width: int, stride: int, network: Network, out: Floats) -> None:
    group, scratch = _GROUP * width, _scratch(table, width)
    for start in range(0, out.size, group):
        part, first = out[start : start + group], start // width * stride
        _estimate(table, keys, width, first, stride, network, scratch, part)


@compiled
def _query_at(table: Floats, positions: Positions, keys: Words, width: int, network: Network, out: Floats) -> None:
    group = _GROUP * BLOCK
    estimates = np.empty((table.shape[0], group), table.dtype)
    start, signs = np.empty(1, np.uint64), np.empty(1, np.uint64)
    for first in range(0, positions.size, group):
        part = positions[first : first + group]
        for j in range(table.shape[0]):
            row, read = table[j], estimates[j]
            block = -1
            for i in range(part.size):
                if part[i] // width != block:
                    block = part[i] // width
                    _hash(keys[j], block, 1, row, start, signs, 1)
                offset = np.uint64(part[i] - block * width)
                read[i] = _signed(row[_column(start[0], offset, row)], signs[0], offset)
        _median(estimates, network, out[first : first + group])


@compiled
def _reaching(
    table: Floats,
    keys: Words,
    width: int,
    network: Network,
    size: int,
    threshold: Scalar,
    positions: Positions,
    found: Floats,
) -> int:
    """Writes elements that reach `threshold` to `positions` and `found`; returns their count.

    Stops early once there are more than `found` has room for.
    """
    group, scratch = _GROUP * width, _scratch(table, width)
    out = np.empty(group, table.dtype)
    flags: Flags = np.zeros((group + FLAGS_PER_WORD - 1) // FLAGS_PER_WORD * FLAGS_PER_WORD, np.uint8)
    words = flags.view(np.uint64)
    count = 0
    for start in range(0, size, group):
        part = out[: min(group, size - start)]
        _estimate(table, keys, width, start // width, 1, network, scratch, part)
        if part.size < group:
            flags[:] = 0
        flag(part, threshold, flags)
        before = count
        count = append_flagged(flags, words, part.size, start, positions, count)
        if count > positions.size - FLAGS_PER_WORD:
            return count
        for i in range(before, count):
            found[i] = part[positions[i] - start]
    return count
