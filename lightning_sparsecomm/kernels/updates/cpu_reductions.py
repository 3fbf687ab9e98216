"""Selection and sums in numba.

Bits of a float, less the sign, order its magnitude. So these kernels compare bits. A sample says between which two
magnitudes the k-th largest most likely is. One pass finds those between, few, and radix selection the one among them:
no sort, and if the sample misled, radix selection of all.
"""

import numpy as np
from numpy.typing import NDArray

from lightning_sparsecomm.kernels.numba_jit import (
    Bits,
    Flags,
    Floats,
    Positions,
    Scalar,
    Unsigned,
    compiled,
    zeros_after,
)

# Bits looked at in one pass of the radix selection.
_DIGIT = 11

# From so many magnitudes on, a sample pays. It has this many, in units of √n: 1.6% of all are then between the two that
# it gives, whose ranks in the sample are four standard deviations from that of the k-th largest.
_MANY, _SAMPLE, _DEVIATIONS = 2**16, 32, 4

# Magnitudes that are compared at once, and stay in the L1 cache. A multiple of 8.
_PIECE = 4096

# Replaces a sum of squares that underflows in float64.
_TINY = float(np.finfo(np.float64).tiny)


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
    between = np.empty(min(size, 4 * margin * (size // sample.size + 1)) + _PIECE, bits.dtype)
    count, above = _find_between(bits, low, high, unsigned, between)
    if not 0 < k - above <= count:
        return kth_largest_key(bits, k)
    key, further, ties = kth_largest_key(between[:count], k - above)
    return key, above + further, ties


@compiled
def _find_between(bits: Bits, low: Unsigned, high: Unsigned, unsigned: Unsigned, between: Bits) -> tuple[int, int]:
    """Writes those from `low` to `high` to `between`, and returns how many they are and how many are above.

    `between` has room for `_PIECE` more than its capacity; a count of -1 means that there are more.
    """
    flags, places = np.zeros(_PIECE, np.uint8), np.empty(_PIECE // 8 + 1, np.uint64)
    words = flags.view(np.uint64)
    zero, one, eight = np.uint64(0), np.uint64(1), np.uint64(8)
    count, capacity = zero, np.uint64(between.size - _PIECE)
    above = 0
    for start in range(0, bits.size, _PIECE):
        piece = bits[start : start + _PIECE]
        if piece.size < _PIECE:
            flags[:] = 0
        above += _flag_between(piece, low, high, unsigned, flags)
        # Most words are zero. Always write, and keep it only if it is not: a branch on data would be mispredicted.
        held = zero
        for word in range(zero, np.uint64(words.size)):
            places[held] = word
            held += np.uint64(words[word] != 0)
        if count > capacity:
            return -1, above
        for i in range(zero, held):
            left, first = words[places[i]], eight * places[i]
            while left:
                between[count] = piece[first + np.uint64(zeros_after(left) >> 3)]
                count += one
                left &= left - one
    return int(np.int64(count)), above


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
def find_largest(bits: Bits, k: int, seed: int, start: int, found: Positions) -> int:
    """Writes the positions of `Reference.largest`, each plus `start`, to `found`, and returns how many there are.

    `found` has room for one more than `min(k, n)`: each position is written, and kept if it counts, since a branch on
    data would be mispredicted.
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


@compiled
def add_at(sums: Floats, indices: Positions, values: Floats, factor: Scalar) -> int:
    """Adds `factor` times each value to the sum at its index. Returns the place of an index out of range, or -1."""
    size = np.uint64(sums.size)
    for i in range(indices.size):
        # Negative ones are large.
        at = np.uint64(indices[i])
        if at >= size:
            return i
        sums[at] += factor * values[i]
    return -1


@compiled
def put_at(total: Floats, indices: Positions, values: Floats, moves: Positions) -> int:
    """Sets elements to values; each row of `moves` is where some of them start, how many, and what to add to indices.

    Returns the number of an element whose place is out of range, or -1.
    """
    size = np.uint64(total.size)
    for move in range(moves.shape[0]):
        start, count, shift = moves[move]
        for i in range(np.uint64(start), np.uint64(start + count)):
            # Negative ones are large.
            at = np.uint64(indices[i] + shift)
            if at >= size:
                return int(np.int64(i))
            total[at] = values[i]
    return -1


@compiled
def sum_equal_indices(indices: Positions, values: Floats, order: Positions, unique: Positions, sums: Floats) -> int:
    """Writes the indices of `Reference.add_up` and their sums, and returns how many there are.

    `order` (`[m]`) sorts `indices` stably. `unique` and `sums` have room for m.
    """
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
def sum_squares(x: Floats, bounds: Positions, energies: NDArray[np.float64]) -> None:
    """Writes the sums of `Reference.energies` to `energies` (`[stretches]`)."""
    for stretch in range(energies.size):
        start, stop = bounds[stretch], bounds[stretch + 1]
        # Four sums, because in a single one each addition would wait for the one before it.
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
