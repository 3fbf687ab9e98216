"""Positions as bits: Golomb codes and bitmaps."""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_sparsecomm.codecs.indices.base import PartialCodec, register_index_codec
from lightning_sparsecomm.kernels import position_kernels_for

# log(φ − 1), where φ is the golden ratio.
_LOG_GOLDEN = math.log((math.sqrt(5) - 1) / 2)


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
    """

    code: ClassVar[int] = 3
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
