"""Codecs for positions."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparsecomm.codecs.codec import IndexCodec
from lightning_sparsecomm.codecs.payload import PayloadError, wrong_section
from lightning_sparsecomm.codecs.registry import register_index_codec
from lightning_sparsecomm.kernels import position_kernels_for

# log(φ − 1), where φ is the golden ratio.
_LOG_GOLDEN = math.log((math.sqrt(5) - 1) / 2)


class PartialCodec(IndexCodec):
    """An index codec that writes a part of all positions, and no bytes for a full selection."""

    name: ClassVar[str]

    @abstractmethod
    def part_bytes(self, indices: Tensor, size: int) -> int:
        """`section_bytes`, if not all positions are selected."""

    @abstractmethod
    def write_part(self, indices: Tensor, size: int) -> Tensor:
        """`encode`, if not all positions are selected."""

    @abstractmethod
    def read_part(self, section: Tensor, count: int, size: int, parameter: int) -> Tensor:
        """`decode`, if not all positions are selected; `parameter` has been checked."""

    def section_bytes(self, indices: Tensor, size: int) -> int:
        return self.part_bytes(indices, size) if indices.numel() < size else 0

    def encode(self, indices: Tensor, size: int) -> Tensor:
        return self.write_part(indices, size) if indices.numel() < size else indices.new_empty(0, dtype=torch.uint8)

    def decode(self, section: Tensor, count: int, size: int, parameter: int) -> Tensor:
        self.check_parameter(parameter)
        if count < size:
            return self.read_part(section, count, size, parameter)
        self.check_length(section, 0, f"{size} of {size} positions")
        return torch.arange(size, device=section.device)

    def check_length(self, section: Tensor, expected: int, content: str) -> None:
        if section.numel() != expected:
            raise self.wrong(f"has {section.numel()} bytes", f"{expected} for {content}")

    def wrong(self, found: str, expected: str) -> PayloadError:
        return wrong_section(f"{self.name} index", found, expected)


@register_index_codec
@dataclass(frozen=True)
class Raw32(PartialCodec):
    """Each position as an unsigned 32-bit integer: 4 bytes. A full selection costs no bytes."""

    code: ClassVar[int] = 1
    reads_on_gpus: ClassVar[bool] = True
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
    reads_on_gpus: ClassVar[bool] = True
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
class Golomb(PartialCodec):
    """Golomb's code with divisor 2^b for the gaps between positions. A full selection costs no bytes.

    The gap d is a position minus the one before it, or minus −1 for the first. It is written as (d − 1) div 2^b ones, a
    zero, and (d − 1) mod 2^b in b bits, where b = max(0, 1 + ⌊log₂(log(φ − 1) / log(1 − p))⌋), p = k/n, and φ is the
    golden ratio. This b is the best if each element is selected with probability p. A position then costs
    b + 1/(1 − (1 − p)^(2^b)) bits: 4.8, 8.1 and 11.5 for p = 0.1, 0.01 and 0.001, at most 1.4% above the entropy.

    Source: Sparse Binary Compression (Sattler et al. 2018), section on optimal position encoding, algorithms 3 and 4.
    They leave the order of bits open; ours is in docs/formats.md.

    >>> Golomb().section_bytes(torch.arange(0, 100_000, 100), size=100_000)  # 8 bits for each of 1,000 positions
    1000
    """

    code: ClassVar[int] = 3
    reads_on_gpus: ClassVar[bool] = True
    name: ClassVar[str] = "Golomb"
    parameters: ClassVar[range] = range(32)

    def parameter(self, count: int, size: int) -> int:
        """b, the number of bits of each remainder."""
        if count in (0, size):
            return 0
        return max(0, 1 + math.floor(math.log2(_LOG_GOLDEN / math.log1p(-count / size))))

    def part_bytes(self, indices: Tensor, size: int) -> int:
        remainder_bits = self.parameter(indices.numel(), size)
        return (position_kernels_for(indices.device).golomb_bits(indices, remainder_bits) + 7) // 8

    def write_part(self, indices: Tensor, size: int) -> Tensor:
        return position_kernels_for(indices.device).write_golomb(indices, self.parameter(indices.numel(), size))

    def read_part(self, section: Tensor, count: int, size: int, parameter: int) -> Tensor:
        length = section.numel()
        least = (count * (1 + parameter) + 7) // 8
        if length < least:
            raise self.wrong(f"has {length} bytes", f"at least {least} for {count} positions")
        kernels = position_kernels_for(section.device)
        indices, held, end = kernels.read_golomb(section, count, size, parameter)
        if held < count:
            expected = f"less than {size} within {8 * length} bits"
            raise self.wrong(f"position {held} at bit {end} is cut off or too large", expected)
        self.check_length(section, (end + 7) // 8, f"its {end} bits of {count} positions")
        if end % 8 and int(section[-1]) >> end % 8:
            raise self.wrong(f"padding at bit {end} is {int(section[-1]) >> end % 8}", "0")
        return indices

    def bound_bytes(self, count: int, size: int) -> int | None:
        # Padding to the longest section would cost 4 to 8% for equally likely elements, and more for others.
        return None if count and size > 1 else 0


@register_index_codec
@dataclass(frozen=True)
class Bitmap(PartialCodec):
    """One bit for each element of the vector. A full selection costs no bytes."""

    code: ClassVar[int] = 4
    reads_on_gpus: ClassVar[bool] = True
    name: ClassVar[str] = "bitmap"

    def part_bytes(self, indices: Tensor, size: int) -> int:
        return (size + 7) // 8

    def write_part(self, indices: Tensor, size: int) -> Tensor:
        return position_kernels_for(indices.device).write_bitmap(indices, size)

    def read_part(self, section: Tensor, count: int, size: int, parameter: int) -> Tensor:
        self.check_length(section, (size + 7) // 8, f"{size} elements")
        indices, held, end = position_kernels_for(section.device).read_bitmap(section, count)
        if end > size:
            raise self.wrong(f"padding at bit {end - 1} is 1", f"0 from bit {size} on")
        if held != count:
            raise self.wrong(f"{held} of its bits are 1", f"{count}")
        return indices

    def bound_bytes(self, count: int, size: int) -> int | None:
        return (size + 7) // 8


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
