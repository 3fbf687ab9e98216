"""Codecs for values: each by itself, or one mean for all."""

import struct
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.codecs.codec import ValueCodec
from lightning_sparsecomm.codecs.payload import PayloadError, wrong_section
from lightning_sparsecomm.codecs.registry import register_value_codec
from lightning_sparsecomm.codecs.varints import read_varint, varint

_MEAN = struct.Struct("<f")
_SHARED_MEAN = "shared-mean value"


class _Float(ValueCodec):
    """Each value in one floating-point format, rounded to nearest, ties to even.

    A value outside the format's range becomes the largest finite number of the same sign.
    """

    dtype: ClassVar[torch.dtype]
    elementwise: ClassVar[bool] = True
    reads_on_gpus: ClassVar[bool] = True

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
    largest: ClassVar[float] = torch.finfo(torch.float16).max


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
            section += varint(count) + _MEAN.pack(mean)
        return torch.frombuffer(section, dtype=torch.uint8).to(values.device)

    def decode(self, section: Tensor, count: int, parameter: int) -> Tensor:
        self.check_parameter(parameter)
        data = section.cpu().numpy().tobytes()
        counts: list[int] = []
        means: list[float] = []
        at, total = 0, 0
        while at < len(data):
            shared, end = read_varint(data, at, _SHARED_MEAN)
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
        return torch.tensor(means, dtype=torch.float32).repeat_interleave(repeats, output_size=count).to(section.device)

    def bound_bytes(self, count: int, layout: Layout) -> int | None:
        return (_MEAN.size + len(varint(count))) * min(count, sum(1 for segment in layout.segments if segment.size))


def _wrong(found: str, expected: object) -> PayloadError:
    return wrong_section(_SHARED_MEAN, found, expected)
