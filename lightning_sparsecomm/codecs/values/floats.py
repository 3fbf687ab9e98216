"""Values as floating-point numbers."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparsecomm.codecs.payload import PayloadError
from lightning_sparsecomm.codecs.values.base import ValueCodec
from lightning_sparsecomm.layout import Layout


class _Float(ValueCodec):
    """Each value in one floating-point format, nearest first, ties to even; a value beyond its range becomes the
    largest finite one of the same sign."""

    dtype: ClassVar[torch.dtype]

    def encode(self, values: Tensor, indices: Tensor, layout: Layout) -> Tensor:
        if values.dtype.itemsize > self.dtype.itemsize:
            largest = torch.finfo(self.dtype).max
            values = values.clamp(-largest, largest)
        # Copied, since contiguous() leaves a single value with a stride that view() refuses.
        return values.to(self.dtype, copy=True, memory_format=torch.contiguous_format).view(torch.uint8)

    def decode(self, section: Tensor, count: int, parameter: int) -> Tensor:
        self.check_parameter(parameter)
        width = self.dtype.itemsize
        if section.numel() != width * count:
            raise PayloadError(
                f"{self.dtype} value section: has {section.numel()} bytes, expected {width * count} for {count} values."
            )
        # The copy is aligned, wherever in the payload the section begins.
        values = section.clone().view(self.dtype)
        if self.dtype is torch.float16:
            values = values.to(torch.float32)
        # One cheap pass; only a sum that is not finite, which large finite values may give too, makes us look at each.
        if not bool(values.sum().isfinite()):
            bad = values.isfinite().logical_not_().nonzero()
            if bad.numel():
                at = int(bad[0, 0])
                raise PayloadError(
                    f"{self.dtype} value section: value at byte {width * at} is {float(values[at])},"
                    " expected a finite number."
                )
        return values

    def bound_bytes(self, count: int, layout: Layout) -> int | None:
        return self.dtype.itemsize * count


@dataclass(frozen=True)
class Float32(_Float):
    """4 bytes a value; float32 exactly, float64 rounded."""

    code: ClassVar[int] = 1
    dtype: ClassVar[torch.dtype] = torch.float32


@dataclass(frozen=True)
class Float16(_Float):
    """2 bytes a value, rounded, decoded as float32. Values beyond ±65504, the largest finite float16, are sent as
    ±65504 and values below 2^-25 as 0: error feedback keeps the remainder in the residual and sends it later."""

    code: ClassVar[int] = 2
    dtype: ClassVar[torch.dtype] = torch.float16


@dataclass(frozen=True)
class Float64(_Float):
    """8 bytes a value, exactly."""

    code: ClassVar[int] = 3
    dtype: ClassVar[torch.dtype] = torch.float64
