"""An adaptive arithmetic code for runs, as a rival to `AdaptiveGolomb`: LZMA's binary range coder.

A run is a number from 0 to 63 (exact below 4, then two to each power of two), coded bit by bit with adaptive
probabilities, and what remains of it in plain bits. The probabilities' context is the mean of the last such numbers.
"""

import numba
import numpy as np
from numpy.typing import NDArray

CONTEXTS, TOP, PROBABILITY_BITS, RATE = 12, np.uint64(1 << 24), 12, 5

Runs = NDArray[np.int64]
Bytes = NDArray[np.uint8]


@numba.njit(nogil=True)
def _number(run: int) -> tuple[int, int]:
    """The number of a run, and how many plain bits follow."""
    if run < 4:
        return run, 0
    exponent = 0
    while run >> exponent > 3:
        exponent += 1
    return 4 + 2 * (exponent - 1) + (run >> exponent & 1), exponent


@numba.njit(nogil=True)
def encode(runs: Runs, out: Bytes) -> int:
    """Writes all runs, and returns how many bytes that took."""
    chances = np.full((CONTEXTS, 64), 1 << (PROBABILITY_BITS - 1), np.int64)
    low, width = np.uint64(0), np.uint64(0xFFFFFFFF)
    cache, pending, at, mean = 0, 1, 0, 0
    for run in runs:
        number, plain = _number(run)
        row = chances[min(mean >> 5, CONTEXTS - 1)]
        node = 1
        for i in range(6 + plain):
            if i < 6:
                bit = number >> (5 - i) & 1
                bound = (width >> np.uint64(PROBABILITY_BITS)) * np.uint64(row[node])
                if bit:
                    row[node] -= row[node] >> RATE
                else:
                    row[node] += ((1 << PROBABILITY_BITS) - row[node]) >> RATE
                node = 2 * node + bit
            else:
                bit = run >> (5 + plain - i) & 1
                bound = width >> np.uint64(1)
            if bit:
                low += bound
                width -= bound
            else:
                width = bound
            while width < TOP:
                width <<= np.uint64(8)
                # A carry runs through bytes of ones, which wait for it.
                if low < np.uint64(0xFF000000) or low > np.uint64(0xFFFFFFFF):
                    carry = np.int64(low >> np.uint64(32))
                    while pending:
                        out[at] = (cache + carry) & 0xFF
                        at += 1
                        cache = 0xFF
                        pending -= 1
                    cache = np.int64(low >> np.uint64(24)) & 0xFF
                pending += 1
                low = (low & np.uint64(0x00FFFFFF)) << np.uint64(8)
        mean += (number << 4) - mean >> 3
    for _ in range(5):
        if low < np.uint64(0xFF000000) or low > np.uint64(0xFFFFFFFF):
            carry = np.int64(low >> np.uint64(32))
            while pending:
                out[at] = (cache + carry) & 0xFF
                at += 1
                cache = 0xFF
                pending -= 1
            cache = np.int64(low >> np.uint64(24)) & 0xFF
        pending += 1
        low = (low & np.uint64(0x00FFFFFF)) << np.uint64(8)
    return at


@numba.njit(nogil=True)
def decode(data: Bytes, runs: Runs) -> None:
    """Reads all runs. `data` ends with some bytes of padding."""
    chances = np.full((CONTEXTS, 64), 1 << (PROBABILITY_BITS - 1), np.int64)
    width, value, at, mean = np.uint64(0xFFFFFFFF), np.uint64(0), 5, 0
    for i in range(1, 5):
        value = value << np.uint64(8) | np.uint64(data[i])
    for place in range(runs.size):
        row = chances[min(mean >> 5, CONTEXTS - 1)]
        node = 1
        plain, run, i = 0, 0, 0
        while i < 6 + plain:
            half = width >> np.uint64(1)
            bound = (width >> np.uint64(PROBABILITY_BITS)) * np.uint64(row[node]) if i < 6 else half
            bit = np.int64(value >= bound)
            if bit:
                value -= bound
                width -= bound
            else:
                width = bound
            if i < 6:
                if bit:
                    row[node] -= row[node] >> RATE
                else:
                    row[node] += ((1 << PROBABILITY_BITS) - row[node]) >> RATE
                node = 2 * node + bit
                if i == 5:
                    number = node - 64
                    run = number
                    if number >= 4:
                        plain = (number - 4 >> 1) + 1
                        run = 2 + (number & 1)
            else:
                run = 2 * run + bit
            while width < TOP:
                width <<= np.uint64(8)
                value = value << np.uint64(8) | np.uint64(data[at])
                at += 1
            i += 1
        runs[place] = run
        mean += ((node - 64) << 4) - mean >> 3
