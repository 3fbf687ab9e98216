"""Positions as bits."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparsecomm.codecs.indices.base import IndexCodec, everything
from lightning_sparsecomm.codecs.payload import PayloadError
from lightning_sparsecomm.kernels import position_kernels_for

# log(φ − 1), φ being the golden ratio.
_LOG_GOLDEN = math.log((math.sqrt(5) - 1) / 2)


@dataclass(frozen=True)
class Golomb(IndexCodec):
    """The gap d to each position from the one before it (from −1 to the first), in Golomb's code with divisor 2^b:
    (d − 1) div 2^b ones, a zero, and (d − 1) mod 2^b in b bits. No bytes at all where everything is selected.

    b = max(0, 1 + ⌊log₂(log(φ − 1) / log(1 − p))⌋), with p = k/n and the golden ratio φ, gives the shortest code of its
    kind where each element is selected with probability p: b + 1/(1 − (1 − p)^(2^b)) bits a position (4.8, 8.1 and 11.5
    for p = 0.1, 0.01 and 0.001), at most 1.4% more than any code needs for those p.

    Source: Sparse Binary Compression (Sattler et al. 2018), section on optimal position encoding, algorithms 3 and 4,
    which leave the order of bits open.
    """

    code: ClassVar[int] = 3
    parameters: ClassVar[range] = range(32)

    def parameter(self, count: int, size: int) -> int:
        """b: bits of each remainder."""
        if count in (0, size):
            return 0
        return max(0, 1 + math.floor(math.log2(_LOG_GOLDEN / math.log1p(-count / size))))

    def section_bytes(self, indices: Tensor, size: int) -> int:
        count = indices.numel()
        if count == size:
            return 0
        return (position_kernels_for(indices.device).golomb_bits(indices, self.parameter(count, size)) + 7) // 8

    def encode(self, indices: Tensor, size: int) -> Tensor:
        count = indices.numel()
        if count == size:
            return indices.new_empty(0, dtype=torch.uint8)
        return position_kernels_for(indices.device).write_golomb(indices, self.parameter(count, size))

    def decode(self, section: Tensor, count: int, size: int, parameter: int) -> Tensor:
        self.check_parameter(parameter)
        if count == size:
            return everything("Golomb", section, size)
        length = section.numel()
        least = (count * (1 + parameter) + 7) // 8
        if length < least:
            raise PayloadError(
                f"Golomb index section: has {length} bytes, expected at least {least} for {count} positions."
            )
        kernels = position_kernels_for(section.device)
        indices, held, end = kernels.read_golomb(section, count, size, parameter)
        if held < count:
            raise PayloadError(
                f"Golomb index section: position {held} at bit {end} is cut off or too large, expected less than {size}"
                f" within {8 * length} bits."
            )
        if length != (end + 7) // 8:
            raise PayloadError(
                f"Golomb index section: has {length} bytes, expected {(end + 7) // 8} for its {end} bits of"
                f" {count} positions."
            )
        if end % 8 and int(section[-1]) >> end % 8:
            raise PayloadError(
                f"Golomb index section: padding at bit {end} is {int(section[-1]) >> end % 8}, expected 0."
            )
        return indices

    def bound_bytes(self, count: int, size: int) -> int | None:
        # Padding to the longest would cost 4 to 8% where all elements are as likely, and more where they are not.
        return None if count and size > 1 else 0


@dataclass(frozen=True)
class Bitmap(IndexCodec):
    """One bit for each element of the vector; no bytes at all where everything is selected."""

    code: ClassVar[int] = 4

    def section_bytes(self, indices: Tensor, size: int) -> int:
        return (size + 7) // 8 if indices.numel() < size else 0

    def encode(self, indices: Tensor, size: int) -> Tensor:
        if indices.numel() == size:
            return indices.new_empty(0, dtype=torch.uint8)
        return position_kernels_for(indices.device).write_bitmap(indices, size)

    def decode(self, section: Tensor, count: int, size: int, parameter: int) -> Tensor:
        self.check_parameter(parameter)
        if count == size:
            return everything("bitmap", section, size)
        expected = (size + 7) // 8
        if section.numel() != expected:
            raise PayloadError(
                f"bitmap index section: has {section.numel()} bytes, expected {expected} for {size} elements."
            )
        indices, held, end = position_kernels_for(section.device).read_bitmap(section, count)
        if end > size:
            raise PayloadError(f"bitmap index section: padding at bit {end - 1} is 1, expected 0 from bit {size} on.")
        if held != count:
            raise PayloadError(f"bitmap index section: {held} of its bits are 1, expected {count}.")
        return indices

    def bound_bytes(self, count: int, size: int) -> int | None:
        return (size + 7) // 8
