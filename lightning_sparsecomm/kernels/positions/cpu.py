"""Encodes and decodes sorted positions in numba: 64 bits at a time, with as few branches on data as possible."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparsecomm.kernels.numba_jit import Bytes, Positions, Words, compiled
from lightning_sparsecomm.kernels.positions.blocks_cpu import CpuBlockKernels
from lightning_sparsecomm.kernels.positions.reference import ESCAPE, Parsed, PositionKernels

# How many ones each byte begins with, from its lowest bit on.
_LEADING_ONES = np.array([next(i for i in range(9) if not byte >> i & 1) for byte in range(256)], np.uint8)

# Ones written at once. With a zero and 31 bits of remainder they fill a 64-bit word.
_MOST_ONES = 32


class CpuPositionKernels(CpuBlockKernels, PositionKernels):
    """Numba kernels on the CPU."""

    def golomb_bits(self, indices: Tensor, remainder_bits: int) -> int:
        return indices.numel() * (1 + remainder_bits) + _quotients(indices.contiguous().numpy(), remainder_bits)

    def write_golomb(self, indices: Tensor, remainder_bits: int) -> Tensor:
        section_bytes = (self.golomb_bits(indices, remainder_bits) + 7) // 8
        words = np.empty((section_bytes + 7) // 8, np.uint64)
        _write_golomb(indices.contiguous().numpy(), remainder_bits, words)
        return torch.from_numpy(words.view(np.uint8)[:section_bytes])

    def read_golomb(self, section: Tensor, count: int, size: int, remainder_bits: int) -> Parsed:
        found = np.empty(count, np.int64)
        held, end = _read_golomb(section.contiguous().numpy(), size, remainder_bits, found)
        return Parsed(torch.from_numpy(found[:held]), held, end)

    def run_length_words(self, indices: Tensor) -> int:
        return indices.numel() + _escapes(indices.contiguous().numpy())

    def write_run_lengths(self, indices: Tensor) -> Tensor:
        words = np.empty(self.run_length_words(indices), np.uint16)
        _write_run_lengths(indices.contiguous().numpy(), words)
        return torch.from_numpy(words.view(np.uint8))

    def read_run_lengths(self, section: Tensor, count: int) -> Parsed:
        found = np.empty(min(count, section.numel() // 2), np.int64)
        held, end = _read_run_lengths(section.contiguous().numpy(), found)
        return Parsed(torch.from_numpy(found[:held]), held, end)

    def write_bitmap(self, indices: Tensor, size: int) -> Tensor:
        section = np.zeros((size + 7) // 8, np.uint8)
        _write_bitmap(indices.contiguous().numpy(), section)
        return torch.from_numpy(section)

    def read_bitmap(self, section: Tensor, count: int) -> Parsed:
        found = np.empty(min(count, 8 * section.numel()) + 8, np.int64)
        held, byte = _read_bitmap(section.contiguous().numpy(), found)
        end = 8 * byte + int(section[byte]).bit_length() if held else 0
        return Parsed(torch.from_numpy(found[: min(held, count)]), held, end)

    def write_flags(self, flags: Tensor) -> Tensor:
        return torch.from_numpy(np.packbits(flags.numpy(), bitorder="little"))

    def read_flags(self, section: Tensor, count: int) -> Tensor:
        bits = np.unpackbits(section.numpy(), count=count, bitorder="little")
        return torch.from_numpy(bits).view(torch.bool)

    def spans(self, starts: Tensor, lengths: Tensor) -> Tensor:
        numbers = np.empty(int(lengths.sum()), np.int64)
        _spans(starts.contiguous().numpy(), lengths.contiguous().numpy(), numbers)
        return torch.from_numpy(numbers)


@compiled
def _quotients(indices: Positions, shift: int) -> int:
    """The sum of the runs' Golomb quotients."""
    total = 0
    previous = -1
    for i in range(indices.size):
        total += (indices[i] - previous - 1) >> shift
        previous = indices[i]
    return total


@compiled
def _escapes(indices: Positions) -> int:
    """How many escape words the runs need."""
    total = 0
    previous = -1
    for i in range(indices.size):
        run = indices[i] - previous - 1
        if run >= ESCAPE:
            total += run // ESCAPE
        previous = indices[i]
    return total


@compiled
def _write_golomb(indices: Positions, shift: int, words: Words) -> None:
    mask = (1 << shift) - 1
    one = np.uint64(1)
    pending = np.uint64(0)
    filled = 0
    at = 0
    previous = -1
    for i in range(indices.size):
        run = indices[i] - previous - 1
        previous = indices[i]
        ones = run >> shift
        # The code that appends bits stands here twice, because calling a function for it takes twice the time.
        while ones > _MOST_ONES:
            code = (one << np.uint64(_MOST_ONES)) - one
            pending |= code << np.uint64(filled)
            filled += _MOST_ONES
            if filled >= 64:
                words[at] = pending
                at += 1
                filled -= 64
                pending = code >> np.uint64(_MOST_ONES - filled)
            ones -= _MOST_ONES
        code = ((one << np.uint64(ones)) - one) | (np.uint64(run & mask) << np.uint64(ones) << one)
        length = ones + 1 + shift
        pending |= code << np.uint64(filled)
        filled += length
        if filled >= 64:
            words[at] = pending
            at += 1
            filled -= 64
            # A code word that filled a whole word leaves nothing. A shift by 64 would be undefined.
            pending = code >> np.uint64(length - filled) if filled else np.uint64(0)
    if filled:
        words[at] = pending


@compiled
def _words(section: Bytes) -> Words:
    """A copy of the section, padded with zeros so that 64 bits can be read from any bit on."""
    words = np.zeros(section.size // 8 + 2, np.uint64)
    words.view(np.uint8)[: section.size] = section
    return words


@compiled
def _window(words: Words, bit: int) -> np.uint64:
    """The 64 bits from `bit` on."""
    low = np.uint64(bit & 63)
    window: np.uint64 = (words[bit >> 6] >> low) | (words[(bit >> 6) + 1] << np.uint64(1) << (np.uint64(63) - low))
    return window


@compiled
def _read_golomb(section: Bytes, size: int, shift: int, found: Positions) -> tuple[int, int]:
    """Returns how many positions there are, and the bit where the last one ends."""
    words = _words(section)
    total = 8 * section.size
    mask = np.uint64((1 << shift) - 1)
    most = size >> shift
    begin = 0
    position = -1
    for i in range(found.size):
        window = _window(words, begin)
        ones = int(np.int64(_LEADING_ONES[np.int64(window & np.uint64(255))]))
        rest = window >> np.uint64(ones + 1)
        if ones == 8:
            # Ends at the padding's zeros at the latest.
            more = 8
            while more == 8:
                more = int(np.int64(_LEADING_ONES[np.int64(_window(words, begin + ones) & np.uint64(255))]))
                ones += more
            rest = _window(words, begin + ones) >> np.uint64(1)
        end = begin + ones + 1 + shift
        # 2^32 ones times 2^31 overflows to a negative position. So check the quotient by itself too.
        following = position + 1 + (ones << shift) + int(np.int64(rest & mask))
        if end > total or ones > most or following >= size:
            return i, begin
        position = following
        found[i] = position
        begin = end
    return found.size, begin


@compiled
def _write_run_lengths(indices: Positions, words: NDArray[np.uint16]) -> None:
    at = 0
    previous = -1
    for i in range(indices.size):
        run = indices[i] - previous - 1
        previous = indices[i]
        while run >= ESCAPE:
            words[at] = ESCAPE
            at += 1
            run -= ESCAPE
        words[at] = run
        at += 1


@compiled
def _read_run_lengths(section: Bytes, found: Positions) -> tuple[int, int]:
    """Returns how many positions there are, and the word where the last one ends."""
    following = 0
    held = 0
    end = 0
    for i in range(section.size // 2):
        word = int(np.int64(section[2 * i]) | np.int64(section[2 * i + 1]) << 8)
        following += word
        if word != ESCAPE:
            if held < found.size:
                found[held] = following
            held += 1
            end = i + 1
            following += 1
    return held, end


@compiled
def _write_bitmap(indices: Positions, section: Bytes) -> None:
    for i in range(indices.size):
        section[indices[i] >> 3] |= np.uint8(1 << (indices[i] & 7))


@compiled
def _read_bitmap(section: Bytes, found: Positions) -> tuple[int, int]:
    """Returns how many positions there are, and the byte that holds the last one.

    `found` has eight spare entries; positions beyond it are counted only.
    """
    words = _words(section)
    flags = words.view(np.uint8)
    room = np.uint64(found.size - 8)
    zero, one, eight = np.uint64(0), np.uint64(1), np.uint64(8)
    # Unsigned: else each access would look whether its place is negative.
    held, last_byte = zero, zero
    for word in range(zero, np.uint64(words.size)):
        if words[word]:
            for byte in range(eight * word, eight * word + eight):
                bits = np.uint64(flags[byte])
                if bits and held <= room:
                    first = np.int64(eight * byte)
                    # Always write, and keep it only if the bit is set: a branch on data would be mispredicted.
                    for bit in range(zero, eight):
                        found[held] = first + np.int64(bit)
                        held += bits >> bit & one
                    last_byte = np.uint64(byte)
                elif bits:
                    for bit in range(zero, eight):
                        held += bits >> bit & one
                    last_byte = np.uint64(byte)
    return int(np.int64(held)), int(np.int64(last_byte))


@compiled
def _spans(starts: Positions, lengths: Positions, numbers: Positions) -> None:
    at = 0
    for span in range(starts.size):
        start = starts[span]
        for i in range(lengths[span]):
            numbers[at + i] = start + i
        at += lengths[span]
