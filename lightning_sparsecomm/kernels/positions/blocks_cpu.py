"""Codes that blocks of positions choose for themselves, in numba: one pass over each part of the section."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparsecomm.kernels.numba_jit import Bytes, Positions, Words, compiled, zeros_before
from lightning_sparsecomm.kernels.positions.blocks import (
    BLOCK,
    CODE_BITS,
    EXPONENTIAL,
    GOLOMB,
    LAST_CODE,
    MOST_SHIFT,
    THIRDS,
    BlockKernels,
    ParsedBlocks,
)
from lightning_sparsecomm.kernels.positions.blocks_reading import padded, read_codes, read_prefixes, read_suffixes

Runs = NDArray[np.uint64]

_ONE = np.uint64(1)
# ⌊x / 3⌋ is ⌊x · _THIRD / 2^33⌋ for x up to 2^32.
_THIRD = np.uint64(0xAAAAAAAB)
_THIRD_SHIFT = np.uint64(33)


class CpuBlockKernels(BlockKernels):
    """Numba kernels on the CPU."""

    def choose_codes(self, indices: Tensor) -> Tensor:
        codes = np.empty(-(-indices.numel() // BLOCK), np.uint8)
        _choose(indices.contiguous().numpy(), codes)
        return torch.from_numpy(codes)

    def blocks_bits(self, indices: Tensor, codes: Tensor) -> int:
        return sum(_lengths(indices.contiguous().numpy(), codes.numpy()))

    def write_blocks(self, indices: Tensor, codes: Tensor) -> Tensor:
        positions, chosen = indices.contiguous().numpy(), codes.numpy()
        head, prefixes, suffixes, thirds = _lengths(positions, chosen)
        total = head + prefixes + suffixes + thirds
        # Writing a number touches the word of its first bit and the next one, even where it has no bits.
        words = np.zeros(total // 64 + 2, np.uint64)
        _write_codes(chosen, words)
        _write_blocks(positions, chosen, head, head + prefixes, head + prefixes + suffixes, words)
        return torch.from_numpy(words.view(np.uint8)[: (total + 7) // 8])

    def read_blocks(self, section: Tensor, count: int, size: int) -> ParsedBlocks:
        words = padded(section.contiguous().numpy())
        total = 8 * section.numel()
        codes = np.empty(-(-count // BLOCK), np.uint8)
        begin, repeated = read_codes(words, total, codes)
        if begin > total or repeated >= 0:
            return ParsedBlocks(torch.empty(0, dtype=torch.int64), 0, 0, repeated)
        found = np.empty(count, np.int64)
        held, start = read_prefixes(words, begin, found)
        end = 0
        if held == count:
            held, end = read_suffixes(words, total, size, codes, start, found)
            return ParsedBlocks(torch.from_numpy(found[:held]), held, end, -1)
        return ParsedBlocks(torch.empty(0, dtype=torch.int64), held, end, -1)


@compiled
def _put(words: Words, bit: int, number: np.uint64) -> None:
    """Writes a number of at most 64 bits from `bit` on, where nothing but zeros was written."""
    low = np.uint64(bit & 63)
    words[bit >> 6] |= number << low
    words[(bit >> 6) + 1] |= number >> _ONE >> (np.uint64(63) - low)


@compiled
def _log(number: np.uint64) -> int:
    """⌊log₂⌋ of a positive number."""
    return 63 - zeros_before(number)


@compiled
def _block(indices: Positions, first: int, runs: Runs) -> int:
    """Fills in the runs of the block that begins with position number `first`, and returns how many they are."""
    count = min(BLOCK, indices.size - first)
    runs[0] = np.uint64(indices[first] - _before(indices, first) - 1)
    for i in range(1, count):
        runs[i] = np.uint64(indices[first + i] - indices[first + i - 1] - 1)
    return count


@compiled
def _before(indices: Positions, first: int) -> int:
    """The position before that with number `first`, or -1."""
    return int(indices[first - 1]) if first else -1


@compiled
def _bits(runs: Runs, count: int, code: int) -> int:
    """The bits that `count` runs take in this code."""
    shift = np.uint64(code // 3)
    kind = code % 3
    total = np.uint64(0)
    if kind == GOLOMB:
        for i in range(count):
            total += runs[i] >> shift
    elif kind == THIRDS:
        for i in range(count):
            total += ((runs[i] >> shift) + np.uint64(2)) * _THIRD >> _THIRD_SHIFT
        total += np.uint64(count)
    else:
        for i in range(count):
            total += np.uint64(2 * _log((runs[i] >> shift) + _ONE))
    return int(np.int64(total)) + count * (1 + code // 3)


@compiled
def _bits_of(runs: Runs, count: int, total: np.uint64, logs: int, code: int) -> int:
    """The same. Without a shift it follows from the runs' sum, and from that of the logarithms of each and one more."""
    if code == GOLOMB:
        return int(np.int64(total)) + count
    return 2 * logs + count if code == EXPONENTIAL else _bits(runs, count, code)


@compiled
def _choose(indices: Positions, codes: Bytes) -> None:
    runs = np.empty(BLOCK, np.uint64)
    near = np.empty(8, np.int64)
    before = 0
    for block in range(codes.size):
        count = _block(indices, block * BLOCK, runs)
        total = np.uint64(0)
        logs = 0
        for i in range(count):
            total += runs[i]
            logs += _log(runs[i] + _ONE)
        length = _log(total // np.uint64(count)) + 1
        shift = min(logs // count, MOST_SHIFT)
        candidates = 0
        for code in range(max(0, 3 * (length - 2)), min(LAST_CODE, 3 * length) + 1):
            if code % 3 != EXPONENTIAL:
                near[candidates] = code
                candidates += 1
        near[candidates] = 3 * max(0, shift - 1) + EXPONENTIAL
        near[candidates + 1] = 3 * shift + EXPONENTIAL
        best = before
        least = _bits_of(runs, count, total, logs, before)
        for i in range(candidates + 2):
            code = near[i]
            if code == before:
                continue
            bits = _bits_of(runs, count, total, logs, code) + CODE_BITS
            if bits < least or (bits == least and code < best):
                best = code
                least = bits
        codes[block] = best
        before = best


@compiled
def _lengths(indices: Positions, codes: Bytes) -> tuple[int, int, int, int]:
    """How many bits the codes, the prefixes, the suffixes and the thirds take."""
    runs = np.empty(BLOCK, np.uint64)
    head = codes.size
    prefixes = indices.size
    suffixes = 0
    thirds = 0
    before = 0
    for block in range(codes.size):
        code = int(np.int64(codes[block]))
        if code != before:
            head += CODE_BITS
        before = code
        if code == GOLOMB:
            # Its bits are those of a bitmap.
            end = min((block + 1) * BLOCK, indices.size)
            prefixes += indices[end - 1] - _before(indices, block * BLOCK) - (end - block * BLOCK)
            continue
        count = _block(indices, block * BLOCK, runs)
        shift = code // 3
        if code % 3 == THIRDS:
            low = np.uint64(0)
            high = np.uint64(0)
            for i in range(count):
                whole = runs[i] >> np.uint64(shift)
                low += whole * _THIRD >> _THIRD_SHIFT
                high += (whole + np.uint64(2)) * _THIRD >> _THIRD_SHIFT
            prefixes += int(np.int64(low))
            thirds += int(np.int64(high - low))
            suffixes += count * (shift + 1)
        else:
            # Without the one that ends each prefix.
            bits = _bits(runs, count, code) - count * (1 + shift)
            rest = bits // 2 if code % 3 == EXPONENTIAL else 0
            prefixes += bits - rest
            suffixes += rest + count * shift
    return head, prefixes, suffixes, thirds


@compiled
def _write_codes(codes: Bytes, words: Words) -> None:
    at = codes.size
    before = 0
    for block in range(codes.size):
        code = int(np.int64(codes[block]))
        if code != before:
            _put(words, block, _ONE)
            _put(words, at, np.uint64(code))
            at += CODE_BITS
        before = code


@compiled
def _write_blocks(indices: Positions, codes: Bytes, prefix: int, suffix: int, third: int, words: Words) -> None:
    """Writes prefixes, suffixes and thirds from these bits on."""
    runs = np.empty(BLOCK, np.uint64)
    # Suffixes are collected up to a whole word.
    at = suffix >> 6
    filled = suffix & 63
    pending = np.uint64(0)
    for block in range(codes.size):
        code = int(np.int64(codes[block]))
        if code == GOLOMB:
            first, end = block * BLOCK, min((block + 1) * BLOCK, indices.size)
            prefix -= _before(indices, first) + 1
            for i in range(first, end):
                one = prefix + indices[i]
                words[one >> 6] |= _ONE << np.uint64(one & 63)
            prefix += indices[end - 1] + 1
            continue
        count = _block(indices, block * BLOCK, runs)
        kind = code % 3
        width = code // 3 + int(kind == THIRDS)
        shift = np.uint64(code // 3)
        mask = (_ONE << shift) - _ONE
        for i in range(count):
            run = runs[i]
            whole = run >> shift
            number = run & mask
            if kind == GOLOMB:
                prefix += int(np.int64(whole))
            elif kind == THIRDS:
                quotient = whole * _THIRD >> _THIRD_SHIFT
                rest = whole - np.uint64(3) * quotient
                high = np.uint64(rest > 0)
                prefix += int(np.int64(quotient))
                number |= high << shift
                # Zero where nothing is written.
                words[third >> 6] |= rest >> _ONE << np.uint64(third & 63)
                third += int(np.int64(high))
            else:
                log = _log(whole + _ONE)
                prefix += log
                number = run - (((_ONE << np.uint64(log)) - _ONE) << shift)
                width = code // 3 + log
            words[prefix >> 6] |= _ONE << np.uint64(prefix & 63)
            prefix += 1
            pending |= number << np.uint64(filled)
            filled += width
            if filled >= 64:
                words[at] |= pending
                at += 1
                filled -= 64
                # Two shifts, because one by 64 would be undefined.
                pending = number >> _ONE >> np.uint64(width - filled - 1) if filled else np.uint64(0)
    words[at] |= pending
