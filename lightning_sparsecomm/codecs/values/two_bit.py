"""Values as a sign and one of two magnitudes."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.codecs.payload import wrong_section
from lightning_sparsecomm.codecs.values.base import ValueCodec, register_value_codec

_LARGEST = torch.finfo(torch.float16).max
_LARGEST_BITS = 0x7BFF


@register_value_codec
@dataclass(frozen=True)
class TwoBit(ValueCodec):
    """A sign and one of two magnitudes for each value: 2 bits, and 4 bytes for each group of consecutive values.

    A group's lower magnitude is the mean of the magnitudes below the group's mean magnitude. The higher one is the mean
    of the others; if none is below, both are that. This is the first step of Lloyd's quantizer. Means are computed in
    float64, limited to 65504, rounded to float16, and decoded as float32. Biased; use it with error feedback.

    Source: SparseLoCo (Sarfi et al. 2025) sends 2 bits a value too. Groups and levels are ours: they make a payload
    self-contained.

    Args:
        group: How many values share two magnitudes. The last group may have fewer.

    Raises:
        ValueError: `group` is not a whole number from 1 to 255.
    """

    group: int = 64
    code: ClassVar[int] = 5
    parameters: ClassVar[range] = range(1, 256)

    def __post_init__(self) -> None:
        if type(self.group) is not int or self.group not in self.parameters:
            raise ValueError(
                f"group must be a whole number from 1 to 255, as it travels in one byte; got {self.group!r}."
                " Use 64: the magnitudes then cost half a bit a value."
            )

    @property
    def parameter(self) -> int:
        return self.group

    def encode(self, values: Tensor, indices: Tensor, layout: Layout) -> Tensor:
        count = values.numel()
        groups = -(-count // self.group)
        padding = (0, groups * self.group - count)
        magnitudes = torch.nn.functional.pad(values.abs().to(torch.float64), padding).view(groups, self.group)
        is_value = torch.nn.functional.pad(values.new_ones(count, dtype=torch.bool), padding).view(groups, self.group)
        # Rounding can make the mean of equal numbers greater than each of them.
        middle = torch.minimum(_mean(magnitudes, is_value), magnitudes.amax(1) if groups else magnitudes.sum(1))
        large = is_value & (magnitudes >= middle[:, None])
        small = is_value & ~large
        above = _mean(magnitudes, large)
        below = torch.where(small.any(1), _mean(magnitudes, small), above)
        levels = torch.stack([below, above], 1).clamp_(max=_LARGEST).to(torch.float16)
        codes = large.view(-1)[:count].to(torch.uint8) << 1 | (values < 0)
        codes = torch.nn.functional.pad(codes, (0, -count % 4)).view(-1, 4)
        packed = (codes << _shifts(values.device)).sum(1, dtype=torch.uint8)
        return torch.cat([levels.view(-1).view(torch.uint8), packed])

    def decode(self, section: Tensor, count: int, parameter: int) -> Tensor:
        self.check_parameter(parameter)
        levels_end = 4 * -(-count // parameter)
        expected = levels_end + (count + 3) // 4
        if section.numel() != expected:
            content = f"{expected} for {count} values in groups of {parameter}"
            raise wrong_section("two-bit value", f"has {section.numel()} bytes", content)
        # The copy is aligned, wherever the section begins in the payload.
        levels = section[:levels_end].clone().view(torch.float16)
        # Compared as bits: infinities and NaN come after the largest finite number, and negative numbers after those.
        bits = levels.view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
        wrong = bits > _LARGEST_BITS
        wrong[1::2] |= bits[1::2] < bits[::2]
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0, 0])
            least = float(levels[at - 1]) if at % 2 else 0.0
            found = f"magnitude at byte {2 * at} is {float(levels[at])}"
            raise wrong_section("two-bit value", found, f"{least} to {_LARGEST:.0f}")
        codes = (section[levels_end:, None] >> _shifts(section.device) & 3).view(-1)
        if bool(codes[count:].any()):
            raise wrong_section("two-bit value", f"padding in byte {expected - 1} is not 0", "zeros")
        codes = codes[:count].to(torch.int64)
        groups = torch.arange(count, device=section.device) // parameter
        magnitudes = levels.to(torch.float32)[2 * groups + (codes >> 1)]
        return torch.where(codes & 1 == 1, -magnitudes, magnitudes)

    def bound_bytes(self, count: int, layout: Layout) -> int | None:
        return 4 * -(-count // self.group) + (count + 3) // 4


def _mean(magnitudes: Tensor, which: Tensor) -> Tensor:
    """For each row, the mean of the magnitudes that `which` marks; 0 if it marks none."""
    return torch.where(which, magnitudes, 0.0).sum(1) / which.sum(1).clamp_(min=1)


def _shifts(device: torch.device) -> Tensor:
    """Where in a byte each of its four codes begins."""
    return torch.arange(0, 8, 2, dtype=torch.uint8, device=device)
