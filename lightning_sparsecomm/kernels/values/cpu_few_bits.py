"""Values in one or two bits, in numba."""

import numpy as np

from lightning_sparsecomm.kernels.numba_jit import Bytes, Floats, compiled

_ZERO, _ONE, _TWO, _FOUR = map(np.uint64, (0, 1, 2, 4))


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
def write_two(values: Floats, group: int, levels: Floats, codes: Bytes, packed: Bytes) -> None:
    """Each group's two magnitudes, not rounded, and two bits for each value; `codes` has room for four per byte."""
    for at in range(levels.shape[0]):
        first, end = at * group, min((at + 1) * group, values.size)
        middle = _middle(values[first:end])
        # Unsigned, also below: else each access would look whether its place is negative.
        for i in range(np.uint64(first), np.uint64(end)):
            value = np.float64(values[i])
            codes[i] = np.uint8(abs(value) >= middle) << 1 | np.uint8(value < 0)
        levels[at, 0], levels[at, 1] = _means(values[first:end], codes[first:end])
    for i in range(values.size, codes.size):
        codes[i] = 0
    quads = codes.view(np.uint32)
    for i in range(packed.size):
        quad = quads[i]
        packed[i] = np.uint8((quad | quad >> 6 | quad >> 12 | quad >> 18) & 0xFF)


@compiled
def _middle(values: Floats) -> float:
    """The mean magnitude, or the largest one if it is less by rounding."""
    # Four sums, because each addition waits for the one before it.
    a = b = c = d = largest = 0.0
    quads = values.size // 4
    for i in range(_ZERO, np.uint64(4 * quads), _FOUR):
        w, x = abs(np.float64(values[i])), abs(np.float64(values[i + _ONE]))
        y, z = abs(np.float64(values[i + _TWO])), abs(np.float64(values[i + _TWO + _ONE]))
        a += w
        b += x
        c += y
        d += z
        largest = w if w > largest else largest
        largest = x if x > largest else largest
        largest = y if y > largest else largest
        largest = z if z > largest else largest
    for i in range(4 * quads, values.size):
        magnitude = abs(np.float64(values[i]))
        a += magnitude
        largest = magnitude if magnitude > largest else largest
    return min((a + b + c + d) / values.size, largest)


@compiled
def _means(values: Floats, codes: Bytes) -> tuple[float, float]:
    """The mean of the magnitudes whose codes are 0 or 1, and of the others; the first is the second where none is."""
    # Products, since a branch on data would be mispredicted.
    even_above = odd_above = even_below = odd_below = 0.0
    count = 0
    for i in range(_ZERO, np.uint64(values.size // 2 * 2), _TWO):
        even, odd = abs(np.float64(values[i])), abs(np.float64(values[i + _ONE]))
        even_large, odd_large = even * np.float64(codes[i] >> 1), odd * np.float64(codes[i + _ONE] >> 1)
        even_above += even_large
        odd_above += odd_large
        even_below += even - even_large
        odd_below += odd - odd_large
        count += int(np.int64(codes[i] >> 1) + np.int64(codes[i + _ONE] >> 1))
    if values.size % 2:
        last = abs(np.float64(values[-1]))
        large = last * np.float64(codes[-1] >> 1)
        even_above += large
        even_below += last - large
        count += int(np.int64(codes[-1] >> 1))
    above = (even_above + odd_above) / max(count, 1)
    below = (even_below + odd_below) / (values.size - count) if count < values.size else above
    return below, above


@compiled
def read_two(packed: Bytes, group: int, levels: Floats, values: Floats) -> None:
    # What each pair of bits stands for in this group.
    meanings = np.empty(4, levels.dtype)
    for at in range(levels.shape[0]):
        for code in range(4):
            meanings[code] = -levels[at, code >> 1] if code & 1 else levels[at, code >> 1]
        for i in range(at * group, min((at + 1) * group, values.size)):
            values[i] = meanings[packed[i >> 2] >> np.uint8(2 * (i & 3)) & 3]
