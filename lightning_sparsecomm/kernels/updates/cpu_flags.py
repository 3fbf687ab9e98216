"""Positions of the few elements that are flagged, in numba."""

import numpy as np

from lightning_sparsecomm.kernels.numba_jit import Bits, Flags, Floats, Positions, Scalar, compiled, zeros_after

# Flags tested at once, as one 64-bit word; most words are zero.
FLAGS_PER_WORD = 8

# Elements that are flagged at once, so that residual, velocity, gradient and flags of them stay in the L1 cache.
PIECE = 4096


@compiled
def flag(x: Floats, threshold: Scalar, flags: Flags) -> None:
    """Sets flags[i] to whether |x[i]| reaches `threshold`."""
    for i in range(x.size):
        flags[i] = abs(x[i]) >= threshold


@compiled
def append_flagged(flags: Flags, words: Bits, size: int, start: int, found: Positions, count: int) -> int:
    """Appends start + i to `found` for each of the first `size` flags that is 1, and returns the new count.

    `words` views `flags` as 64-bit words, whose flags from `size` on are 0. `found` has `FLAGS_PER_WORD` entries more
    than its capacity; a count above the capacity means that positions are missing.
    """
    zero, one, each = np.uint64(0), np.uint64(1), np.uint64(FLAGS_PER_WORD)
    capacity, at = found.size - FLAGS_PER_WORD, np.uint64(count)
    places = np.empty(words.size + 1, np.uint64)
    held = zero
    for word in range(zero, np.uint64((size + FLAGS_PER_WORD - 1) // FLAGS_PER_WORD)):
        # Always write, and keep it only if a flag is set: a branch on data would be mispredicted.
        places[held] = word
        held += np.uint64(words[word] != 0)
    for i in range(zero, held):
        if np.int64(at) > capacity:
            break
        left, first = words[places[i]], start + np.int64(each * places[i])
        while left:
            found[at] = first + (zeros_after(left) >> 3)
            at += one
            left &= left - one
    return int(np.int64(at))
