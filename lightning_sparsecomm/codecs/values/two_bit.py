"""Values as a sign and one of two magnitudes."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparsecomm.codecs.payload import PayloadError
from lightning_sparsecomm.codecs.values.base import ValueCodec
from lightning_sparsecomm.layout import Layout

_LARGEST = torch.finfo(torch.float16).max
_LARGEST_BITS = 0x7BFF


@dataclass(frozen=True)
class TwoBit(ValueCodec):
    """A sign and one of two magnitudes for each value: 2 bits, and 4 bytes for each group of consecutive values.
    Decoded as float32.

    A group's magnitudes are the mean of those below its mean magnitude, and of those at or above it (both the latter
    where none is below): the first step of Lloyd's quantizer. Taken in float64, rounded to float16, at most 65504.
    Biased; use it with error feedback.

    Source: SparseLoCo (Sarfi et al. 2025) sends 2 bits a value too; groups and levels are ours, so that a payload
    decodes by itself.

    Args:
        group: How many values share magnitudes; the last group may have fewer.

    Raises:
        ValueError: `group` does not fit the byte that it travels in.
    """

    group: int = 64
    code: ClassVar[int] = 5
    parameters: ClassVar[range] = range(1, 256)

    def __post_init__(self) -> None:
        if type(self.group) is not int or self.group not in self.parameters:
            raise ValueError(
                f"group must be a whole number from 1 to 255, as it travels in one byte; got {self.group!r}."
                " Take 64 for half a bit a value of magnitudes."
            )

    @property
    def parameter(self) -> int:
        return self.group

    def encode(self, values: Tensor, indices: Tensor, layout: Layout) -> Tensor:
        count = values.numel()
        groups = -(-count // self.group)
        padding = (0, groups * self.group - count)
        magnitudes = torch.nn.functional.pad(values.abs().to(torch.float64), padding).view(groups, self.group)
        here = torch.nn.functional.pad(values.new_ones(count, dtype=torch.bool), padding).view(groups, self.group)
        # Rounded, the mean of equal numbers may be more than each of them.
        middle = torch.minimum(_mean(magnitudes, here), magnitudes.amax(1) if groups else magnitudes.sum(1))
        large = here & (magnitudes >= middle[:, None])
        small = here & ~large
        above = _mean(magnitudes, large)
        below = torch.where(small.any(1), _mean(magnitudes, small), above)
        levels = torch.stack([below, above], 1).clamp_(max=_LARGEST).to(torch.float16)
        codes = large.view(-1)[:count].to(torch.uint8) << 1 | (values < 0)
        codes = torch.nn.functional.pad(codes, (0, -count % 4)).view(-1, 4)
        packed = (codes << _places(values.device)).sum(1, dtype=torch.uint8)
        return torch.cat([levels.view(-1).view(torch.uint8), packed])

    def decode(self, section: Tensor, count: int, parameter: int) -> Tensor:
        self.check_parameter(parameter)
        levels_end = 4 * -(-count // parameter)
        expected = levels_end + (count + 3) // 4
        if section.numel() != expected:
            raise PayloadError(
                f"two-bit value section: has {section.numel()} bytes, expected {expected} for {count} values in groups"
                f" of {parameter}."
            )
        # The copy is aligned, wherever in the payload the section begins.
        levels = section[:levels_end].clone().view(torch.float16)
        # In order of their bits: what is not finite comes behind the largest number, and what is negative behind that.
        bits = levels.view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
        wrong = bits > _LARGEST_BITS
        wrong[1::2] |= bits[1::2] < bits[::2]
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0, 0])
            least = float(levels[at - 1]) if at % 2 else 0.0
            raise PayloadError(
                f"two-bit value section: magnitude at byte {2 * at} is {float(levels[at])},"
                f" expected {least} to {_LARGEST:.0f}."
            )
        codes = (section[levels_end:, None] >> _places(section.device) & 3).view(-1)
        if bool(codes[count:].any()):
            raise PayloadError(f"two-bit value section: padding in byte {expected - 1} is not 0.")
        codes = codes[:count].to(torch.int64)
        groups = torch.arange(count, device=section.device) // parameter
        magnitudes = levels.to(torch.float32)[2 * groups + (codes >> 1)]
        return torch.where(codes & 1 == 1, -magnitudes, magnitudes)

    def bound_bytes(self, count: int, layout: Layout) -> int | None:
        return 4 * -(-count // self.group) + (count + 3) // 4


def _mean(magnitudes: Tensor, which: Tensor) -> Tensor:
    """For each row, the mean of some; 0 where there are none."""
    return torch.where(which, magnitudes, 0.0).sum(1) / which.sum(1).clamp_(min=1)


def _places(device: torch.device) -> Tensor:
    return torch.arange(0, 8, 2, dtype=torch.uint8, device=device)
