"""What few-bit codecs ask of a group's magnitudes, in numba."""

import numpy as np

from lightning_sparsecomm.kernels.numba_jit import Bits, Floats, Unsigned, compiled

# Places are unsigned in inner loops: else each access would look whether its place is negative.
_ZERO, _ONE, _TWO, _THREE, _FOUR = map(np.uint64, (0, 1, 2, 3, 4))


@compiled
def extreme_keys(bits: Bits, unsigned: Unsigned) -> tuple[Unsigned, Unsigned]:
    """The least and the greatest, less their sign bit: of a float's bits, they order its magnitude."""
    least, most = unsigned, bits.dtype.type(0)
    for i in range(_ZERO, np.uint64(bits.size)):
        key = bits[i] & unsigned
        least, most = min(least, key), max(most, key)
    return least, most


@compiled
def sum_of_magnitudes(values: Floats) -> float:
    # Four sums, because each addition waits for the one before it.
    a = b = c = d = 0.0
    quads = np.uint64(values.size // 4 * 4)
    for i in range(_ZERO, quads, _FOUR):
        a += abs(np.float64(values[i]))
        b += abs(np.float64(values[i + _ONE]))
        c += abs(np.float64(values[i + _TWO]))
        d += abs(np.float64(values[i + _THREE]))
    for i in range(quads, np.uint64(values.size)):
        a += abs(np.float64(values[i]))
    return (a + b) + (c + d)
