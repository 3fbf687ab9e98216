"""Writes positions in the codes that their blocks have chosen, in numba."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_sparsecomm.kernels.numba_jit import Bytes, Words, compiled, zeros_before
from lightning_sparsecomm.kernels.positions.blocks import BLOCK, CODE_BITS, EXPONENTIAL, GOLOMB, THIRDS

Runs = NDArray[np.uint32]

_ONE = np.uint64(1)
# A bit's word, and its place there.
_SIX, _LOW = np.uint64(6), np.uint64(63)
# ⌊x / 3⌋ is ⌊x · THIRD / 2^33⌋ for x up to 2^32.
THIRD = np.uint64(0xAAAAAAAB)
THIRD_SHIFT = np.uint64(33)


@compiled
def _put(words: Words, bit: int, number: np.uint64) -> None:
    """Writes a number of at most 64 bits from `bit` on, where nothing but zeros was written."""
    low = np.uint64(bit & 63)
    words[bit >> 6] |= number << low
    words[(bit >> 6) + 1] |= number >> _ONE >> (np.uint64(63) - low)


@compiled
def write_codes(codes: Bytes, words: Words) -> None:
    at = codes.size
    before = 0
    for block in range(codes.size):
        code = int(np.int64(codes[block]))
        if code != before:
            _put(words, block, _ONE)
            _put(words, at, np.uint64(code))
            at += CODE_BITS
        before = code


class Written(NamedTuple):
    """Where the next bits of prefixes, suffixes and thirds go, each with the bits of its last word so far."""

    prefix: np.uint64
    prefixes: np.uint64
    suffix: np.uint64
    suffixes: np.uint64
    third: np.uint64
    thirds: np.uint64


def _block_writer(kind: int) -> Callable[[Runs, np.uint64, np.uint64, np.uint64, Words, Written], Written]:
    """Compiles the loop for one kind of code: a branch within it would cost more than the rest."""

    def write_block(
        runs: Runs, first: np.uint64, end: np.uint64, shift: np.uint64, words: Words, written: Written
    ) -> Written:
        prefix, prefixes, suffix, suffixes, third, thirds = written
        mask = (_ONE << shift) - _ONE
        width = shift + np.uint64(kind == THIRDS)
        for i in range(first, end):
            run = np.uint64(runs[i])
            whole = run >> shift
            number = run & mask
            if kind == GOLOMB:
                quotient = whole
            elif kind == THIRDS:
                quotient = whole * THIRD >> THIRD_SHIFT
                rest = whole - np.uint64(3) * quotient
                # No branch on data: 1 for a rest of 1 or 2, and what follows is zero where nothing is written.
                high = rest + _ONE >> _ONE
                number |= high << shift
                thirds |= rest >> _ONE << (third & _LOW)
                third += high
                if third & _LOW < high:
                    words[(third >> _SIX) - _ONE] |= thirds
                    thirds = np.uint64(0)
            else:
                quotient = np.uint64(63 - zeros_before(whole + _ONE))
                number = run - (((_ONE << quotient) - _ONE) << shift)
                width = shift + quotient
            one = prefix + quotient
            if one >> _SIX != prefix >> _SIX:
                words[prefix >> _SIX] |= prefixes
                prefixes = np.uint64(0)
            prefixes |= _ONE << (one & _LOW)
            prefix = one + _ONE
            if not prefix & _LOW:
                words[one >> _SIX] |= prefixes
                prefixes = np.uint64(0)
            filled = suffix & _LOW
            suffixes |= number << filled
            suffix += width
            if filled + width > _LOW:
                words[(suffix >> _SIX) - _ONE] |= suffixes
                filled = suffix & _LOW
                # Two shifts, because one by 64 would be undefined.
                suffixes = number >> _ONE >> (width - filled - _ONE) if filled else np.uint64(0)
        return Written(prefix, prefixes, suffix, suffixes, third, thirds)

    write_block.__qualname__ = f"write_block_of_kind_{kind}"
    return compiled(write_block)


_write_golomb_block, _write_thirds_block, _write_exponential_block = map(_block_writer, (GOLOMB, THIRDS, EXPONENTIAL))


@compiled
def write_blocks(runs: Runs, codes: Bytes, prefix: int, suffix: int, third: int, words: Words) -> None:
    """Writes prefixes, suffixes and thirds from these bits on.

    Each is collected in a register up to a whole word: what follows shares it, and would wait for it to be written.
    """
    none = np.uint64(0)
    written = Written(np.uint64(prefix), none, np.uint64(suffix), none, np.uint64(third), none)
    for block in range(codes.size):
        code = int(np.int64(codes[block]))
        first = np.uint64(block * BLOCK)
        end = min(first + np.uint64(BLOCK), np.uint64(runs.size))
        shift = np.uint64(code // 3)
        if code % 3 == GOLOMB:
            written = _write_golomb_block(runs, first, end, shift, words, written)
        elif code % 3 == THIRDS:
            written = _write_thirds_block(runs, first, end, shift, words, written)
        else:
            written = _write_exponential_block(runs, first, end, shift, words, written)
    words[written.prefix >> _SIX] |= written.prefixes
    words[written.suffix >> _SIX] |= written.suffixes
    words[written.third >> _SIX] |= written.thirds
