"""Values in one or two bits, in numba."""

import numpy as np

from lightning_sparsecomm.kernels.numba_jit import Bits, Bytes, Floats, Scalar, compiled
from lightning_sparsecomm.kernels.values.cpu_magnitudes import extreme_keys, sum_of_magnitudes

# Places are unsigned in inner loops: else each access would look whether its place is negative.
_ZERO, _ONE, _TWO, _THREE, _FOUR = map(np.uint64, (0, 1, 2, 3, 4))

_BYTE, _TWO_OF_EACH = np.uint32(0xFF), np.uint32(0x03030303)


@compiled
def write_signs(values: Floats, group: int, means: Floats, packed: Bytes) -> None:
    """Each group's mean magnitude, and a bit for each value."""
    for at in range(means.size):
        first, end = at * group, min((at + 1) * group, values.size)
        total = 0.0
        for i in range(first, end):
            value = np.float64(values[i])
            total += abs(value)
            packed[i >> 3] |= np.uint8(np.int64(value < 0) << (i & 7))
        means[at] = total / (end - first)


@compiled
def read_signs(packed: Bytes, group: int, magnitudes: Floats, values: Floats) -> None:
    for at in range(magnitudes.size):
        magnitude = magnitudes[at]
        for i in range(at * group, min((at + 1) * group, values.size)):
            values[i] = -magnitude if np.int64(packed[i >> 3]) >> (i & 7) & 1 else magnitude


@compiled
def write_two(values: Floats, bits: Bits, group: int, levels: Floats, codes: Bytes, packed: Bytes) -> None:
    """Each group's two magnitudes, not rounded, and two bits for each value.

    `bits` views the values as unsigned integers; `codes` has room for four for each byte of `packed`.
    """
    # Bits of a float, less the sign, order its magnitude.
    keys = np.empty(2, bits.dtype)
    extremes = keys.view(values.dtype)
    unsigned = bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)
    for at in range(levels.shape[0]):
        first, end = at * group, min((at + 1) * group, values.size)
        part = values[first:end]
        keys[0], keys[1] = extreme_keys(bits[first:end], unsigned)
        # Rounding can make the mean of equal numbers greater than each of them.
        mean = min(sum_of_magnitudes(part) / part.size, np.float64(extremes[1]))
        middle = values.dtype.type(mean)
        if np.float64(middle) < mean:
            middle = np.nextafter(middle, values.dtype.type(np.inf))
        large = _choose(part, middle, codes[first:end])
        above, below = _sums(part, middle)
        levels[at, 1] = above / max(large, 1)
        levels[at, 0] = below / (part.size - large) if large < part.size else levels[at, 1]
    codes[values.size :] = 0
    quads = codes.view(np.uint32)
    for i in range(_ZERO, np.uint64(packed.size)):
        quad = quads[i]
        packed[i] = np.uint8((quad | quad >> np.uint32(6) | quad >> np.uint32(12) | quad >> np.uint32(18)) & _BYTE)


@compiled
def _choose(values: Floats, middle: Scalar, codes: Bytes) -> int:
    """2 for each large magnitude, and one more for each negative value; returns how many are large, of at most 255."""
    zero, large = values.dtype.type(0), np.uint8(0)
    for i in range(_ZERO, np.uint64(values.size)):
        is_large = np.uint8(abs(values[i]) >= middle)
        codes[i] = is_large * np.uint8(2) + np.uint8(values[i] < zero)
        large += is_large
    return int(np.int64(large))


@compiled
def _sums(values: Floats, middle: Scalar) -> tuple[float, float]:
    """The sum of large magnitudes, and of the others."""
    # Several sums, because each addition waits for the one before it.
    a = b = c = d = 0.0
    e = f = g = h = 0.0
    zero = values.dtype.type(0)
    quads = np.uint64(values.size // 4 * 4)
    for i in range(_ZERO, quads, _FOUR):
        w, x = abs(values[i]), abs(values[i + _ONE])
        y, z = abs(values[i + _TWO]), abs(values[i + _THREE])
        # Additions of zero, since a branch on data would be mispredicted.
        a += np.float64(w if w >= middle else zero)
        b += np.float64(x if x >= middle else zero)
        c += np.float64(y if y >= middle else zero)
        d += np.float64(z if z >= middle else zero)
        e += np.float64(zero if w >= middle else w)
        f += np.float64(zero if x >= middle else x)
        g += np.float64(zero if y >= middle else y)
        h += np.float64(zero if z >= middle else z)
    for i in range(quads, np.uint64(values.size)):
        w = abs(values[i])
        a += np.float64(w if w >= middle else zero)
        e += np.float64(zero if w >= middle else w)
    return (a + b) + (c + d), (e + f) + (g + h)


@compiled
def read_two(packed: Bytes, group: int, levels: Floats, codes: Bytes, values: Floats) -> None:
    """What two bits stand for. `codes` has room for four for each byte of `packed`."""
    quads = codes.view(np.uint32)
    for i in range(_ZERO, np.uint64(packed.size)):
        byte = np.uint32(packed[i])
        quads[i] = (byte | byte << np.uint32(6) | byte << np.uint32(12) | byte << np.uint32(18)) & _TWO_OF_EACH
    # What each pair of bits stands for in this group.
    meanings = np.empty(4, levels.dtype)
    for at in range(levels.shape[0]):
        for code in range(4):
            meanings[code] = -levels[at, code >> 1] if code & 1 else levels[at, code >> 1]
        for i in range(np.uint64(at * group), np.uint64(min((at + 1) * group, values.size))):
            values[i] = meanings[np.uint64(codes[i])]
