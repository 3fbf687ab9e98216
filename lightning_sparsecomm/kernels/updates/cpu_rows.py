"""The largest magnitudes of every row in numba, for rows that fit into the processor's first cache.

As in `cpu_ranking`, bits of a float, less the sign, order its magnitude. One pass counts the leading bits of a row,
one takes what is above the bin of the k-th largest and sets that bin aside, and what is set aside is cut the same way.
"""

import numpy as np
from numpy.typing import NDArray

from lightning_sparsecomm.kernels.numba_jit import Bits, Positions, compiled

# Bits looked at in one pass: for a float32 the exponent and three bits of the mantissa.
_DIGIT = 11


@compiled
def largest_in_rows(bits: Bits, columns: int, k: int, found: Positions) -> int:
    """Writes the positions of `Rows.largest_in_rows` to `found`, and returns how many there are.

    Args:
        bits: `[rows · columns]`, the rows one after another.
        columns: Elements of a row.
        k: How many of each row, at most `columns`.
        found: Room for `k` positions of each row, and one more.
    """
    count = 0
    # Two histograms, because neighbours are often alike, and an addition would wait for the one before it.
    even, odd = np.empty(1 << _DIGIT, np.int32), np.empty(1 << _DIGIT, np.int32)
    keys = np.empty(columns, np.uint64)
    for start in range(0, bits.size, columns):
        threshold, ties = _threshold(bits[start : start + columns], k, keys, even, odd)
        count = _append(bits[start : start + columns], threshold, ties, start, found, count)
    return count


@compiled
def _threshold(
    bits: Bits, k: int, keys: NDArray[np.uint64], even: NDArray[np.int32], odd: NDArray[np.int32]
) -> tuple[np.uint64, int]:
    """The k-th largest of `bits`, less their sign; how many of those that equal it are among the k."""
    width = 8 * bits.itemsize
    unsigned = np.uint64((1 << (width - 1)) - 1)
    remaining = width - 1 - _DIGIT
    shift = np.uint64(remaining)
    even[:] = 0
    odd[:] = 0
    for i in range(0, bits.size - 1, 2):
        even[(np.uint64(bits[i]) & unsigned) >> shift] += 1
        odd[(np.uint64(bits[i + 1]) & unsigned) >> shift] += 1
    if bits.size % 2:
        even[(np.uint64(bits[bits.size - 1]) & unsigned) >> shift] += 1
    bin_ = np.int64((1 << _DIGIT) - 1)
    while even[bin_] + odd[bin_] < k:
        k -= even[bin_] + odd[bin_]
        bin_ -= 1
    prefix = np.uint64(bin_)
    held = 0
    for i in range(bits.size):
        key = np.uint64(bits[i]) & unsigned
        # Always write, and keep it only if it counts: a branch on data would be mispredicted.
        keys[held] = key
        held += int(key >> shift == prefix)
    while remaining > 0 and held > k:
        digit = min(_DIGIT, remaining)
        remaining -= digit
        shift = np.uint64(remaining)
        mask = np.uint64((1 << digit) - 1)
        even[: 1 << digit] = 0
        for i in range(held):
            even[(keys[i] >> shift) & mask] += 1
        bin_ = np.int64((1 << digit) - 1)
        while even[bin_] < k:
            k -= even[bin_]
            bin_ -= 1
        prefix = np.uint64(bin_)
        kept = 0
        for i in range(held):
            key = keys[i]
            keys[kept] = key
            kept += int((key >> shift) & mask == prefix)
        held = kept
    if held > k:
        # All that are left are equal.
        return keys[0], k
    least = keys[0]
    for i in range(1, held):
        least = min(least, keys[i])
    equal = 0
    for i in range(held):
        equal += int(keys[i] == least)
    return least, equal


@compiled
def _append(bits: Bits, threshold: np.uint64, ties: int, start: int, found: Positions, count: int) -> int:
    """Appends start + i to `found` for what exceeds a threshold, and for the first `ties` that equal it; no zeros."""
    unsigned = np.uint64((1 << (8 * bits.itemsize - 1)) - 1)
    ties = ties if threshold > 0 else 0
    for i in range(bits.size):
        key = np.uint64(bits[i]) & unsigned
        equal = int(key == threshold)
        found[count] = start + i
        count += int(key > threshold) | (equal & int(ties > 0))
        ties -= equal
    return count
