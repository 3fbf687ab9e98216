"""Codes that blocks of positions choose for themselves, in numba: one pass over each part of the section."""

import numpy as np
import torch
from torch import Tensor

from lightning_sparsecomm.kernels.numba_jit import Bytes, Positions, compiled, zeros_before
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
from lightning_sparsecomm.kernels.positions.blocks_writing import THIRD, THIRD_SHIFT, Runs, write_blocks, write_codes

_ONE = np.uint64(1)


class CpuBlockKernels(BlockKernels):
    """Numba kernels on the CPU."""

    def choose_codes(self, indices: Tensor) -> Tensor:
        return torch.from_numpy(_chosen(_runs(indices)))

    def blocks_bits(self, indices: Tensor, codes: Tensor) -> int:
        return sum(_lengths(_runs(indices), codes.numpy()))

    def write_blocks(self, indices: Tensor, codes: Tensor) -> Tensor:
        runs, chosen = _runs(indices), codes.numpy()
        return _written(runs, chosen, _lengths(runs, chosen))

    def encode_blocks(self, indices: Tensor, most_bits: int) -> Tensor | None:
        runs = _runs(indices)
        codes = _chosen(runs)
        lengths = _lengths(runs, codes)
        return _written(runs, codes, lengths) if sum(lengths) <= most_bits else None

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
def _log(number: np.uint64) -> int:
    """⌊log₂⌋ of a positive number."""
    return 63 - zeros_before(number)


def _runs(indices: Tensor) -> Runs:
    """The number of zeros before each position."""
    runs = np.empty(indices.numel(), np.uint32)
    _fill_runs(indices.contiguous().numpy(), runs)
    return runs


def _chosen(runs: Runs) -> Bytes:
    codes = np.empty(-(-runs.size // BLOCK), np.uint8)
    _choose(runs, codes)
    return codes


def _written(runs: Runs, codes: Bytes, lengths: tuple[int, int, int, int]) -> Tensor:
    head, prefixes, suffixes, _ = lengths
    # Writing a number touches the word of its first bit and the next one, even where it has no bits.
    words = np.zeros(sum(lengths) // 64 + 2, np.uint64)
    write_codes(codes, words)
    write_blocks(runs, codes, head, head + prefixes, head + prefixes + suffixes, words)
    return torch.from_numpy(words.view(np.uint8)[: (sum(lengths) + 7) // 8])


@compiled
def _fill_runs(indices: Positions, runs: Runs) -> None:
    if runs.size:
        runs[0] = np.uint32(indices[0])
    for i in range(_ONE, np.uint64(runs.size)):
        runs[i] = np.uint32(indices[i] - indices[i - _ONE] - 1)


# Below, counters and places in arrays are unsigned: else each access would look whether they are negative.


@compiled
def _bits(runs: Runs, first: np.uint64, end: np.uint64, code: int) -> int:
    """The bits that runs `first` to `end` take in this code."""
    shift = np.uint64(code // 3)
    kind = code % 3
    total = np.uint64(0)
    if kind == GOLOMB:
        for i in range(first, end):
            total += np.uint64(runs[i]) >> shift
    elif kind == THIRDS:
        for i in range(first, end):
            total += ((np.uint64(runs[i]) >> shift) + np.uint64(2)) * THIRD >> THIRD_SHIFT
        total += end - first
    else:
        for i in range(first, end):
            total += np.uint64(2 * _log((np.uint64(runs[i]) >> shift) + _ONE))
    return int(np.int64(total)) + int(np.int64(end - first)) * (1 + code // 3)


@compiled
def _bits_of(runs: Runs, first: np.uint64, end: np.uint64, total: np.uint64, logs: int, code: int) -> int:
    """The same. Without a shift it follows from the runs' sum, and from that of the logarithms of each and one more."""
    if code == GOLOMB:
        return int(np.int64(total + (end - first)))
    return 2 * logs + int(np.int64(end - first)) if code == EXPONENTIAL else _bits(runs, first, end, code)


@compiled
def _choose(runs: Runs, codes: Bytes) -> None:
    near = np.empty(8, np.int64)
    before = 0
    for block in range(codes.size):
        first = np.uint64(block * BLOCK)
        end = min(first + np.uint64(BLOCK), np.uint64(runs.size))
        count = int(np.int64(end - first))
        total = np.uint64(0)
        logs = 0
        for i in range(first, end):
            total += np.uint64(runs[i])
            logs += _log(np.uint64(runs[i]) + _ONE)
        length = _log(total // (end - first)) + 1
        shift = min(logs // count, MOST_SHIFT)
        candidates = 0
        for code in range(max(0, 3 * (length - 2)), min(LAST_CODE, 3 * length) + 1):
            if code % 3 != EXPONENTIAL:
                near[candidates] = code
                candidates += 1
        near[candidates] = 3 * max(0, shift - 1) + EXPONENTIAL
        near[candidates + 1] = 3 * shift + EXPONENTIAL
        best = before
        least = _bits_of(runs, first, end, total, logs, before)
        for i in range(candidates + 2):
            code = near[i]
            if code == before or _bound(total, logs, count, code) + CODE_BITS > least:
                continue
            bits = _bits_of(runs, first, end, total, logs, code) + CODE_BITS
            if bits < least or (bits == least and code < best):
                best = code
                least = bits
        codes[block] = best
        before = best


@compiled
def _bound(total: np.uint64, logs: int, count: int, code: int) -> int:
    """No more than the bits that runs take in this code, by their sum and that of the logarithms of each and one more.

    A run that is cut off by b bits loses less than 2^b; that many powers of two less, a logarithm loses b at most.
    """
    shift = code // 3
    kind = code % 3
    if kind == EXPONENTIAL:
        return count * (1 + shift) + 2 * max(0, logs - count * shift)
    whole = max(0, (int(np.int64(total)) - count * ((1 << shift) - 1)) >> shift)
    return count * (1 + shift) + (whole if kind == GOLOMB else count + whole // 3)


@compiled
def _lengths(runs: Runs, codes: Bytes) -> tuple[int, int, int, int]:
    """How many bits the codes, the prefixes, the suffixes and the thirds take."""
    head = codes.size
    prefixes = runs.size
    suffixes = 0
    thirds = 0
    before = 0
    for block in range(codes.size):
        code = int(np.int64(codes[block]))
        if code != before:
            head += CODE_BITS
        before = code
        first = np.uint64(block * BLOCK)
        end = min(first + np.uint64(BLOCK), np.uint64(runs.size))
        count = int(np.int64(end - first))
        shift = code // 3
        if code % 3 == THIRDS:
            low = np.uint64(0)
            high = np.uint64(0)
            for i in range(first, end):
                whole = np.uint64(runs[i]) >> np.uint64(shift)
                low += whole * THIRD >> THIRD_SHIFT
                high += (whole + np.uint64(2)) * THIRD >> THIRD_SHIFT
            prefixes += int(np.int64(low))
            thirds += int(np.int64(high - low))
            suffixes += count * (shift + 1)
        else:
            # Without the one that ends each prefix.
            bits = _bits(runs, first, end, code) - count * (1 + shift)
            rest = bits // 2 if code % 3 == EXPONENTIAL else 0
            prefixes += bits - rest
            suffixes += rest + count * shift
    return head, prefixes, suffixes, thirds
