"""Values in one or two bits, in numba."""

import numpy as np

from lightning_sparsecomm.kernels.numba_jit import Bytes, Floats, compiled


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
def write_two(values: Floats, group: int, levels: Floats, packed: Bytes) -> None:
    """Each group's two magnitudes, not rounded, and two bits for each value."""
    for at in range(levels.shape[0]):
        first, end = at * group, min((at + 1) * group, values.size)
        total, largest = 0.0, 0.0
        for i in range(first, end):
            magnitude = abs(np.float64(values[i]))
            total += magnitude
            largest = max(largest, magnitude)
        middle = min(total / (end - first), largest)
        below, above, count = 0.0, 0.0, 0
        for i in range(first, end):
            value = np.float64(values[i])
            magnitude = abs(value)
            large = magnitude >= middle
            above += magnitude if large else 0.0
            below += 0.0 if large else magnitude
            count += int(large)
            packed[i >> 2] |= np.uint8((np.int64(large) << 1 | np.int64(value < 0)) << (2 * (i & 3)))
        levels[at, 1] = above / max(count, 1)
        levels[at, 0] = below / (end - first - count) if count < end - first else levels[at, 1]


@compiled
def read_two(packed: Bytes, group: int, levels: Floats, values: Floats) -> None:
    for at in range(levels.shape[0]):
        for i in range(at * group, min((at + 1) * group, values.size)):
            code = np.int64(packed[i >> 2]) >> (2 * (i & 3))
            magnitude = levels[at, code >> 1 & 1]
            values[i] = -magnitude if code & 1 else magnitude
