"""Values as floating-point numbers."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.codecs.payload import wrong_section
from lightning_sparsecomm.codecs.values.base import ValueCodec, register_value_codec


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
        if self.dtype is torch.float16:
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
    """

    code: ClassVar[int] = 2
    dtype: ClassVar[torch.dtype] = torch.float16


@register_value_codec
@dataclass(frozen=True)
class Float64(_Float):
    """8 bytes a value, exact."""

    code: ClassVar[int] = 3
    dtype: ClassVar[torch.dtype] = torch.float64
