"""Codecs for values in groups that share magnitudes: two or three bits a value, or fewer."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.codecs.codec import ValueCodec
from lightning_sparsecomm.codecs.payload import PayloadError, wrong_section
from lightning_sparsecomm.codecs.registry import register_value_codec
from lightning_sparsecomm.kernels import LARGEST_THREE_BIT, value_kernels_for

_LARGEST = torch.finfo(torch.float16).max
_LARGEST_BITS = 0x7BFF


class Grouped(ValueCodec):
    """Values in groups of `group` consecutive ones, each with a head of some bytes; then `bits` bits for each value.

    Its subclasses are dataclasses with the field `group`.
    """

    group: int
    bits: ClassVar[int]
    head_bytes: ClassVar[int] = 4
    parameters: ClassVar[range] = range(1, 256)
    reads_on_gpus: ClassVar[bool] = True
    _kind: ClassVar[str]

    def __post_init__(self) -> None:
        if type(self.group) is not int or self.group not in self.parameters:
            usual = type(self)().group
            raise ValueError(
                f"group must be a whole number from 1 to 255, as it travels in one byte; got {self.group!r}."
                f" Use {usual}: the groups' magnitudes then cost {8 * self.head_bytes / usual:g} bits a value."
            )

    @property
    def parameter(self) -> int:
        return self.group

    def bound_bytes(self, count: int, layout: Layout) -> int | None:
        return self._section_bytes(count, self.group)

    def _section_bytes(self, count: int, group: int) -> int:
        return self.head_bytes * -(-count // group) + (self.bits * count + 7) // 8

    def _check(self, section: Tensor, count: int, group: int) -> None:
        """Raises `PayloadError` for another length than `count` values have, and for padding that is not zero."""
        self.check_parameter(group)
        expected = self._section_bytes(count, group)
        if section.numel() != expected:
            content = f"{expected} for {count} values in groups of {group}"
            raise self._wrong(f"has {section.numel()} bytes", content)
        used = self.bits * count % 8
        if used and int(section[-1]) >> used:
            raise self._wrong(f"padding in byte {expected - 1} is not 0", "zeros")

    def _wrong(self, found: str, expected: object) -> PayloadError:
        return wrong_section(f"{self._kind} value", found, expected)


@register_value_codec
@dataclass(frozen=True)
class TwoBit(Grouped):
    """A sign and one of two magnitudes for each value: 2 bits, and 4 bytes for each group of consecutive values.

    A group's lower magnitude is the mean of the magnitudes below the group's mean magnitude. The higher one is the mean
    of the others; if none is below, both are that. This is the first step of Lloyd's quantizer. Means are computed in
    float64, limited to 65504, rounded to float16, and decoded as float32. Biased; use it with error feedback.

    Source: SparseLoCo (Sarfi et al. 2025) sends 2 bits a value too. Groups and levels are ours: they make a payload
    self-contained.

    >>> codec, layout, at = TwoBit(), Layout([("weight", (8,))]), torch.arange(4)
    >>> codec.decode(codec.encode(torch.tensor([1.0, -2.0, 8.0, -8.0]), at, layout), count=4, parameter=64)
    tensor([ 1.5000, -1.5000,  8.0000, -8.0000])

    Args:
        group: How many values share two magnitudes. The last group may have fewer.

    Raises:
        ValueError: `group` is not a whole number from 1 to 255.
    """

    group: int = 64
    code: ClassVar[int] = 5
    bits: ClassVar[int] = 2
    largest: ClassVar[float] = _LARGEST
    _kind: ClassVar[str] = "two-bit"

    def encode(self, values: Tensor, indices: Tensor, layout: Layout) -> Tensor:
        return value_kernels_for(values.device).write_two_bits(values, self.group)

    def decode(self, section: Tensor, count: int, parameter: int) -> Tensor:
        self._check(section, count, parameter)
        levels_end = 4 * -(-count // parameter)
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
            raise self._wrong(found, f"{least} to {_LARGEST:.0f}")
        return value_kernels_for(section.device).read_two_bits(section, count, parameter)


@register_value_codec
@dataclass(frozen=True)
class ThreeBit(Grouped):
    """A sign and one of four magnitudes for each value: 3 bits, and 4 bytes for each group of consecutive values.

    A group's four magnitudes form a geometric sequence from the smallest magnitude in the group to the largest, as
    suits values above a threshold. If the smallest is below an eighth of the mean, as where all elements are sent, the
    four are 0 and a sequence from 7/8 of the mean to the largest. Each value becomes the nearest. Decoded as float32.
    Biased; use it with error feedback. Of the largest tenth or quarter of normal values, it loses 0.5 to 1% of the sum
    of squares, and `TwoBit` 1 to 2%; of all of them, 6% and 12%.

    Magnitudes above 2^126 are sent as that. A group whose magnitudes are all below 2^-126 is sent as zeros.

    Source: ours; see docs/methods/default.md for what it brings.

    >>> codec, layout, at = ThreeBit(), Layout([("weight", (8,))]), torch.arange(4)
    >>> codec.decode(codec.encode(torch.tensor([1.0, -2.0, 4.5, -8.0]), at, layout), count=4, parameter=128)
    tensor([ 1., -2.,  4., -8.])

    Args:
        group: How many values share four magnitudes. The last group may have fewer.

    Raises:
        ValueError: `group` is not a whole number from 1 to 255.
    """

    group: int = 128
    code: ClassVar[int] = 7
    bits: ClassVar[int] = 3
    largest: ClassVar[float] = LARGEST_THREE_BIT
    _kind: ClassVar[str] = "three-bit"

    def encode(self, values: Tensor, indices: Tensor, layout: Layout) -> Tensor:
        return value_kernels_for(values.device).write_three_bits(values, self.group)

    def decode(self, section: Tensor, count: int, parameter: int) -> Tensor:
        self._check(section, count, parameter)
        heads = _three_bit_heads(section, count, parameter)
        self._check_heads(heads, heads[:, 0])
        return value_kernels_for(section.device).read_three_bits(section, count, parameter)

    def _check_heads(self, heads: Tensor, least: Tensor) -> None:
        """Raises `PayloadError` unless all magnitudes are finite, not negative, and do not fall."""
        ratio = heads[:, 1].abs()
        # Where the ratio is negative, the magnitudes are 0 and the first three of the sequence.
        most = least * ratio * ratio * torch.where(heads[:, 1] < 0, 1, ratio)
        # Written so that NaN fails. Largest magnitudes have to be finite.
        sound = (least >= 0) & ~least.signbit() & (ratio >= 1) & most.isfinite()
        if not bool(sound.all()):
            at = int(sound.logical_not().nonzero()[0, 0])
            found = f"magnitudes at byte {4 * at} are {float(heads[at, 0])} times powers of {float(heads[at, 1])}"
            raise self._wrong(found, "finite ones, not negative, which do not fall")


@register_value_codec
@dataclass(frozen=True)
class ShortThreeBit(ThreeBit):
    """The values of `ThreeBit` in fewer bits: what is decoded is the same, to the bit.

    Large magnitudes are rare. So which of the four magnitudes a value has takes one bit if it is the more frequent of
    the two smallest in its group, two if it is the other, and three if it is a larger one. In trainings that is 1.6 to
    1.8 bits instead of 2. The sign and the 4 bytes for each group remain. Sections have no bound, so ranks exchange
    their lengths first.

    >>> values, layout = torch.tensor([1.0, -1.0, 1.5, -8.0] * 100), Layout([("weight", (400,))])
    >>> [codec.encode(values, torch.arange(400), layout).numel() for codec in (ThreeBit(), ShortThreeBit())]
    [166, 154]

    Args:
        group: How many values share four magnitudes. The last group may have fewer.

    Raises:
        ValueError: `group` is not a whole number from 1 to 255.
    """

    code: ClassVar[int] = 8
    _kind: ClassVar[str] = "short three-bit"

    def encode(self, values: Tensor, indices: Tensor, layout: Layout) -> Tensor:
        return value_kernels_for(values.device).write_short_three_bits(values, self.group)

    def decode(self, section: Tensor, count: int, parameter: int) -> Tensor:
        self.check_parameter(parameter)
        least = 4 * -(-count // parameter) + (2 * count + 7) // 8
        content = f"{count} values in groups of {parameter}"
        if section.numel() < least:
            raise self._wrong(f"has {section.numel()} bytes", f"at least {least} for {content}")
        heads = _three_bit_heads(section, count, parameter)
        # The sign of the least magnitude says which of two numbers is shorter.
        self._check_heads(heads, heads[:, 0].abs())
        values, end = value_kernels_for(section.device).read_short_three_bits(section, count, parameter)
        if section.numel() != (end + 7) // 8:
            raise self._wrong(f"has {section.numel()} bytes", f"{(end + 7) // 8} for {content} in {end} bits")
        if end % 8 and int(section[-1]) >> end % 8:
            raise self._wrong(f"padding at bit {end} is {int(section[-1]) >> end % 8}", "0")
        return values

    def bound_bytes(self, count: int, layout: Layout) -> int | None:
        # The bound, four bits for each value, is far above the usual length.
        return None if count else 0


def _three_bit_heads(section: Tensor, count: int, group: int) -> Tensor:
    """The least magnitude and the ratio of each group: `[groups, 2]` float32."""
    # The copy is aligned, wherever the section begins in the payload.
    return section[: 4 * -(-count // group)].clone().view(torch.bfloat16).view(-1, 2).to(torch.float32)
