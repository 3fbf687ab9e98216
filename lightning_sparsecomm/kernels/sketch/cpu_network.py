"""Which rows to compare for their median: Batcher's odd-even merge sort, without the comparisons that don't matter."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

# Which results of a comparison are used later.
BOTH, LESSER, GREATER = range(3)

Network = NDArray[np.int64]


@lru_cache
def median_network(rows: int) -> Network:
    """Comparisons that put the middle one or two of `rows` in their sorted places.

    Returns:
        `[comparisons, 3]`: first row, second row, and `BOTH`, `LESSER` or `GREATER`. A comparison leaves the lesser in
        the first row, the greater in the second, or does both.
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
    for low, high in reversed(comparisons):
        if needed & {low, high}:
            both = low in needed and high in needed
            kept.append((low, high, BOTH if both else LESSER if low in needed else GREATER))
            needed |= {low, high}
    return np.array(kept[::-1], np.int64).reshape(-1, 3)
