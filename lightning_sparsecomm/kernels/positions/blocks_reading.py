"""Reads positions that blocks have written in codes of their own, in numba: one pass over each part of the section."""

import numpy as np

from lightning_sparsecomm.kernels.numba_jit import Bytes, Positions, Words, compiled, zeros_after
from lightning_sparsecomm.kernels.positions.blocks import (
    BLOCK,
    CODE_BITS,
    EXPONENTIAL,
    GOLOMB,
    LAST_CODE,
    LONGEST_PREFIX,
    THIRDS,
)

_ONE = np.uint64(1)


@compiled
def padded(section: Bytes) -> Words:
    """A copy of the section, padded with zeros so that 64 bits can be read from any bit on."""
    words = np.zeros(section.size // 8 + 2, np.uint64)
    words.view(np.uint8)[: section.size] = section
    return words


@compiled
def read_codes(words: Words, total: int, codes: Bytes) -> tuple[int, int]:
    """Returns the bit after the codes, and the first block that writes the code of the one before; -1 if none does.

    If that bit is beyond `total`, the codes are not read. There is a bit for each block.
    """
    changes = 0
    for block in range(codes.size):
        changes += int(np.int64(words[block >> 6] >> np.uint64(block & 63) & _ONE))
    end = codes.size + CODE_BITS * changes
    if end > total:
        return end, -1
    at = codes.size
    before = 0
    for block in range(codes.size):
        if words[block >> 6] >> np.uint64(block & 63) & _ONE:
            code = int(np.int64(_get(words, at) & np.uint64(LAST_CODE)))
            if code == before:
                return end, block
            before = code
            at += CODE_BITS
        codes[block] = before
    return end, -1


@compiled
def read_prefixes(words: Words, begin: int, found: Positions) -> tuple[int, int]:
    """Fills in the zeros before each one, from bit `begin` on; returns how many ones there are, and where they end."""
    at = begin >> 6
    low = np.uint64(begin & 63)
    pending = words[at] >> low << low
    following = begin
    for i in range(found.size):
        while not pending:
            at += 1
            if at == words.size:
                return i, following
            pending = words[at]
        one = (at << 6) + zeros_after(pending)
        pending &= pending - _ONE
        found[i] = one - following
        following = one + 1
    return found.size, following


@compiled
def read_suffixes(words: Words, total: int, size: int, codes: Bytes, suffix: int, found: Positions) -> tuple[int, int]:
    """Turns prefixes into positions; returns how many of them are sound, and the bit after the last."""
    third = suffix
    for block in range(codes.size):
        first = block * BLOCK
        last = min(first + BLOCK, found.size)
        code = int(np.int64(codes[block]))
        third += (last - first) * (code // 3 + int(code % 3 == THIRDS))
        if code % 3 == EXPONENTIAL:
            for i in range(first, last):
                third += found[i]
    position = -1
    for block in range(codes.size):
        first = block * BLOCK
        last = min(first + BLOCK, found.size)
        code = int(np.int64(codes[block]))
        kind = code % 3
        shift = code // 3
        factor = 3 if kind == THIRDS else 1
        mask = (_ONE << np.uint64(shift)) - _ONE
        # Far from the section's end nothing can be missing. Prefixes are shorter than a section of 2^35 bits, and
        # shifts at most 21, so no sum overflows.
        count = last - first
        if code == GOLOMB:
            for i in range(first, last):
                position += 1 + found[i]
                found[i] = position
            if position >= size:
                return _first_beyond(found, first, size), 0
            continue
        if kind == GOLOMB and suffix + count * shift <= total:
            for i in range(first, last):
                position += 1 + (found[i] << shift) + int(np.int64(_get(words, suffix) & mask))
                suffix += shift
                found[i] = position
            if position >= size:
                return _first_beyond(found, first, size), 0
            continue
        if kind == THIRDS and suffix + count * (shift + 1) <= total and third + count <= total:
            for i in range(first, last):
                window = _get(words, suffix)
                rest = int(np.int64(window >> np.uint64(shift) & _ONE))
                # Read in any case: a branch on data would be mispredicted.
                bit = int(np.int64(words[np.uint64(third >> 6)] >> np.uint64(third & 63) & _ONE))
                third += rest
                position += 1 + ((3 * found[i] + rest + (rest & bit)) << shift) + int(np.int64(window & mask))
                suffix += shift + 1
                found[i] = position
            if position >= size:
                return _first_beyond(found, first, size), 0
            continue
        for i in range(first, last):
            prefix = found[i]
            width = shift
            if kind == EXPONENTIAL:
                width += prefix
                if prefix > LONGEST_PREFIX or suffix + width > total:
                    return i, 0
                mask = (_ONE << np.uint64(width)) - _ONE
                run = (((1 << prefix) - 1) << shift) + int(np.int64(_get(words, suffix) & mask))
            elif kind == GOLOMB:
                if suffix + width > total:
                    return i, 0
                run = min(prefix, size) * (1 << shift) + int(np.int64(_get(words, suffix) & mask))
            else:
                width += 1
                if suffix + width > total:
                    return i, 0
                window = _get(words, suffix)
                rest = int(np.int64(window >> np.uint64(shift) & _ONE))
                # Read in any case: a branch on data would be mispredicted.
                place = min(third, total)
                bit = int(np.int64(words[place >> 6] >> np.uint64(place & 63) & _ONE))
                third += rest
                if (third > total) & (rest > 0):
                    return i, 0
                rest += rest & bit
                run = ((min(prefix, size) * factor + rest) << shift) + int(np.int64(window & mask))
            suffix += width
            position += 1 + run
            if position >= size:
                return i, 0
            found[i] = position
    return found.size, third


@compiled
def _first_beyond(found: Positions, first: int, size: int) -> int:
    """The first of a block's positions, which rise, that is not below `size`; there is one."""
    while found[first] < size:
        first += 1
    return first


@compiled
def _get(words: Words, bit: int) -> np.uint64:
    """The 64 bits from `bit` on."""
    # Unsigned, so that numba need not ask whether an index counts from the end.
    place, low = np.uint64(bit >> 6), np.uint64(bit & 63)
    window: np.uint64 = (words[place] >> low) | (words[place + _ONE] << _ONE << (np.uint64(63) - low))
    return window
