"""Kernels in numba: one thread, without the interpreter's lock, safe in forked processes."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparsecomm.kernels.reference import LIMIT, OutOfRangeError, Reference, Update

P = ParamSpec("P")
T = TypeVar("T")

Floats = NDArray[np.float32] | NDArray[np.float64]
Bits = NDArray[np.uint32] | NDArray[np.uint64]
Positions = NDArray[np.int64]
Flags = NDArray[np.uint8]
Scalar = np.float32 | np.float64
Unsigned = np.uint32 | np.uint64

# Pieces of residual, velocity, gradient and flags stay in the first-level cache.
_PIECE = 4096
# Flags looked at together, as one 64-bit word; most words are zero.
_WORD = 8
# Bits looked at in one pass of the radix selection.
_DIGIT = 11
# In the place of a sum of squares that is too small for float64.
_TINY = float(np.finfo(np.float64).tiny)


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, compiled at its first call and kept on disk, where something is writable, for later processes."""
    try:
        kernel: Callable[P, T] = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # raised when the function is decorated: no place for a cache
        kernel = numba.njit(nogil=True)(function)
    return kernel


@compiled
def _note(flags: Flags, words: Bits, size: int, start: int, found: Positions, count: int) -> int:
    """Appends start + i where flags[i] is 1. `found` has room for a word more than it may hold."""
    capacity = found.size - _WORD
    for word in range((size + _WORD - 1) // _WORD):
        if words[word]:
            if count > capacity:
                return count
            # Written whether it is kept or not: a branch on data would be guessed wrong.
            for i in range(_WORD * word, min(_WORD * word + _WORD, size)):
                found[count] = start + i
                count += int(flags[i])
    return count


@compiled
def _flag(x: Floats, threshold: Scalar, flags: Flags) -> None:
    for i in range(x.size):
        flags[i] = abs(x[i]) >= threshold


@compiled
def _reaching(x: Floats, threshold: Scalar, found: Positions) -> int:
    flags = np.zeros(_PIECE, np.uint8)
    words = flags.view(np.uint64)
    count = 0
    for start in range(0, x.size, _PIECE):
        piece = x[start : start + _PIECE]
        if piece.size < _PIECE:
            flags[:] = 0
        _flag(piece, threshold, flags)
        count = _note(flags, words, piece.size, start, found, count)
    return count


# In all three, an element of the gradient counts as 0 where (its bits & mask) >= limit; they say whether none does.


@compiled
def _add(
    residual: Floats,
    gradient: Floats,
    bits: Bits,
    keep: Scalar,
    scale: Scalar,
    threshold: Scalar,
    flags: Flags,
    mask: Unsigned,
    limit: Unsigned,
) -> bool:
    flawed = False
    for i in range(residual.size):
        flaw = (bits[i] & mask) >= limit
        flawed |= flaw
        g = scale * (residual.dtype.type(0) if flaw else gradient[i])
        v = keep * residual[i] + g
        residual[i] = v
        flags[i] = abs(v) >= threshold
    return not flawed


@compiled
def _add_velocity(
    residual: Floats,
    velocity: Floats,
    gradient: Floats,
    bits: Bits,
    keep: Scalar,
    scale: Scalar,
    momentum: Scalar,
    gain: Scalar,
    threshold: Scalar,
    flags: Flags,
    mask: Unsigned,
    limit: Unsigned,
) -> bool:
    flawed = False
    for i in range(residual.size):
        flaw = (bits[i] & mask) >= limit
        flawed |= flaw
        g = scale * (residual.dtype.type(0) if flaw else gradient[i])
        u = momentum * velocity[i] + gain * g
        velocity[i] = u
        v = keep * residual[i] + u
        residual[i] = v
        flags[i] = abs(v) >= threshold
    return not flawed


@compiled
def _add_nesterov(
    residual: Floats,
    velocity: Floats,
    gradient: Floats,
    bits: Bits,
    keep: Scalar,
    scale: Scalar,
    momentum: Scalar,
    gain: Scalar,
    lookahead: Scalar,
    threshold: Scalar,
    flags: Flags,
    mask: Unsigned,
    limit: Unsigned,
) -> bool:
    flawed = False
    for i in range(residual.size):
        flaw = (bits[i] & mask) >= limit
        flawed |= flaw
        g = scale * (residual.dtype.type(0) if flaw else gradient[i])
        u = momentum * velocity[i] + gain * g
        velocity[i] = u
        v = (keep * residual[i] + g) + lookahead * u
        residual[i] = v
        flags[i] = abs(v) >= threshold
    return not flawed


@compiled
def _update(
    residual: Floats,
    velocity: Floats,
    gradient: Floats,
    bits: Bits,
    keep: Scalar,
    scale: Scalar,
    momentum: Scalar,
    gain: Scalar,
    lookahead: Scalar,
    kind: int,
    threshold: Scalar,
    found: Positions,
    mask: Unsigned,
    limit: Unsigned,
) -> tuple[int, bool]:
    flags = np.zeros(_PIECE, np.uint8)
    words = flags.view(np.uint64)
    count = 0
    in_range = True
    for start in range(0, residual.size, _PIECE):
        piece = slice(start, start + _PIECE)
        v, g, b = residual[piece], gradient[piece], bits[piece]
        if v.size < _PIECE:
            flags[:] = 0
        if kind == 0:
            in_range &= _add(v, g, b, keep, scale, threshold, flags, mask, limit)
        else:
            u = velocity[piece]
            if kind == 1:
                in_range &= _add_velocity(v, u, g, b, keep, scale, momentum, gain, threshold, flags, mask, limit)
            else:
                in_range &= _add_nesterov(
                    v, u, g, b, keep, scale, momentum, gain, lookahead, threshold, flags, mask, limit
                )
        if found.size:
            count = _note(flags, words, v.size, start, found, count)
    return count, in_range


@compiled
def _probe(
    residual: Floats,
    velocity: Floats,
    gradient: Floats,
    bits: Bits,
    keep: Scalar,
    scale: Scalar,
    momentum: Scalar,
    gain: Scalar,
    lookahead: Scalar,
    kind: int,
    mask: Unsigned,
    limit: Unsigned,
    stride: int,
) -> Floats:
    v, u, g = residual[::stride].copy(), velocity[::stride].copy(), gradient[::stride].copy()
    _update(
        v,
        u,
        g,
        g.view(bits.dtype),
        keep,
        scale,
        momentum,
        gain,
        lookahead,
        kind,
        keep,
        np.empty(0, np.int64),
        mask,
        limit,
    )
    return np.abs(v)


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


@compiled
def _energies(x: Floats, bounds: Positions, energies: NDArray[np.float64]) -> None:
    for stretch in range(energies.size):
        start, stop = bounds[stretch], bounds[stretch + 1]
        # Four sums at a time: each addition would wait for the one before it.
        a = b = c = d = 0.0
        quads = (stop - start) // 4
        for quad in range(quads):
            i = start + 4 * quad
            a += np.float64(x[i]) * np.float64(x[i])
            b += np.float64(x[i + 1]) * np.float64(x[i + 1])
            c += np.float64(x[i + 2]) * np.float64(x[i + 2])
            d += np.float64(x[i + 3]) * np.float64(x[i + 3])
        energy = (a + b) + (c + d)
        for i in range(start + 4 * quads, stop):
            energy += np.float64(x[i]) * np.float64(x[i])
        if energy == 0:
            for i in range(start, stop):
                if x[i] != 0:
                    energy = _TINY
        energies[stretch] = energy


Arguments = tuple[Floats, Floats, Floats, Bits, Scalar, Scalar, Scalar, Scalar, Scalar, int]


def _arguments(update: Update) -> Arguments:
    residual, gradient = update.residual.numpy(), update.gradient.numpy()
    scalar = residual.dtype.type
    return (
        residual,
        residual if update.velocity is None else update.velocity.numpy(),
        gradient,
        gradient.view(f"u{gradient.itemsize}"),
        scalar(update.keep),
        scalar(update.scale),
        scalar(update.momentum),
        scalar(update.gain),
        scalar(update.lookahead or 0.0),
        0 if update.velocity is None else 1 if update.lookahead is None else 2,
    )


def _limits(update: Update, checked: bool) -> tuple[Unsigned, Unsigned]:
    """Mask and limit by which `_update` tells what is out of range: bits without the sign are in order of magnitude,
    and those of what is not finite come last. Else a mask that leaves nothing."""
    (limit,) = np.array([LIMIT], update.gradient.numpy().dtype).view(f"u{update.gradient.itemsize}")
    mask = ~np.array([-0.0], update.gradient.numpy().dtype).view(f"u{update.gradient.itemsize}")[0]
    return (mask, limit) if checked else (mask - mask, limit)


class Cpu(Reference):
    """Numba kernels for float32 and float64 vectors on the CPU."""

    def probe(self, update: Update, stride: int) -> Tensor:
        return torch.from_numpy(_probe(*_arguments(update), *_limits(update, checked=False), stride))

    def update_(self, update: Update, threshold: float | None, capacity: int) -> Tensor | None:
        arguments = _arguments(update)
        residual = arguments[0]
        found = np.empty(0 if threshold is None else min(capacity, residual.size) + _WORD, np.int64)
        least = residual.dtype.type(threshold or 0.0)
        count, in_range = _update(*arguments, least, found, *_limits(update, update.checked))
        if not in_range:
            raise OutOfRangeError
        return self._found(found, count)

    def reaching(self, x: Tensor, threshold: float, capacity: int) -> Tensor | None:
        values = x.numpy()
        found = np.empty(min(capacity, values.size) + _WORD, np.int64)
        return self._found(found, _reaching(values, values.dtype.type(threshold), found))

    @staticmethod
    def _found(found: Positions, count: int) -> Tensor | None:
        if count > found.size - _WORD and found.size:
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

    def energies(self, x: Tensor, bounds: Tensor) -> Tensor:
        energies = np.empty(bounds.numel() - 1, np.float64)
        _energies(x.numpy(), bounds.numpy(), energies)
        return torch.from_numpy(energies)
