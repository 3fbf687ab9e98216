"""Positions as words of 16 or 32 bits."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparsecomm.codecs.indices.base import IndexCodec, everything
from lightning_sparsecomm.codecs.payload import PayloadError
from lightning_sparsecomm.kernels import position_kernels_for


@dataclass(frozen=True)
class Raw32(IndexCodec):
    """Each position as an unsigned 32-bit integer: 4 bytes, or no bytes at all where everything is selected."""

    code: ClassVar[int] = 1

    def section_bytes(self, indices: Tensor, size: int) -> int:
        return 4 * indices.numel() if indices.numel() < size else 0

    def encode(self, indices: Tensor, size: int) -> Tensor:
        if indices.numel() == size:
            return indices.new_empty(0, dtype=torch.uint8)
        return write_words(indices)

    def decode(self, section: Tensor, count: int, size: int, parameter: int) -> Tensor:
        self.check_parameter(parameter)
        if count == size:
            return everything("raw", section, size)
        if section.numel() != 4 * count:
            raise PayloadError(
                f"raw index section: has {section.numel()} bytes, expected {4 * count} for {count} of {size} positions."
            )
        indices = read_words(section)
        wrong = indices >= size
        wrong[1:] |= indices[1:] <= indices[:-1]
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0, 0])
            before = f" and more than the one before, {int(indices[at - 1])}" if at else ""
            raise PayloadError(
                f"raw index section: position at byte {4 * at} is {int(indices[at])},"
                f" expected less than {size}{before}."
            )
        return indices

    def bound_bytes(self, count: int, size: int) -> int | None:
        # All but one cost 4 bytes each, all cost nothing: the bound is then far above what is usual.
        return 4 * count if count < size else None if size > 1 else 0


@dataclass(frozen=True)
class RunLength16(IndexCodec):
    """The run of zeros before each position, as an unsigned 16-bit integer: 2 bytes, and 2 more for every 65,535 zeros
    of a longer run; no bytes at all where everything is selected.

    The word 0xFFFF stands for 65,535 zeros that no position follows yet; any other word for as many zeros as it says
    and then a position.

    Source: Deep Gradient Compression, section 4.1, which leaves open what becomes of longer runs.
    """

    code: ClassVar[int] = 2

    def section_bytes(self, indices: Tensor, size: int) -> int:
        return 2 * position_kernels_for(indices.device).run_length_words(indices) if indices.numel() < size else 0

    def encode(self, indices: Tensor, size: int) -> Tensor:
        if indices.numel() == size:
            return indices.new_empty(0, dtype=torch.uint8)
        return position_kernels_for(indices.device).write_run_lengths(indices)

    def decode(self, section: Tensor, count: int, size: int, parameter: int) -> Tensor:
        self.check_parameter(parameter)
        if count == size:
            return everything("run-length", section, size)
        if section.numel() % 2:
            raise PayloadError(f"run-length index section: has {section.numel()} bytes, expected an even number.")
        indices, held, end = position_kernels_for(section.device).read_run_lengths(section, count)
        words = section.numel() // 2
        if held != count or end != words:
            raise PayloadError(
                f"run-length index section: its {words} words hold {held} positions,"
                f" expected {count}, the last word one of them."
            )
        if count and int(indices[-1]) >= size:
            raise PayloadError(
                f"run-length index section: the last position is {int(indices[-1])}, expected less than {size}."
            )
        return indices

    def bound_bytes(self, count: int, size: int) -> int | None:
        # As for Raw32, all cost nothing.
        return 2 * (count + (size - count) // 0xFFFF) if count < size else None if size > 1 else 0


def write_words(numbers: Tensor) -> Tensor:
    """Each of `numbers` (`[k]` int64, from 0 to 2^32 - 1) as 4 bytes, the lowest first."""
    # The low half of each int64: a cast of numbers from 2^31 on to int32 would be out of range. Cloned, since
    # contiguous() leaves one number, or none, with a stride that view() refuses.
    halves = numbers.clone(memory_format=torch.contiguous_format).view(torch.int32)[::2]
    return halves.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def read_words(section: Tensor) -> Tensor:
    """What `write_words` was given; the length of `section` (`[bytes]` uint8) must be a multiple of 4."""
    # The copy is aligned, wherever in the payload the section begins.
    return section.clone().view(torch.int32).to(torch.int64).bitwise_and_(0xFFFFFFFF)
