"""Positions as words of 16 or 32 bits: one by one, or in runs."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparsecomm.codecs.indices.base import PartialCodec, register_index_codec
from lightning_sparsecomm.kernels import position_kernels_for


@register_index_codec
@dataclass(frozen=True)
class Raw32(PartialCodec):
    """Each position as an unsigned 32-bit integer: 4 bytes. A full selection costs no bytes."""

    code: ClassVar[int] = 1
    name: ClassVar[str] = "raw"

    def part_bytes(self, indices: Tensor, size: int) -> int:
        return 4 * indices.numel()

    def write_part(self, indices: Tensor, size: int) -> Tensor:
        return write_words(indices)

    def read_part(self, section: Tensor, count: int, size: int, parameter: int) -> Tensor:
        self.check_length(section, 4 * count, f"{count} of {size} positions")
        indices = read_words(section)
        wrong = indices >= size
        wrong[1:] |= indices[1:] <= indices[:-1]
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0, 0])
            before = f" and more than the one before, {int(indices[at - 1])}" if at else ""
            raise self.wrong(f"position at byte {4 * at} is {int(indices[at])}", f"less than {size}{before}")
        return indices

    def bound_bytes(self, count: int, size: int) -> int | None:
        # A full selection costs nothing, but one position less costs 4 bytes for each of the others. A bound for `size`
        # positions would be far above the usual length.
        return 4 * count if count < size else None if size > 1 else 0


@register_index_codec
@dataclass(frozen=True)
class RunLength16(PartialCodec):
    """The run of zeros before each position, as an unsigned 16-bit integer. A full selection costs no bytes.

    A position costs 2 bytes, and 2 more for every 65,535 zeros in its run. The word 0xFFFF stands for 65,535 zeros
    without a position after them. Any other word w stands for w zeros and then a position.

    Source: Deep Gradient Compression, section 4.1. It leaves open how longer runs are written.
    """

    code: ClassVar[int] = 2
    name: ClassVar[str] = "run-length"

    def part_bytes(self, indices: Tensor, size: int) -> int:
        return 2 * position_kernels_for(indices.device).run_length_words(indices)

    def write_part(self, indices: Tensor, size: int) -> Tensor:
        return position_kernels_for(indices.device).write_run_lengths(indices)

    def read_part(self, section: Tensor, count: int, size: int, parameter: int) -> Tensor:
        if section.numel() % 2:
            raise self.wrong(f"has {section.numel()} bytes", "an even number")
        indices, held, end = position_kernels_for(section.device).read_run_lengths(section, count)
        words = section.numel() // 2
        if held != count or end != words:
            raise self.wrong(f"its {words} words hold {held} positions", f"{count}, the last word one of them")
        if count and int(indices[-1]) >= size:
            raise self.wrong(f"the last position is {int(indices[-1])}", f"less than {size}")
        return indices

    def bound_bytes(self, count: int, size: int) -> int | None:
        # None for `size` positions, for the same reason as in Raw32.
        return 2 * (count + (size - count) // 0xFFFF) if count < size else None if size > 1 else 0


@register_index_codec
@dataclass(frozen=True)
class Runs(PartialCodec):
    """Each run of consecutive positions as its first position and its length, both unsigned 32-bit integers.

    A run costs 8 bytes, as much as a row's index in torch's sparse gradients. A full selection costs no bytes. Meant
    for whole blocks, such as the rows of an embedding.
    """

    code: ClassVar[int] = 5
    name: ClassVar[str] = "runs"

    def part_bytes(self, indices: Tensor, size: int) -> int:
        return 8 * _firsts(indices).numel()

    def write_part(self, indices: Tensor, size: int) -> Tensor:
        firsts = _firsts(indices)
        lengths = torch.diff(firsts, append=firsts.new_tensor([indices.numel()]))
        return write_words(torch.stack([indices[firsts], lengths], 1).view(-1))

    def read_part(self, section: Tensor, count: int, size: int, parameter: int) -> Tensor:
        if section.numel() % 8:
            raise self.wrong(f"has {section.numel()} bytes", "a multiple of 8")
        firsts, lengths = read_words(section).view(-1, 2).unbind(1)
        ends = firsts + lengths
        # Two runs have at least one position between them: otherwise they would be one run.
        wrong = (lengths == 0) | (ends > size)
        wrong[1:] |= firsts[1:] <= ends[:-1]
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0, 0])
            before = f", from {int(ends[at - 1]) + 1} on" if at else ""
            found = f"run at byte {8 * at} is {int(lengths[at])} positions from {int(firsts[at])} on"
            raise self.wrong(found, f"at least 1{before}, below {size}")
        # The sum is at most `size`, as runs do not overlap: no memory is allocated for a false length.
        if (held := int(lengths.sum())) != count:
            raise self.wrong(f"its runs hold {held} positions", f"{count}")
        return position_kernels_for(section.device).spans(firsts, lengths)

    def bound_bytes(self, count: int, size: int) -> int | None:
        # Isolated positions cost far more than the blocks that this codec is meant for.
        return None if count and size > 1 else 0


def write_words(numbers: Tensor) -> Tensor:
    """Each of `numbers` (`[k]` int64, from 0 to 2^32 - 1) as 4 bytes, lowest byte first."""
    # The low half of each int64, because numbers from 2^31 on do not fit int32. Cloned, because contiguous() leaves one
    # number, or none, with a stride that view() refuses.
    halves = numbers.clone(memory_format=torch.contiguous_format).view(torch.int32)[::2]
    return halves.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def read_words(section: Tensor) -> Tensor:
    """The numbers that `write_words` wrote. The length of `section` (`[bytes]` uint8) must be a multiple of 4."""
    # The copy is aligned, wherever the section begins in the payload.
    return section.clone().view(torch.int32).to(torch.int64).bitwise_and_(0xFFFFFFFF)


def _firsts(indices: Tensor) -> Tensor:
    """Where in `indices` each run of consecutive positions begins."""
    begins = torch.ones_like(indices, dtype=torch.bool)
    begins[1:] = indices[1:] != indices[:-1] + 1
    return begins.nonzero().view(-1)
