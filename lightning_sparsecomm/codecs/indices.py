"""Positions as bytes."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparsecomm.codecs.payload import PayloadError


class IndexCodec(ABC):
    """Sorted positions to bytes and back, exactly. Frozen and pure.

    Attributes:
        code: The byte that names the codec in a payload.
    """

    code: ClassVar[int]

    @abstractmethod
    def encode(self, indices: Tensor, size: int) -> Tensor:
        """The index section of a payload.

        Args:
            indices: `[k]` int64, strictly increasing, each in `[0, size)`.
            size: Length of the vector that they point into.

        Returns:
            `[bytes]` uint8 on the device of `indices`.
        """

    @abstractmethod
    def decode(self, section: Tensor, count: int, size: int) -> Tensor:
        """The positions in an index section.

        Args:
            section: `[bytes]` uint8, from any source.
            count: How many positions it holds, at most `size`. Trusted to be affordable: a full selection of `count`
                positions comes from no bytes at all.
            size: Length of the vector that they point into.

        Returns:
            `[count]` int64, strictly increasing, each in `[0, size)`; memory of its own.

        Raises:
            PayloadError: The section is not what `encode` writes for any such positions.
        """

    @abstractmethod
    def bound_bytes(self, count: int, size: int) -> int | None:
        """The length that no section for at most `count` positions exceeds; None where that is much above the usual."""


@dataclass(frozen=True)
class Raw32(IndexCodec):
    """Each position as an unsigned 32-bit integer: 4 bytes, or no bytes at all where everything is selected."""

    code: ClassVar[int] = 1

    def encode(self, indices: Tensor, size: int) -> Tensor:
        if indices.numel() == size:
            return indices.new_empty(0, dtype=torch.uint8)
        # The low half of each int64: a cast of positions from 2^31 on to int32 would be out of range. Cloned, since
        # contiguous() leaves one position, or none, with a stride that view() refuses.
        halves = indices.clone(memory_format=torch.contiguous_format).view(torch.int32)[::2]
        return halves.clone(memory_format=torch.contiguous_format).view(torch.uint8)

    def decode(self, section: Tensor, count: int, size: int) -> Tensor:
        expected = 0 if count == size else 4 * count
        if section.numel() != expected:
            raise PayloadError(
                f"raw index section: has {section.numel()} bytes, expected {expected} for {count} of {size} positions."
            )
        if count == size:
            return torch.arange(size, device=section.device)
        # The copy is aligned, wherever in the payload the section begins.
        indices = section.clone().view(torch.int32).to(torch.int64).bitwise_and_(0xFFFFFFFF)
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
    _escape: ClassVar[int] = 0xFFFF

    def encode(self, indices: Tensor, size: int) -> Tensor:
        if indices.numel() in (0, size):
            return indices.new_empty(0, dtype=torch.uint8)
        runs = torch.diff(indices, prepend=indices.new_full((1,), -1)).sub_(1)
        escapes = runs // self._escape
        words = runs
        if bool(escapes.any()):
            ends = torch.cumsum(escapes + 1, 0)
            words = runs.new_full((int(ends[-1]),), self._escape)
            words[ends - 1] = runs - escapes * self._escape
        # The low quarter of each int64.
        quarters = words.clone(memory_format=torch.contiguous_format).view(torch.int16)[::4]
        return quarters.clone(memory_format=torch.contiguous_format).view(torch.uint8)

    def decode(self, section: Tensor, count: int, size: int) -> Tensor:
        if count == size:
            if section.numel():
                raise PayloadError(
                    f"run-length index section: has {section.numel()} bytes,"
                    f" expected 0 for {count} of {size} positions."
                )
            return torch.arange(size, device=section.device)
        if section.numel() % 2:
            raise PayloadError(f"run-length index section: has {section.numel()} bytes, expected an even number.")
        # The copy is aligned, wherever in the payload the section begins.
        words = section.clone().view(torch.int16).to(torch.int64).bitwise_and_(0xFFFF)
        ends = words != self._escape
        if int(ends.sum()) != count or (words.numel() and not bool(ends[-1])):
            raise PayloadError(
                f"run-length index section: its {words.numel()} words hold {int(ends.sum())} positions,"
                f" expected {count}, the last word one of them."
            )
        indices = torch.cumsum(words + ends, 0)[ends].sub_(1)
        if count and int(indices[-1]) >= size:
            raise PayloadError(
                f"run-length index section: the last position is {int(indices[-1])}, expected less than {size}."
            )
        return indices

    def bound_bytes(self, count: int, size: int) -> int | None:
        # As for Raw32, all cost nothing.
        return 2 * (count + (size - count) // self._escape) if count < size else None if size > 1 else 0


INDEX_CODECS: dict[int, IndexCodec] = {codec.code: codec for codec in (Raw32(), RunLength16())}
"""The codec that decodes an index section, by the code in the payload."""
