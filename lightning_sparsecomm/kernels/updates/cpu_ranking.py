"""Selection of the largest magnitudes in numba.

Bits of a float, less the sign, order its magnitude. So these kernels compare bits. A sample says between which two
magnitudes the k-th largest most likely is. One pass finds those between, few, and radix selection the one among them:
no sort, and if the sample misled, radix selection of all.
"""

import numpy as np

from lightning_sparsecomm.kernels.numba_jit import Bits, Flags, Positions, Unsigned, compiled
from lightning_sparsecomm.kernels.updates.cpu_flags import FLAGS_PER_WORD, PIECE, append_flagged

# Bits looked at in one pass of the radix selection.
_DIGIT = 11

# From so many magnitudes on, a sample pays. It has this many, in units of √n. The ranks in it of the two that it gives
# are four standard deviations, and 8, from that of the k-th largest: 0.3 to 5% of all are between them, the less the
# more there are.
_MANY, _SAMPLE, _DEVIATIONS = 2**16, 32, 4

# Where no more than this part is found, positions are collected from flags, most of which are not set.
_FEW = 1 / 8


@compiled
def kth_largest_key(bits: Bits, k: int) -> tuple[int, int, int]:
    """Returns the k-th largest of `bits` (`[n]`), less their sign bit; how many exceed it, and how many equal it."""
    width = 8 * bits.itemsize
    wanted = k
    unsigned = np.uint64((1 << (width - 1)) - 1)
    remaining = width - 1 - _DIGIT
    shift = np.uint64(remaining)
    mask = np.uint64((1 << _DIGIT) - 1)
    # Four histograms, because neighbours are often alike, and an addition would wait for the one before it.
    four = np.zeros((4, 1 << _DIGIT), np.int64)
    quads = bits.size // 4
    for quad in range(quads):
        i = 4 * quad
        four[0, (np.uint64(bits[i]) >> shift) & mask] += 1
        four[1, (np.uint64(bits[i + 1]) >> shift) & mask] += 1
        four[2, (np.uint64(bits[i + 2]) >> shift) & mask] += 1
        four[3, (np.uint64(bits[i + 3]) >> shift) & mask] += 1
    for i in range(4 * quads, bits.size):
        four[0, (np.uint64(bits[i]) >> shift) & mask] += 1
    histogram = four[0] + four[1] + four[2] + four[3]
    bucket = (1 << _DIGIT) - 1
    while histogram[bucket] < k:
        k -= histogram[bucket]
        bucket -= 1
    prefix = np.uint64(bucket)
    while remaining > 0:
        digit = min(_DIGIT, remaining)
        shift = np.uint64(remaining - digit)
        above = np.uint64(remaining)
        mask = np.uint64((1 << digit) - 1)
        histogram[: 1 << digit] = 0
        for i in range(bits.size):
            key = np.uint64(bits[i]) & unsigned
            if key >> above == prefix:
                histogram[(key >> shift) & mask] += 1
        bucket = (1 << digit) - 1
        while histogram[bucket] < k:
            k -= histogram[bucket]
            bucket -= 1
        prefix = (prefix << np.uint64(digit)) | np.uint64(bucket)
        remaining -= digit
    return int(prefix), wanted - k, histogram[bucket]


@compiled
def _kth_largest_by_sample(bits: Bits, k: int) -> tuple[int, int, int]:
    """As `kth_largest_key`, of many, and faster."""
    size = bits.size
    unsigned = bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)
    # An odd stride samples all columns of a matrix whose rows have 2^i elements.
    sample = bits[:: int(size**0.5 / _SAMPLE) | 1].copy()
    expected = k * sample.size / size
    margin = int(_DEVIATIONS * (expected * (1 - k / size)) ** 0.5) + 8
    first, last = int(expected) - margin, int(expected) + margin
    high, low = unsigned, bits.dtype.type(0)
    if first >= 1:
        high = bits.dtype.type(kth_largest_key(sample, first)[0])
    if last <= sample.size:
        low = bits.dtype.type(kth_largest_key(sample, last)[0])
    room = 4 * margin * (size // sample.size + 1)
    if low == 0:
        # Often there are no more than k that are not zero, as in gradients of embeddings.
        room = _count_nonzero(bits, unsigned)
        if room <= k:
            # Unsigned, as the others: of both kinds together, numba would make floats.
            return int(np.uint64(0)), room, size - room
        low = bits.dtype.type(1)
    between = np.empty(min(size, room) + PIECE, bits.dtype)
    count, above = _find_between(bits, low, high, unsigned, between)
    if not 0 < k - above <= count:
        return kth_largest_key(bits, k)
    key, further, ties = kth_largest_key(between[:count], k - above)
    return key, above + further, ties


@compiled
def _count_nonzero(bits: Bits, unsigned: Unsigned) -> int:
    count = 0
    for start in range(0, bits.size, PIECE):
        # In the bits' own width, so that the loop vectorizes.
        part, found = bits[start : start + PIECE], bits.dtype.type(0)
        for i in range(np.uint64(0), np.uint64(part.size)):
            found += bits.dtype.type((part[i] & unsigned) != 0)
        count += int(np.int64(found))
    return count


@compiled
def _find_between(bits: Bits, low: Unsigned, high: Unsigned, unsigned: Unsigned, between: Bits) -> tuple[int, int]:
    """Writes those from `low` to `high` to `between`, and returns how many they are and how many are above.

    `between` has room for `PIECE` more than its capacity; a count of -1 means that there are more.
    """
    flags, places = np.zeros(PIECE, np.uint8), np.empty(PIECE + FLAGS_PER_WORD, np.int64)
    words = flags.view(np.uint64)
    count = above = 0
    for start in range(0, bits.size, PIECE):
        if count > between.size - PIECE:
            return -1, above
        piece = bits[start : start + PIECE]
        if piece.size < PIECE:
            flags[:] = 0
        above += _flag_between(piece, low, high, unsigned, flags)
        held = append_flagged(flags, words, piece.size, 0, places, 0)
        for i in range(held):
            between[count + i] = piece[places[i]]
        count += held
    return count, above


@compiled
def _flag_between(bits: Bits, low: Unsigned, high: Unsigned, unsigned: Unsigned, flags: Flags) -> int:
    """Flags those from `low` to `high`, and returns how many are above."""
    width, above = high - low, bits.dtype.type(0)
    for i in range(np.uint64(0), np.uint64(bits.size)):
        key = bits[i] & unsigned
        above += bits.dtype.type(key > high)
        # Those below are very large then.
        flags[i] = np.uint8(bits.dtype.type(key - low) <= width)
    return int(np.int64(above))


@compiled
def _find_reaching(bits: Bits, least: Unsigned, start: int, found: Positions) -> int:
    """Writes start + i to `found` for each of the bits, less their sign, that is at least `least`; returns how many."""
    unsigned = bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)
    flags = np.zeros(PIECE, np.uint8)
    words = flags.view(np.uint64)
    count = 0
    for first in range(0, bits.size, PIECE):
        piece = bits[first : first + PIECE]
        if piece.size < PIECE:
            flags[:] = 0
        for i in range(np.uint64(0), np.uint64(piece.size)):
            flags[i] = np.uint8((piece[i] & unsigned) >= least)
        count = append_flagged(flags, words, piece.size, start + first, found, count)
    return count


@compiled
def find_largest(bits: Bits, k: int, seed: int, start: int, found: Positions) -> int:
    """Writes the positions of `Reference.largest`, each plus `start`, to `found`, and returns how many there are.

    `found` has room for `FLAGS_PER_WORD` more than `min(k, n)`: each position is written, and kept if it counts, since
    a branch on data would be mispredicted.
    """
    unsigned = np.uint64((1 << (8 * bits.itemsize - 1)) - 1)
    threshold = np.uint64(0)
    above = ties = 0
    if k < bits.size:
        key, above, ties = kth_largest_key(bits, k) if bits.size < _MANY else _kth_largest_by_sample(bits, k)
        threshold = np.uint64(key)
    count = 0
    # A threshold of zero means at most k non-zeros: take them all, and no zero.
    if threshold == 0 or above + ties == k:
        least = max(threshold, np.uint64(1))
        if bits.size >= _MANY and (above if threshold == 0 else k) < _FEW * bits.size:
            return _find_reaching(bits, bits.dtype.type(least), start, found)
        for i in range(bits.size):
            found[count] = start + i
            count += int(np.int64(np.uint64(bits[i]) & unsigned >= least))
        return count
    places = k - above
    first = seed % ties
    tie = 0
    for i in range(bits.size):
        magnitude = np.uint64(bits[i]) & unsigned
        found[count] = start + i
        count += int(np.int64(magnitude > threshold))
        if magnitude == threshold:
            # Take the tie if its distance from the first is ⌊j·ties/places⌋ for some j < places.
            distance = np.uint64((tie - first) % ties)
            j = (distance * np.uint64(places) + np.uint64(ties - 1)) // np.uint64(ties)
            count += int(np.int64(j < np.uint64(places) and j * np.uint64(ties) // np.uint64(places) == distance))
            tie += 1
    return count
