"""Codecs for values."""

import struct
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.codecs.payload import PayloadError, wrong_section
from lightning_sparsecomm.codecs.registry import ValueCodec, register_value_codec

_MEAN = struct.Struct("<f")

_LARGEST = torch.finfo(torch.float16).max
_LARGEST_BITS = 0x7BFF


class _Float(ValueCodec):
    """Each value in one floating-point format, rounded to nearest, ties to even.

    A value outside the format's range becomes the largest finite number of the same sign.
    """

    dtype: ClassVar[torch.dtype]

    def encode(self, values: Tensor, indices: Tensor, layout: Layout) -> Tensor:
        if values.dtype.itemsize > self.dtype.itemsize:
            largest = torch.finfo(self.dtype).max
            values = values.clamp(-largest, largest)
        # Copied, because contiguous() leaves a single value with a stride that view() refuses.
        return values.to(self.dtype, copy=True, memory_format=torch.contiguous_format).view(torch.uint8)

    def decode(self, section: Tensor, count: int, parameter: int) -> Tensor:
        self.check_parameter(parameter)
        width = self.dtype.itemsize
        if section.numel() != width * count:
            expected = f"{width * count} for {count} values"
            raise wrong_section(f"{self.dtype} value", f"has {section.numel()} bytes", expected)
        # The copy is aligned, wherever the section begins in the payload.
        values = section.clone().view(self.dtype)
        if self.dtype.itemsize == 2:
            values = values.to(torch.float32)
        # One cheap pass. Values are checked one by one only if their sum is not finite; large finite ones can cause it.
        if not bool(values.sum().isfinite()):
            bad = values.isfinite().logical_not_().nonzero()
            if bad.numel():
                at = int(bad[0, 0])
                found = f"value at byte {width * at} is {float(values[at])}"
                raise wrong_section(f"{self.dtype} value", found, "a finite number")
        return values

    def bound_bytes(self, count: int, layout: Layout) -> int | None:
        return self.dtype.itemsize * count


@register_value_codec
@dataclass(frozen=True)
class Float32(_Float):
    """4 bytes a value. float32 is exact, float64 is rounded."""

    code: ClassVar[int] = 1
    dtype: ClassVar[torch.dtype] = torch.float32


@register_value_codec
@dataclass(frozen=True)
class Float16(_Float):
    """2 bytes a value, rounded. Decoded as float32.

    Magnitudes above 65504, the largest finite float16, are sent as 65504. Magnitudes up to 2^-25 are sent as 0. Error
    feedback keeps the difference in the residual and sends it later.

    >>> codec, layout, at = Float16(), Layout([("weight", (8,))]), torch.tensor([0, 4])
    >>> codec.decode(codec.encode(torch.tensor([0.1, 1e6]), at, layout), count=2, parameter=0)
    tensor([9.9976e-02, 6.5504e+04])
    """

    code: ClassVar[int] = 2
    dtype: ClassVar[torch.dtype] = torch.float16
    largest: ClassVar[float] = _LARGEST


@register_value_codec
@dataclass(frozen=True)
class Float64(_Float):
    """8 bytes a value, exact."""

    code: ClassVar[int] = 3
    dtype: ClassVar[torch.dtype] = torch.float64


@register_value_codec
@dataclass(frozen=True)
class BFloat16(_Float):
    """2 bytes a value, rounded to 8 bits, with the range of float32: for gradients of any scale. Decoded as float32."""

    code: ClassVar[int] = 6
    dtype: ClassVar[torch.dtype] = torch.bfloat16


@register_value_codec
@dataclass(frozen=True)
class SharedMean(ValueCodec):
    """Replaces each segment's values by their mean: 4 bytes a segment, and 1 to 5 bytes for the number of values.

    Means are computed in float64, rounded to float32, and decoded as float32. Meant for values of one sign, as
    `OneSidedTopK` selects them: values of different signs cancel out. Biased; use it with error feedback.

    Source: Sparse Binary Compression (Sattler et al. 2018), algorithm 2.

    >>> codec, layout, at = SharedMean(), Layout([("weight", (8,))]), torch.tensor([0, 4])
    >>> codec.decode(codec.encode(torch.tensor([1.0, 2.0]), at, layout), count=2, parameter=0)
    tensor([1.5000, 1.5000])
    """

    code: ClassVar[int] = 4

    def encode(self, values: Tensor, indices: Tensor, layout: Layout) -> Tensor:
        counts = [count for count in layout.counts(indices) if count]
        if not counts:
            return values.new_empty(0, dtype=torch.uint8)
        largest = torch.finfo(torch.float32).max
        # Clamped first, so that no sum of float64 values overflows.
        means = torch.stack([part.mean() for part in values.to(torch.float64).clamp(-largest, largest).split(counts)])
        section = bytearray()
        for count, mean in zip(counts, means.clamp_(-largest, largest).tolist()):
            section += _varint(count) + _MEAN.pack(mean)
        return torch.frombuffer(section, dtype=torch.uint8).to(values.device)

    def decode(self, section: Tensor, count: int, parameter: int) -> Tensor:
        self.check_parameter(parameter)
        data = section.cpu().numpy().tobytes()
        counts: list[int] = []
        means: list[float] = []
        at, total = 0, 0
        while at < len(data):
            shared, end = _read_varint(data, at)
            if not 1 <= shared <= count - total:
                expected = f"at least 1 and at most the {count - total} values that are left"
                raise _wrong(f"count at byte {at} is {shared}", expected)
            if len(data) - end < _MEAN.size:
                raise _wrong(f"mean at byte {end} is cut off at byte {len(data)}", f"{_MEAN.size} bytes")
            (mean,) = _MEAN.unpack_from(data, end)
            # Subtracted from themselves, only infinities and NaN do not give 0.
            if mean - mean != 0:
                raise _wrong(f"mean at byte {end} is {mean}", "a finite number")
            total += shared
            counts.append(shared)
            means.append(mean)
            at = end + _MEAN.size
        if total != count:
            raise _wrong(f"has means for {total} values", count)
        repeats = torch.tensor(counts, dtype=torch.int64)
        return torch.tensor(means).repeat_interleave(repeats, output_size=count).to(section.device)

    def bound_bytes(self, count: int, layout: Layout) -> int | None:
        return (_MEAN.size + len(_varint(count))) * min(count, sum(1 for segment in layout.segments if segment.size))


@register_value_codec
@dataclass(frozen=True)
class TwoBit(ValueCodec):
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


def _varint(number: int) -> bytes:
    """LEB128: seven bits a byte, lowest first. The highest bit says that another byte follows."""
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at byte `at`, and the position of the byte after it."""
    number = 0
    for i, byte in enumerate(data[at : at + 5]):
        number |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            if i and not byte:
                raise _wrong(f"count at byte {at} ends in 0x00", "fewer bytes")
            return number, at + i + 1
    raise _wrong(f"count at byte {at} does not end within 5 bytes and the section", "a last byte below 0x80")


def _wrong(found: str, expected: object) -> PayloadError:
    return wrong_section("shared-mean value", found, expected)


def _mean(magnitudes: Tensor, which: Tensor) -> Tensor:
    """For each row, the mean of the magnitudes that `which` marks; 0 if it marks none."""
    return torch.where(which, magnitudes, 0.0).sum(1) / which.sum(1).clamp_(min=1)


def _shifts(device: torch.device) -> Tensor:
    """Where in a byte each of its four codes begins."""
    return torch.arange(0, 8, 2, dtype=torch.uint8, device=device)
