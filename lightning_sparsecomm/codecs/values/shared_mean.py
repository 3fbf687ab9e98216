"""One value for all that are sent of a tensor."""

import struct
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparsecomm.codecs.payload import PayloadError
from lightning_sparsecomm.codecs.values.base import ValueCodec
from lightning_sparsecomm.layout import Layout

_MEAN = struct.Struct("<f")


@dataclass(frozen=True)
class SharedMean(ValueCodec):
    """The mean of each segment's values (taken in float64, then rounded to float32) in the place of them all: 4 bytes a
    segment, and 1 to 5 for how many share it. Decoded as float32.

    For values of one sign, as `OneSidedTopK` selects: what the others average to is lost. Biased; use it with error
    feedback.

    Source: Sparse Binary Compression (Sattler et al. 2018), algorithm 2.
    """

    code: ClassVar[int] = 4

    def encode(self, values: Tensor, indices: Tensor, layout: Layout) -> Tensor:
        counts = [count for count in layout.counts(indices) if count]
        if not counts:
            return values.new_empty(0, dtype=torch.uint8)
        means = torch.stack([part.mean() for part in values.to(torch.float64).split(counts)])
        largest = torch.finfo(torch.float32).max
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
                raise PayloadError(
                    f"shared-mean value section: count at byte {at} is {shared}, expected at least 1 and at most the"
                    f" {count - total} values that are left."
                )
            if len(data) - end < _MEAN.size:
                raise PayloadError(f"shared-mean value section: mean at byte {end} is cut off at byte {len(data)}.")
            (mean,) = _MEAN.unpack_from(data, end)
            # Infinities and NaN are no less than themselves apart.
            if mean - mean != 0:
                raise PayloadError(
                    f"shared-mean value section: mean at byte {end} is {mean}, expected a finite number."
                )
            total += shared
            counts.append(shared)
            means.append(mean)
            at = end + _MEAN.size
        if total != count:
            raise PayloadError(f"shared-mean value section: has means for {total} values, expected {count}.")
        repeats = torch.tensor(counts, dtype=torch.int64)
        return torch.tensor(means).repeat_interleave(repeats, output_size=count).to(section.device)

    def bound_bytes(self, count: int, layout: Layout) -> int | None:
        return (_MEAN.size + len(_varint(count))) * min(count, sum(1 for segment in layout.segments if segment.size))


def _varint(number: int) -> bytes:
    """LEB128: seven bits a byte, lowest first; the highest bit says that another byte follows."""
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at byte `at`, and the byte behind it."""
    number = 0
    for i, byte in enumerate(data[at : at + 5]):
        number |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            if i and not byte:
                raise PayloadError(f"shared-mean value section: count at byte {at} ends in 0x00, expected fewer bytes.")
            return number, at + i + 1
    raise PayloadError(f"shared-mean value section: count at byte {at} does not end within 5 bytes and the section.")
