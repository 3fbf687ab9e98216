"""Kernels in numba: one thread, without the interpreter's lock, safe in forked processes."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparsecomm.kernels.reference import Reference, Update

P = ParamSpec("P")
T = TypeVar("T")

Floats = NDArray[np.float32] | NDArray[np.float64]
Bits = NDArray[np.uint32] | NDArray[np.uint64]
Positions = NDArray[np.int64]
Scalar = np.float32 | np.float64

# A piece of residual, velocity and gradient stays in the first-level cache between the arithmetic and the comparison.
_PIECE = 2048
# Most blocks have no element that reaches the threshold, and cost a comparison of vectors.
_BLOCK = 32
# Bits looked at in one pass of the radix selection.
_DIGIT = 11


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, compiled at its first call and kept on disk, where something is writable, for later processes."""
    try:
        kernel: Callable[P, T] = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # raised when the function is decorated: no place for a cache
        kernel = numba.njit(nogil=True)(function)
    return kernel


@compiled
def _note(piece: Floats, start: int, threshold: Scalar, found: Positions, count: int) -> int:
    """Appends start + i for |piece[i]| >= threshold. `found` has room for a block more than it may hold."""
    capacity = found.size - _BLOCK
    for begin in range(0, piece.size, _BLOCK):
        block = piece[begin : begin + _BLOCK]
        hits = np.int32(0)
        for i in range(block.size):
            hits += np.int32(abs(block[i]) >= threshold)
        if hits:
            if count > capacity:
                return count
            # Written whether it is kept or not: a branch on data would be guessed wrong.
            for i in range(block.size):
                found[count] = start + begin + i
                count += int(abs(block[i]) >= threshold)
    return count


@compiled
def _reaching(x: Floats, threshold: Scalar, found: Positions) -> int:
    count = 0
    for start in range(0, x.size, _PIECE):
        count = _note(x[start : start + _PIECE], start, threshold, found, count)
    return count


@compiled
def _add(residual: Floats, gradient: Floats, keep: Scalar, scale: Scalar) -> None:
    for i in range(residual.size):
        residual[i] = keep * residual[i] + scale * gradient[i]


@compiled
def _add_velocity(
    residual: Floats,
    velocity: Floats,
    gradient: Floats,
    keep: Scalar,
    scale: Scalar,
    momentum: Scalar,
    gain: Scalar,
) -> None:
    for i in range(residual.size):
        u = momentum * velocity[i] + gain * (scale * gradient[i])
        velocity[i] = u
        residual[i] = keep * residual[i] + u


@compiled
def _add_nesterov(
    residual: Floats,
    velocity: Floats,
    gradient: Floats,
    keep: Scalar,
    scale: Scalar,
    momentum: Scalar,
    gain: Scalar,
    lookahead: Scalar,
) -> None:
    for i in range(residual.size):
        g = scale * gradient[i]
        u = momentum * velocity[i] + gain * g
        velocity[i] = u
        residual[i] = (keep * residual[i] + g) + lookahead * u


@compiled
def _update(
    residual: Floats,
    velocity: Floats,
    gradient: Floats,
    keep: Scalar,
    scale: Scalar,
    momentum: Scalar,
    gain: Scalar,
    lookahead: Scalar,
    kind: int,
    threshold: Scalar,
    found: Positions,
) -> int:
    count = 0
    for start in range(0, residual.size, _PIECE):
        v, g = residual[start : start + _PIECE], gradient[start : start + _PIECE]
        if kind == 0:
            _add(v, g, keep, scale)
        elif kind == 1:
            _add_velocity(v, velocity[start : start + _PIECE], g, keep, scale, momentum, gain)
        else:
            _add_nesterov(v, velocity[start : start + _PIECE], g, keep, scale, momentum, gain, lookahead)
        if found.size:
            count = _note(v, start, threshold, found, count)
    return count


@compiled
def _kth(bits: Bits, k: int, width: int) -> int:
    """The k-th largest of `bits` without their highest bit, by radix: the bits of a float order its magnitude."""
    histogram = np.empty(1 << _DIGIT, np.int64)
    prefix = np.uint64(0)
    low = np.uint64((1 << (width - 1)) - 1)
    remaining = width - 1
    while remaining > 0:
        digit = min(_DIGIT, remaining)
        shift = np.uint64(remaining - digit)
        above = np.uint64(remaining)
        mask = np.uint64((1 << digit) - 1)
        histogram[: 1 << digit] = 0
        for i in range(bits.size):
            key = np.uint64(bits[i]) & low
            if key >> above == prefix:
                histogram[np.int64((key >> shift) & mask)] += 1
        bucket = (1 << digit) - 1
        while histogram[bucket] < k:
            k -= histogram[bucket]
            bucket -= 1
        prefix = (prefix << np.uint64(digit)) | np.uint64(bucket)
        remaining -= digit
    return int(prefix)


@compiled
def _largest(bits: Bits, k: int, width: int, seed: int, found: Positions) -> int:
    low = np.uint64((1 << (width - 1)) - 1)
    threshold = np.uint64(0)
    if k < bits.size:
        threshold = np.uint64(_kth(bits, k, width))
    above = 0
    ties = 0
    for i in range(bits.size):
        key = np.uint64(bits[i]) & low
        above += int(key > threshold)
        ties += int(key == threshold)
    # A threshold of zero means fewer than k non-zeros: all of them, and no zero.
    places = k - above if threshold > 0 else 0
    first = seed % max(ties, 1)
    count = 0
    tie = 0
    for i in range(bits.size):
        key = np.uint64(bits[i]) & low
        if key > threshold:
            found[count] = i
            count += 1
        elif key == threshold and places > 0:
            # The tie is taken if ⌊j·ties/places⌋ is its distance from the first, for some j < places.
            distance = np.uint64((tie - first) % ties)
            j = (distance * np.uint64(places) + np.uint64(ties - 1)) // np.uint64(ties)
            if j < np.uint64(places) and j * np.uint64(ties) // np.uint64(places) == distance:
                found[count] = i
                count += 1
            tie += 1
    return count


@compiled
def _add_up(indices: Positions, values: Floats, order: Positions, unique: Positions, sums: Floats) -> int:
    count = 0
    for i in range(order.size):
        index = indices[order[i]]
        if count and unique[count - 1] == index:
            sums[count - 1] += values[order[i]]
        else:
            unique[count] = index
            sums[count] = values[order[i]]
            count += 1
    return count


class Cpu(Reference):
    """Numba kernels for float32 and float64 vectors on the CPU."""

    def probe(self, update: Update, stride: int) -> Tensor:
        part = update.every(stride)
        self.update_(part._replace(gradient=part.gradient.contiguous()), None, 0)
        return part.residual.abs_()

    def update_(self, update: Update, threshold: float | None, capacity: int) -> Tensor | None:
        residual, gradient = update.residual.numpy(), update.gradient.numpy()
        velocity = residual if update.velocity is None else update.velocity.numpy()
        scalar = residual.dtype.type
        found = np.empty(0 if threshold is None else min(capacity, residual.size) + _BLOCK, np.int64)
        count = _update(
            residual,
            velocity,
            gradient,
            scalar(update.keep),
            scalar(update.scale),
            scalar(update.momentum),
            scalar(update.gain),
            scalar(update.lookahead or 0.0),
            0 if update.velocity is None else 1 if update.lookahead is None else 2,
            scalar(threshold or 0.0),
            found,
        )
        return self._found(found, count)

    def reaching(self, x: Tensor, threshold: float, capacity: int) -> Tensor | None:
        values = x.numpy()
        found = np.empty(min(capacity, values.size) + _BLOCK, np.int64)
        return self._found(found, _reaching(values, values.dtype.type(threshold), found))

    @staticmethod
    def _found(found: Positions, count: int) -> Tensor | None:
        if count > found.size - _BLOCK and found.size:
            return None
        return torch.from_numpy(found[:count])

    def kth_largest(self, magnitudes: Tensor, k: int) -> float:
        values = magnitudes.numpy()
        bits = values.view(f"u{values.itemsize}")
        key = _kth(bits, k, 8 * values.itemsize)
        return float(np.array([key], bits.dtype).view(values.dtype)[0])

    def largest(self, x: Tensor, k: int, seed: int) -> Tensor:
        values = x.numpy()
        found = np.empty(min(k, values.size), np.int64)
        count = _largest(values.view(f"u{values.itemsize}"), k, 8 * values.itemsize, seed, found)
        return torch.from_numpy(found[:count])

    def add_up(self, indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        # A stable sort that finds the runs which are there already.
        order = np.argsort(indices.numpy(), kind="stable")
        unique, sums = np.empty(order.size, np.int64), values.new_empty(order.size)
        count = _add_up(indices.numpy(), values.numpy(), order, unique, sums.numpy())
        return torch.from_numpy(unique[:count]), sums[:count]
