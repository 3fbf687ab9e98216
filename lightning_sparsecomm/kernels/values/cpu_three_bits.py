"""Values in three bits, and in fewer where few are large, in numba."""

import numpy as np
from numpy.typing import NDArray

from lightning_sparsecomm.kernels.numba_jit import Bits, Bytes, Floats, Scalar, Words, compiled
from lightning_sparsecomm.kernels.values.cpu_magnitudes import extreme_keys, sum_of_magnitudes
from lightning_sparsecomm.kernels.values.reference import (
    LARGEST_THREE_BIT,
    LOWEST_OF_MEAN,
    SMALLEST_THREE_BIT,
    ZERO_BELOW,
)

# Places are unsigned in inner loops: else each access would look whether its place is negative.
_ZERO, _ONE, _TWO, _THREE = map(np.uint64, (0, 1, 2, 3))


@compiled
def write_heads(values: Floats, bits: Bits, group: int, heads: Floats) -> None:
    """Each group's least magnitude and ratio, not rounded. `bits` views the values as unsigned integers."""
    # Bits of a float, less the sign, order its magnitude.
    keys = np.empty(2, bits.dtype)
    extremes = keys.view(values.dtype)
    unsigned = bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)
    for at in range(heads.shape[0]):
        first, end = at * group, min((at + 1) * group, values.size)
        keys[0], keys[1] = extreme_keys(bits[first:end], unsigned)
        smallest, largest = float(np.float64(extremes[0])), float(np.float64(extremes[1]))
        if smallest >= SMALLEST_THREE_BIT and largest <= LARGEST_THREE_BIT:
            total = sum_of_magnitudes(values[first:end])
        else:
            smallest, largest, total = _limited(values[first:end])
        mean = total / (end - first)
        with_zero = smallest < ZERO_BELOW * mean
        least = LOWEST_OF_MEAN * mean if with_zero else smallest
        if least < SMALLEST_THREE_BIT:
            heads[at, 0], heads[at, 1] = 0.0, 1.0
            continue
        span = largest / least
        heads[at, 0] = least
        heads[at, 1] = -np.sqrt(span) if with_zero else span ** (1 / 3)


@compiled
def _limited(values: Floats) -> tuple[float, float, float]:
    """The least and the greatest magnitude, and the sum, of those that three bits can say."""
    smallest, largest, total = LARGEST_THREE_BIT, 0.0, 0.0
    for value in values:
        magnitude = min(abs(np.float64(value)), LARGEST_THREE_BIT)
        if magnitude < SMALLEST_THREE_BIT:
            magnitude = 0.0
        smallest = min(smallest, magnitude)
        largest = max(largest, magnitude)
        total += magnitude
    return smallest, largest, total


@compiled
def _fill(levels: Floats, least: np.float32, ratio: np.float32) -> None:
    """A group's four magnitudes."""
    rise = abs(ratio)
    first = 0
    if ratio < 0:
        levels[0] = 0
        first = 1
    levels[first] = least
    for i in range(first + 1, 4):
        levels[i] = levels[i - 1] * rise


@compiled
def _middle(levels: Floats, after: int, values: Floats) -> Scalar:
    """The least number, in the dtype of `values`, that is not below the middle between two magnitudes."""
    middle = (np.float64(levels[after]) + np.float64(levels[after + 1])) / 2
    rounded = values.dtype.type(middle)
    return np.nextafter(rounded, values.dtype.type(np.inf)) if np.float64(rounded) < middle else rounded


@compiled
def write_codes(values: Floats, group: int, heads: Floats, codes: Bytes, packed: Bytes) -> None:
    """Three bits for each value. `codes` has room for eight for each three bytes of `packed`."""
    levels = np.empty(4, np.float32)
    for at in range(heads.shape[0]):
        _fill(levels, heads[at, 0], heads[at, 1])
        middles = _middle(levels, 0, values), _middle(levels, 1, values), _middle(levels, 2, values)
        first, end = at * group, min((at + 1) * group, values.size)
        _choose(values[first:end], middles[0], middles[1], middles[2], codes[first:end])
    codes[values.size :] = 0
    words = codes.view(np.uint64)
    for i in range(_ZERO, np.uint64(words.size)):
        # The low three bits of eight bytes: of two, four and eight side by side.
        word = words[i]
        word = (word | word >> np.uint64(5)) & np.uint64(0x003F003F003F003F)
        word = (word | word >> np.uint64(10)) & np.uint64(0x00000FFF00000FFF)
        word |= word >> np.uint64(20)
        packed[_THREE * i] = np.uint8(word & np.uint64(0xFF))
        packed[_THREE * i + _ONE] = np.uint8(word >> np.uint64(8) & np.uint64(0xFF))
        packed[_THREE * i + _TWO] = np.uint8(word >> np.uint64(16) & np.uint64(0xFF))


@compiled
def _choose(values: Floats, low: Scalar, middle: Scalar, high: Scalar, codes: Bytes) -> None:
    """The number of each value's magnitude, times two, and one more if it is negative."""
    zero = values.dtype.type(0)
    for i in range(_ZERO, np.uint64(values.size)):
        magnitude = abs(values[i])
        level = np.uint8(magnitude >= low) + np.uint8(magnitude >= middle) + np.uint8(magnitude >= high)
        codes[i] = level * np.uint8(2) + np.uint8(values[i] < zero)


@compiled
def read_codes(packed: Bytes, group: int, heads: Floats, codes: Bytes, values: Floats) -> None:
    """What three bits stand for. `codes` has room for eight for each three bytes of `packed`."""
    words = codes.view(np.uint64)
    for i in range(_ZERO, np.uint64(words.size)):
        word = np.uint64(packed[_THREE * i]) | np.uint64(packed[_THREE * i + _ONE]) << np.uint64(8)
        word |= np.uint64(packed[_THREE * i + _TWO]) << np.uint64(16)
        word = (word | word << np.uint64(20)) & np.uint64(0x00000FFF00000FFF)
        word = (word | word << np.uint64(10)) & np.uint64(0x003F003F003F003F)
        words[i] = (word | word << np.uint64(5)) & np.uint64(0x0707070707070707)
    levels, signed = np.empty(4, np.float32), np.empty(8, np.float32)
    for at in range(heads.shape[0]):
        _fill(levels, heads[at, 0], heads[at, 1])
        for i in range(8):
            signed[i] = -levels[i >> 1] if i & 1 else levels[i >> 1]
        for i in range(np.uint64(at * group), np.uint64(min((at + 1) * group, values.size))):
            values[i] = signed[np.uint64(codes[i])]


@compiled
def rank_values(values: Floats, group: int, heads: Floats, ranks: Bytes, swapped: NDArray[np.int16]) -> tuple[int, int]:
    """The rank of each value, and which groups swap the first two; returns how many ranks exceed 0, and 1."""
    levels = np.empty(4, np.float32)
    second, third = 0, 0
    for at in range(heads.shape[0]):
        _fill(levels, heads[at, 0], heads[at, 1])
        low = (np.float64(levels[0]) + np.float64(levels[1])) / 2
        middle = (np.float64(levels[1]) + np.float64(levels[2])) / 2
        high = (np.float64(levels[2]) + np.float64(levels[3])) / 2
        first, last = at * group, min((at + 1) * group, values.size)
        above_low, above_middle = 0, 0
        for i in range(first, last):
            magnitude = abs(np.float64(values[i]))
            over = np.int64(magnitude >= low)
            further = np.int64(magnitude >= middle)
            above_low += int(over)
            above_middle += int(further)
            ranks[i] = over + further + np.int64(magnitude >= high)
        # More values have number 1 than 0.
        swap = above_low - above_middle > last - first - above_low
        swapped[at] = swap
        if swap:
            for i in range(first, last):
                ranks[i] ^= np.uint8(ranks[i] < 2)
            above_low = above_middle + last - first - above_low
        second += above_low
        third += above_middle
    return second, third


@compiled
def write_ranks(values: Floats, ranks: Bytes, second: int, third: int, words: Words) -> None:
    """Writes signs and ranks, those above 0 and 1 from the given bits on."""
    first = values.size
    for i in range(values.size):
        rank = np.int64(ranks[i])
        words[i >> 6] |= np.uint64(values[i] < 0) << np.uint64(i & 63)
        words[first + i >> 6] |= np.uint64(rank > 0) << np.uint64(first + i & 63)
        # Zero where nothing is written.
        words[second >> 6] |= np.uint64(rank > 1) << np.uint64(second & 63)
        second += int(np.int64(rank > 0))
        words[third >> 6] |= np.uint64(rank > 2) << np.uint64(third & 63)
        third += int(np.int64(rank > 1))


@compiled
def read_ranks(words: Words, total: int, ranks: Bytes) -> int:
    """Fills in the ranks, and returns the bit after the last. Bits beyond `total` count as 0."""
    count = ranks.size
    one = np.uint64(1)
    second = 2 * count
    for i in range(count):
        rank = np.uint8(words[count + i >> 6] >> np.uint64(count + i & 63) & one)
        # Read in any case: a branch on data would be mispredicted.
        place = min(second, total)
        ranks[i] = rank + (rank & np.uint8(words[place >> 6] >> np.uint64(place & 63) & one))
        second += int(np.int64(rank))
    third = second
    for i in range(count):
        more = np.uint8(ranks[i] > 1)
        place = min(third, total)
        ranks[i] += more & np.uint8(words[place >> 6] >> np.uint64(place & 63) & one)
        third += int(np.int64(more))
    return third


@compiled
def unrank(words: Words, group: int, heads: Floats, swapped: NDArray[np.bool_], ranks: Bytes, values: Floats) -> None:
    """Turns signs and ranks into values."""
    levels = np.empty(4, np.float32)
    for at in range(heads.shape[0]):
        _fill(levels, heads[at, 0], heads[at, 1])
        if swapped[at]:
            levels[0], levels[1] = levels[1], levels[0]
        for i in range(at * group, min((at + 1) * group, values.size)):
            magnitude = levels[ranks[i]]
            values[i] = -magnitude if words[i >> 6] >> np.uint64(i & 63) & np.uint64(1) else magnitude
