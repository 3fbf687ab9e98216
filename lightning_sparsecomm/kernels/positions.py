"""Sorted positions to bits and back, in torch operations that run on any device: no loop over positions."""

from typing import NamedTuple

import torch
from torch import Tensor

ESCAPE = 0xFFFF


class Parsed(NamedTuple):
    """What a section turned out to hold; whether that is what it should hold, the caller judges.

    Attributes:
        indices: `[min(held, count)]` int64, the first positions, strictly increasing.
        held: How many positions the section holds.
        end: Where the last of them ends: in bits; for run lengths, in words.
    """

    indices: Tensor
    held: int
    end: int


class PositionKernels:
    """The kernels. Subclasses are faster and give the same bits. Bit i of a section is bit i mod 8 of byte ⌊i / 8⌋.

    `indices` are `[k]` int64, strictly increasing and not negative. Sections are `[bytes]` uint8, from any source:
    nothing outside of them is read, and the time it takes is linear in their length.
    """

    def golomb_bits(self, indices: Tensor, remainder_bits: int) -> int:
        """How many bits `write_golomb` needs."""
        return indices.numel() * (1 + remainder_bits) + int((_runs(indices) >> remainder_bits).sum())

    def write_golomb(self, indices: Tensor, remainder_bits: int) -> Tensor:
        """The run of zeros before each position, in Golomb's code with divisor 2^`remainder_bits`, at most 2^31."""
        runs = _runs(indices)
        quotients = runs >> remainder_bits
        ends = torch.cumsum(quotients + (1 + remainder_bits), 0)
        bits = runs.new_ones(int(ends[-1]) if ends.numel() else 0, dtype=torch.uint8)
        bits[ends - (1 + remainder_bits)] = 0
        for i in range(remainder_bits):
            bits[ends - (remainder_bits - i)] = (runs >> i & 1).to(torch.uint8)
        return _packed(bits)

    def read_golomb(self, section: Tensor, count: int, size: int, remainder_bits: int) -> Parsed:
        """Up to `count` positions; fewer where a code word ends beyond the section or its position is not below `size`.

        Args:
            section: `[bytes]` uint8.
            count: How many to read, at most one for every `1 + remainder_bits` bits of the section.
            size: At most 2^32.
            remainder_bits: At most 31.
        """
        bits = _unpacked(section)
        total = bits.numel()
        places = torch.arange(total + 2, device=section.device)
        # The next zero from each bit on, then the end of a code word that begins at this bit; total + 1 is nowhere.
        zeros = torch.where(bits == 0, places[:total], total + 1).flip(0)
        zeros = torch.cummin(zeros, 0).values.flip(0) if total else zeros
        follow = places.new_full((total + 2,), total + 1)
        follow[:total] = (zeros + (1 + remainder_bits)).clamp_(max=total + 1)
        # Pointer doubling: the starts of 2^i code words, and from each bit the 2^i-th that follows.
        starts, jumps = places[:1], follow
        while starts.numel() <= count:
            starts = torch.cat([starts, jumps[starts]])
            jumps = jumps[jumps]
        starts, ends = starts[:count], starts[1 : count + 1]
        sound = ends <= total
        starts, ends = starts[sound], ends[sound]
        quotients = ends - (1 + remainder_bits) - starts
        runs = quotients.clamp(max=(size >> remainder_bits) + 1) << remainder_bits
        for i in range(remainder_bits):
            runs += bits[ends - (remainder_bits - i)].to(torch.int64) << i
        # No further than one past the end, so that sums stay far from 2⁶³.
        indices = torch.cumsum(runs.clamp_(max=size) + 1, 0) - 1
        indices = indices[indices < size]
        held = indices.numel()
        return Parsed(indices, held, int(ends[held - 1]) if held else 0)

    def run_length_words(self, indices: Tensor) -> int:
        """How many 16-bit words `write_run_lengths` needs."""
        return indices.numel() + int((_runs(indices) // ESCAPE).sum())

    def write_run_lengths(self, indices: Tensor) -> Tensor:
        """The run of zeros before each position, in 16-bit words, of which 0xFFFF is 65,535 zeros and no position."""
        runs = _runs(indices)
        escapes = runs // ESCAPE
        ends = torch.cumsum(escapes + 1, 0)
        words = runs.new_full((int(ends[-1]) if ends.numel() else 0,), ESCAPE)
        words[ends - 1] = runs - escapes * ESCAPE
        return torch.stack([words & 0xFF, words >> 8], 1).to(torch.uint8).view(-1)

    def read_run_lengths(self, section: Tensor, count: int) -> Parsed:
        """Up to `count` positions, of an even number of bytes, at most 2^32 of them."""
        low, high = section.view(-1, 2).to(torch.int64).unbind(1)
        words = low | high << 8
        ends = words != ESCAPE
        found = ends.nonzero().view(-1)
        indices = torch.cumsum(words + ends, 0)[ends].sub_(1)
        return Parsed(indices[:count], found.numel(), int(found[-1]) + 1 if found.numel() else 0)

    def write_bitmap(self, indices: Tensor, size: int) -> Tensor:
        """One bit for each of `size` elements: 1 at the positions."""
        bits = indices.new_zeros(size, dtype=torch.uint8)
        bits[indices] = 1
        return _packed(bits)

    def read_bitmap(self, section: Tensor, count: int) -> Parsed:
        """Up to `count` positions of bits that are 1."""
        indices = _unpacked(section).nonzero().view(-1)
        return Parsed(indices[:count], indices.numel(), int(indices[-1]) + 1 if indices.numel() else 0)

    def spans(self, starts: Tensor, lengths: Tensor) -> Tensor:
        """All whole numbers from each start on, as many as its length says, one span after the other.

        Args:
            starts: `[s]` int64.
            lengths: `[s]` int64, not negative.

        Returns:
            `[sum of lengths]` int64.
        """
        ends = lengths.cumsum(0)
        total = int(ends[-1]) if ends.numel() else 0
        shifts = torch.repeat_interleave(starts - ends + lengths, lengths, output_size=total)
        return shifts.add_(torch.arange(total, device=starts.device))


def _runs(indices: Tensor) -> Tensor:
    """The zeros before each position, since the one before it."""
    return torch.diff(indices, prepend=indices.new_full((1,), -1)).sub_(1)


def _packed(bits: Tensor) -> Tensor:
    whole = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    # At most 255, which a sum of uint8 in uint8 holds.
    return (whole << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def _unpacked(section: Tensor) -> Tensor:
    return (section[:, None] >> torch.arange(8, dtype=torch.uint8, device=section.device) & 1).view(-1)
