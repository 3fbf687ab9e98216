"""One value for all selected elements of a tensor."""

import struct
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.codecs.payload import PayloadError, wrong_section
from lightning_sparsecomm.codecs.values.base import ValueCodec, register_value_codec

_MEAN = struct.Struct("<f")


@register_value_codec
@dataclass(frozen=True)
class SharedMean(ValueCodec):
    """Replaces each segment's values by their mean: 4 bytes a segment, and 1 to 5 bytes for the number of values.

    Means are computed in float64, rounded to float32, and decoded as float32. Meant for values of one sign, as
    `OneSidedTopK` selects them: values of different signs cancel out. Biased; use it with error feedback.

    Source: Sparse Binary Compression (Sattler et al. 2018), algorithm 2.
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
