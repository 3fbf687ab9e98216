"""Count sketches in numba: blocks of 64 elements, added and read as wide as the processor does it."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparsecomm.kernels.cpu import _WORD, Flags, Floats, Positions, Scalar, _flag, _note, compiled
from lightning_sparsecomm.kernels.sketch import (
    BLOCK,
    GOLDEN,
    MULTIPLIERS,
    Candidates,
    SketchKernels,
    block_of,
    keys_of,
    position_dtype,
    sampled,
)

Words = NDArray[np.uint64]
Network = NDArray[np.int64]

_GOLDEN = np.uint64(GOLDEN)
_FIRST, _SECOND = (np.uint64(multiplier) for multiplier in MULTIPLIERS)
_ONE, _TWO = np.uint64(1), np.uint64(2)

# Blocks hashed together. Their estimates, of five rows in float32, stay in the first-level cache.
_GROUP = 16

# What of two compared numbers is looked at later.
_BOTH, _LESSER, _GREATER = 0, 1, 2


def _prefetching(typing: Any, row: Any, index: Any) -> Any:
    """What `_prefetch` becomes when it is compiled."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.bitcast(builder.gep(array.data, [arguments[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        function = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], function)
        # For reading and writing; into all levels; data.
        builder.call(prefetch, [pointer, number(1), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(row, index), generate


# Has the processor fetch row[index] into its cache. It may lie behind the row's end: nothing is read.
_prefetch = cast("Callable[[Floats, np.uint64], None]", intrinsic(_prefetching))


@compiled
def _mixed(x: np.uint64) -> np.uint64:
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


@compiled
def _hash(key: np.uint64, first: int, stride: int, row: Floats, starts: Words, signs: Words, count: int) -> None:
    """Where `count` blocks, every `stride`-th from `first` on, begin in a row, and their signs; fetches the row there.

    Without that, most of the time would be spent on waiting for memory, one block after the other.
    """
    columns = np.uint64(row.size)
    for i in range(count):
        state = key + (_TWO * np.uint64(first + i * stride) + _ONE) * _GOLDEN
        starts[i] = (_mixed(state) >> np.uint64(32)) * columns >> np.uint64(32)
        signs[i] = _mixed(state + _GOLDEN)
    # Lines of 64 bytes, in loops that are unrolled.
    if row.itemsize == 4:
        for i in range(count):
            for line in range(BLOCK // 16 + 1):
                _prefetch(row, starts[i] + np.uint64(16 * line))
    else:
        for i in range(count):
            for line in range(BLOCK // 8 + 1):
                _prefetch(row, starts[i] + np.uint64(8 * line))


# Below, indices have no sign, so that they need not be looked at for a negative one that counts from the end; and no
# views are taken of one block, whose references would be counted.


@compiled
def _add(x: Floats, at: np.uint64, row: Floats, start: np.uint64, signs: np.uint64) -> None:
    for i in range(BLOCK):
        j = np.uint64(i)
        row[start + j] += -x[at + j] if (signs >> j) & _ONE else x[at + j]


@compiled
def _read(row: Floats, start: np.uint64, signs: np.uint64, out: Floats, at: np.uint64) -> None:
    for i in range(BLOCK):
        j = np.uint64(i)
        out[at + j] = -row[start + j] if (signs >> j) & _ONE else row[start + j]


@compiled
def _column(start: np.uint64, offset: np.uint64, row: Floats) -> np.uint64:
    column = start + offset
    return column if column < np.uint64(row.size) else column - np.uint64(row.size)


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
                    _add(x, np.uint64(at), row, starts[i], signs[i])
                else:
                    # A block that goes beyond the row's end, or is not a whole one.
                    for offset in range(min(width, x.size - at)):
                        column = _column(starts[i], np.uint64(offset), row)
                        value = x[at + offset]
                        row[column] += -value if (signs[i] >> np.uint64(offset)) & _ONE else value


@compiled
def _compare(rows: Floats, pitch: int, size: int, low: int, high: int, kept: int) -> None:
    """Puts the lesser of two rows of `pitch` elements into the one, the greater into the other, or both."""
    # Each form by itself becomes a minimum, a maximum or both, many elements at a time.
    first, second = np.uint64(low * pitch), np.uint64(high * pitch)
    if kept == _LESSER:
        for i in range(size):
            a, b = rows[first + np.uint64(i)], rows[second + np.uint64(i)]
            rows[first + np.uint64(i)] = a if a < b else b
    elif kept == _GREATER:
        for i in range(size):
            a, b = rows[first + np.uint64(i)], rows[second + np.uint64(i)]
            rows[second + np.uint64(i)] = a if a > b else b
    else:
        for i in range(size):
            a, b = rows[first + np.uint64(i)], rows[second + np.uint64(i)]
            rows[first + np.uint64(i)] = a if a < b else b
            rows[second + np.uint64(i)] = a if a > b else b


@compiled
def _median_of_three(x: Floats, y: Floats, z: Floats, out: Floats) -> None:
    zero = out.dtype.type(0)
    for i in range(out.size):
        a, b, c = x[i], y[i], z[i]
        lesser, greater = a if a < b else b, a if a > b else b
        least = greater if greater < c else c
        out[i] = (lesser if lesser > least else least) + zero


@compiled
def _median_of_five(v: Floats, w: Floats, x: Floats, y: Floats, z: Floats, out: Floats) -> None:
    zero = out.dtype.type(0)
    for i in range(out.size):
        a, b, c, d, e = v[i], w[i], x[i], y[i], z[i]
        # The least of two pairs, and the greatest, are not the median: it is that of the three which are left.
        low, high = a if a < b else b, a if a > b else b
        lower, higher = c if c < d else d, c if c > d else d
        low = low if low > lower else lower
        high = high if high < higher else higher
        lesser, greater = low if low < high else high, low if low > high else high
        least = greater if greater < e else e
        out[i] = (lesser if lesser > least else least) + zero


@compiled
def _median(estimates: Floats, network: Network, out: Floats) -> None:
    """Of the first columns of `estimates`, which are ordered as far as need be."""
    rows, pitch = estimates.shape
    size = out.size
    # The usual numbers of rows in registers; zeros are +0 in the end.
    if rows == 3:
        _median_of_three(estimates[0], estimates[1], estimates[2], out)
        return
    if rows == 5:
        _median_of_five(estimates[0], estimates[1], estimates[2], estimates[3], estimates[4], out)
        return
    flat = estimates.reshape(-1)
    for i in range(network.shape[0]):
        _compare(flat, pitch, size, network[i, 0], network[i, 1], network[i, 2])
    lower, upper = estimates[(rows - 1) // 2], estimates[rows // 2]
    zero, half = out.dtype.type(0), out.dtype.type(0.5)
    if rows % 2:
        for i in range(size):
            out[i] = upper[i] + zero
    else:
        for i in range(size):
            out[i] = (lower[i] + upper[i]) * half + zero


@compiled
def _estimate(
    table: Floats,
    keys: Words,
    width: int,
    first: int,
    stride: int,
    network: Network,
    starts: Words,
    signs: Words,
    estimates: Floats,
    out: Floats,
) -> None:
    """Estimates of every `stride`-th block from `first` on; as many as `out` has room for, a group at most."""
    count = (out.size + width - 1) // width
    for j in range(table.shape[0]):
        row, read = table[j], estimates[j]
        _hash(keys[j], first, stride, row, starts, signs, count)
        last = np.uint64(max(row.size - BLOCK, 0))
        for i in range(count):
            at = i * width
            if width == BLOCK and at + BLOCK <= out.size and starts[i] <= last:
                _read(row, starts[i], signs[i], read, np.uint64(at))
            else:
                for offset in range(min(width, out.size - at)):
                    value = row[_column(starts[i], np.uint64(offset), row)]
                    read[at + offset] = -value if (signs[i] >> np.uint64(offset)) & _ONE else value
    _median(estimates, network, out)


@compiled
def _query(table: Floats, keys: Words, width: int, stride: int, network: Network, out: Floats) -> None:
    group = _GROUP * width
    starts, signs = np.empty(_GROUP, np.uint64), np.empty(_GROUP, np.uint64)
    estimates = np.empty((table.shape[0], group), table.dtype)
    for start in range(0, out.size, group):
        part, first = out[start : start + group], start // width * stride
        _estimate(table, keys, width, first, stride, network, starts, signs, estimates, part)


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
    group = _GROUP * width
    starts, signs = np.empty(_GROUP, np.uint64), np.empty(_GROUP, np.uint64)
    estimates = np.empty((table.shape[0], group), table.dtype)
    out = np.empty(group, table.dtype)
    flags: Flags = np.zeros((group + _WORD - 1) // _WORD * _WORD, np.uint8)
    words = flags.view(np.uint64)
    count = 0
    for start in range(0, size, group):
        part = out[: min(group, size - start)]
        _estimate(table, keys, width, start // width, 1, network, starts, signs, estimates, part)
        if part.size < group:
            flags[:] = 0
        _flag(part, threshold, flags)
        before = count
        count = _note(flags, words, part.size, start, positions, count)
        if count > positions.size - _WORD:
            return count
        for i in range(before, count):
            found[i] = part[positions[i] - start]
    return count


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
            column = _column(start[0], offset, row)
            row[column] += -values[i] if (signs[0] >> offset) & _ONE else values[i]


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
                value = row[_column(start[0], offset, row)]
                read[i] = -value if (signs[0] >> offset) & _ONE else value
        _median(estimates, network, out[first : first + group])


@lru_cache
def _network(rows: int) -> Network:
    """Which rows to compare, so that the middle ones are in their places: Batcher's odd-even merge sort, less what does
    not matter to them. Each comparison leaves the lesser in the first, the greater in the second, or both."""
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
    for low, high in reversed(comparisons):
        if needed & {low, high}:
            both = low in needed and high in needed
            kept.append((low, high, _BOTH if both else _LESSER if low in needed else _GREATER))
            needed |= {low, high}
    return np.array(kept[::-1], np.int64).reshape(-1, 3)


class CpuSketchKernels(SketchKernels):
    """Numba kernels for float32 and float64 on the CPU."""

    def insert_(self, table: Tensor, x: Tensor, seed: int) -> None:
        _insert(table.numpy(), x.contiguous().numpy(), *_parameters(table, seed))

    def insert_at_(self, table: Tensor, positions: Tensor, values: Tensor, seed: int) -> None:
        arrays = positions.contiguous().numpy(), values.contiguous().numpy()
        _insert_at(table.numpy(), *arrays, *_parameters(table, seed))

    def query(self, table: Tensor, size: int, seed: int, stride: int = 1) -> Tensor:
        keys, width = _parameters(table, seed)
        # Not torch's memory: numpy asks for huge pages, so that fewer have to be made on the way.
        values = table.numpy()
        estimates = np.empty(sampled(size, width, stride), values.dtype)
        _query(values, keys, width, stride, _network(table.shape[0]), estimates)
        return torch.from_numpy(estimates)

    def query_at(self, table: Tensor, positions: Tensor, seed: int) -> Tensor:
        estimates = table.new_empty(positions.numel())
        parameters = _parameters(table, seed)
        _query_at(
            table.numpy(), positions.contiguous().numpy(), *parameters, _network(table.shape[0]), estimates.numpy()
        )
        return estimates

    def reaching(self, table: Tensor, size: int, threshold: float, capacity: int, seed: int) -> Candidates | None:
        room = min(capacity, size)
        positions = torch.empty(room + _WORD, dtype=position_dtype(size))
        estimates = table.new_empty(room)
        values = table.numpy()
        count = _reaching(
            values,
            *_parameters(table, seed),
            _network(table.shape[0]),
            size,
            values.dtype.type(threshold),
            positions.numpy(),
            estimates.numpy(),
        )
        return Candidates(positions[:count], estimates[:count]) if count <= room else None


def _parameters(table: Tensor, seed: int) -> tuple[Words, int]:
    return np.array(keys_of(seed, table.shape[0]), np.uint64), block_of(table.shape[1])
