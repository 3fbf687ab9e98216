"""The definition of every position kernel, in torch operations that run on any device, without loops over positions."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparsecomm.kernels.positions.blocks import BlockKernels

# The 16-bit word for 65,535 zeros and no position.
ESCAPE = 0xFFFF


class Parsed(NamedTuple):
    """What a section holds. The caller checks it against what the section should hold.

    Attributes:
        indices: `[min(held, count)]` int64, the first positions, strictly increasing.
        held: How many positions the section holds.
        end: Where the last of them ends, in bits; for run lengths, in words.
    """

    indices: Tensor
    held: int
    end: int


class PositionKernels(BlockKernels):
    """The kernels in torch. Subclasses are faster and give the same bits.

    Positions are written to a section of bytes, and read from one. Bit i of a section is bit i mod 8 of byte ⌊i / 8⌋.
    Sections may come from an untrusted source: readers stay within them, and take time linear in their length.

    Arguments that methods share:
        indices: `[k]` int64, strictly increasing, not negative.
        section: `[bytes]` uint8.
        count: The most positions to return.
        remainder_bits: At most 31.
    """

    def golomb_bits(self, indices: Tensor, remainder_bits: int) -> int:
        """How many bits `write_golomb` needs."""
        return indices.numel() * (1 + remainder_bits) + int((_runs(indices) >> remainder_bits).sum())

    def write_golomb(self, indices: Tensor, remainder_bits: int) -> Tensor:
        """Writes the run of zeros before each position in a Golomb code with divisor 2^`remainder_bits`."""
        runs = _runs(indices)
        quotients = runs >> remainder_bits
        ends = torch.cumsum(quotients + (1 + remainder_bits), 0)
        bits = runs.new_ones(int(ends[-1]) if ends.numel() else 0, dtype=torch.uint8)
        bits[ends - (1 + remainder_bits)] = 0
        for i in range(remainder_bits):
            bits[ends - (remainder_bits - i)] = (runs >> i & 1).to(torch.uint8)
        return _packed(bits)

    def read_golomb(self, section: Tensor, count: int, size: int, remainder_bits: int) -> Parsed:
        """Reads up to `count` positions; stops at a code word that exceeds the section or a position not below `size`.

        Returns the positions before that one; `held` is how many they are. `count` is at most one for every
        `1 + remainder_bits` bits of the section, and `size`, the length of the vector, at most 2^32.
        """
        bits = _unpacked(section)
        ends = self.word_ends(section, count, remainder_bits) + (1 + remainder_bits)
        starts = torch.cat([ends.new_zeros(1), ends])[:-1]
        sound = ends <= bits.numel()
        starts, ends = starts[sound], ends[sound]
        quotients = ends - (1 + remainder_bits) - starts
        runs = quotients.clamp(max=(size >> remainder_bits) + 1) << remainder_bits
        for i in range(remainder_bits):
            runs += bits[ends - (remainder_bits - i)].to(torch.int64) << i
        # Clamped to one past the end, so that sums cannot overflow int64.
        indices = torch.cumsum(runs.clamp_(max=size) + 1, 0) - 1
        indices = indices[indices < size]
        held = indices.numel()
        return Parsed(indices, held, int(ends[held - 1]) if held else 0)

    def word_ends(self, section: Tensor, count: int, remainder_bits: int) -> Tensor:
        """The bits that end the prefixes of a Golomb section's first `count` code words: `[n]` int64, at most so many.

        The last word's remainder may exceed the section.
        """
        bits = _unpacked(section)
        total = bits.numel()
        places = torch.arange(total + 2, device=section.device)
        # The next zero from each bit on; then, in `follow`, the end of a code word that begins there. total + 1: none.
        zeros = torch.where(bits == 0, places[:total], total + 1).flip(0)
        zeros = torch.cummin(zeros, 0).values.flip(0) if total else zeros
        follow = places.new_full((total + 2,), total + 1)
        follow[:total] = (zeros + (1 + remainder_bits)).clamp_(max=total + 1)
        # Pointer doubling: the starts of the first 2^i code words; jumps[b] is the start 2^i words after bit b.
        starts, jumps = places[:1], follow
        while starts.numel() < count:
            starts = torch.cat([starts, jumps[starts]])
            jumps = jumps[jumps]
        starts = starts[:count]
        starts = starts[starts < total]
        ends = zeros[starts]
        return ends[ends < total]

    def run_length_words(self, indices: Tensor) -> int:
        """How many 16-bit words `write_run_lengths` needs."""
        return indices.numel() + int((_runs(indices) // ESCAPE).sum())

    def write_run_lengths(self, indices: Tensor) -> Tensor:
        """Writes the run of zeros before each position in little-endian 16-bit words, with `ESCAPE` for long ones."""
        runs = _runs(indices)
        escapes = runs // ESCAPE
        ends = torch.cumsum(escapes + 1, 0)
        words = runs.new_full((int(ends[-1]) if ends.numel() else 0,), ESCAPE)
        words[ends - 1] = runs - escapes * ESCAPE
        return torch.stack([words & 0xFF, words >> 8], 1).to(torch.uint8).view(-1)

    def read_run_lengths(self, section: Tensor, count: int) -> Parsed:
        """Reads up to `count` positions from a section with an even number of bytes, at most 2^32."""
        low, high = section.view(-1, 2).to(torch.int64).unbind(1)
        words = low | high << 8
        ends = words != ESCAPE
        found = ends.nonzero().view(-1)
        indices = torch.cumsum(words + ends, 0)[ends].sub_(1)
        return Parsed(indices[:count], found.numel(), int(found[-1]) + 1 if found.numel() else 0)

    def write_bitmap(self, indices: Tensor, size: int) -> Tensor:
        """Writes one bit for each of `size` elements: 1 at the positions."""
        bits = indices.new_zeros(size, dtype=torch.uint8)
        bits[indices] = 1
        return _packed(bits)

    def read_bitmap(self, section: Tensor, count: int) -> Parsed:
        """Reads up to `count` positions of bits that are 1."""
        indices = _unpacked(section).nonzero().view(-1)
        return Parsed(indices[:count], indices.numel(), int(indices[-1]) + 1 if indices.numel() else 0)

    def write_flags(self, flags: Tensor) -> Tensor:
        """Writes `[n]` bool: one bit for each, and zeros up to a whole byte."""
        return _packed(flags.to(torch.uint8))

    def read_flags(self, section: Tensor, count: int) -> Tensor:
        """The first `count` bits of a section that has as many: `[count]` bool."""
        return _unpacked(section)[:count].to(torch.bool)

    def spans(self, starts: Tensor, lengths: Tensor) -> Tensor:
        """Concatenates the ranges start, start + 1, …, start + length − 1, for `[s]` int64 `starts` and `lengths`."""
        ends = lengths.cumsum(0)
        total = int(ends[-1]) if ends.numel() else 0
        shifts = torch.repeat_interleave(starts - ends + lengths, lengths, output_size=total)
        return shifts.add_(torch.arange(total, device=starts.device))


def _runs(indices: Tensor) -> Tensor:
    """The number of zeros between each position and the one before it."""
    return torch.diff(indices, prepend=indices.new_full((1,), -1)).sub_(1)


def _packed(bits: Tensor) -> Tensor:
    whole = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    # At most 255, so the sum fits in uint8.
    return (whole << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def _unpacked(section: Tensor) -> Tensor:
    return (section[:, None] >> torch.arange(8, dtype=torch.uint8, device=section.device) & 1).view(-1)
