"""A sign for each value, and a mean magnitude or two for each tensor."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_sparsecomm.basis.arguments import is_whole_number
from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.codecs.bits import packed, unpacked
from lightning_sparsecomm.codecs.codec import ValueCodec
from lightning_sparsecomm.codecs.payload import PayloadError, wrong_section
from lightning_sparsecomm.codecs.registry import register_value_codec
from lightning_sparsecomm.codecs.varints import read_varint, varint

_NAME = "signed-mean value"
_LARGEST = torch.finfo(torch.float32).max


@register_value_codec
@dataclass(frozen=True)
class SignedMeans(ValueCodec):
    """A sign for each value, and one or two mean magnitudes for each tensor: 1 bit, and 5 to 13 bytes a tensor.

    With one mean, a value becomes its sign times its tensor's mean magnitude. With two, it becomes the mean of those
    values of its tensor that are not negative, or of the negative ones. Zero counts as not negative. Means are taken in
    float64, rounded to float32, and decoded as that. Biased; use it with error feedback.

    Source: Dryden et al. 2016, Communication Quantization for Data-Parallel Training of Deep Neural Networks.

    >>> codec, layout, at = SignedMeans(), Layout([("weight", (8,))]), torch.arange(4)
    >>> codec.decode(codec.encode(torch.tensor([1.0, -2.0, 2.0, -4.0]), at, layout), count=4, parameter=2)
    tensor([ 1.5000, -3.0000,  1.5000, -3.0000])

    Args:
        means: 1 or 2, for each tensor.

    Raises:
        ValueError: `means` is neither 1 nor 2.
    """

    means: Literal[1, 2] = 2
    code: ClassVar[int] = 11
    parameters: ClassVar[range] = range(1, 3)

    def __post_init__(self) -> None:
        if not is_whole_number(self.means) or self.means not in (1, 2):
            raise ValueError(
                f"means must be 1 or 2, for each tensor; got {self.means!r}. Use 2 where signs are uneven."
            )

    @property
    def parameter(self) -> int:
        return self.means

    def encode(self, values: Tensor, indices: Tensor, layout: Layout) -> Tensor:
        counts = [count for count in layout.counts(indices) if count]
        # Limited, so that no sum overflows.
        magnitudes = values.abs().to(torch.float64).clamp_(max=_LARGEST)
        means = [each for part in zip(magnitudes.split(counts), values.split(counts)) for each in self._means_of(*part)]
        table = bytearray()
        # Read at once: on an accelerator, each read waits.
        rounded = iter(torch.stack(means).to(torch.float32).tolist() if counts else [])
        for count in counts:
            table += varint(count) + struct.pack(f"<{self.means}f", *(next(rounded) for _ in range(self.means)))
        head = torch.frombuffer(table, dtype=torch.uint8).to(values.device) if table else packed(values[:0] < 0)
        return torch.cat([head, packed(values < 0)])

    def decode(self, section: Tensor, count: int, parameter: int) -> Tensor:
        self.check_parameter(parameter)
        table = section.numel() - (count + 7) // 8
        if table < 0:
            raise _wrong(f"has {section.numel()} bytes", f"at least {(count + 7) // 8} for {count} values")
        counts, means = _read_table(section[:table].cpu().numpy().tobytes(), count, parameter)
        groups = torch.tensor(means, dtype=torch.float32).view(-1, parameter).to(section.device)
        repeats = torch.tensor(counts, dtype=torch.int64).to(section.device)
        above, below = (
            groups[:, column].repeat_interleave(repeats, output_size=count) for column in (0, parameter - 1)
        )
        return torch.where(unpacked(section[table:], count, "signs"), -below, above)

    def bound_bytes(self, count: int, layout: Layout) -> int | None:
        tensors = min(count, sum(1 for segment in layout.segments if segment.size))
        return (4 * self.means + len(varint(count))) * tensors + (count + 7) // 8

    def _means_of(self, magnitudes: Tensor, values: Tensor) -> Iterator[Tensor]:
        """One or two means of `[k]`, float64; 0 of no values."""
        if self.means == 1:
            yield magnitudes.mean()
            return
        for side in (values >= 0, values < 0):
            yield (magnitudes * side).sum() / side.sum().clamp(min=1)


def _read_table(data: bytes, count: int, parameter: int) -> tuple[list[int], list[float]]:
    """How many values each tensor has, and the means of all of them. Raises `PayloadError`."""
    counts: list[int] = []
    means: list[float] = []
    at, total = 0, 0
    while at < len(data):
        held, end = read_varint(data, at, _NAME)
        if not 1 <= held <= count - total:
            raise _wrong(f"count at byte {at} is {held}", f"1 to the {count - total} values that are left")
        at = end + 4 * parameter
        if len(data) < at:
            raise _wrong(f"means at byte {end} are cut off at byte {len(data)}", f"{4 * parameter} bytes")
        for mean in struct.unpack_from(f"<{parameter}f", data, end):
            # Written so that NaN fails; −0 is no mean.
            if not 0 <= mean <= _LARGEST or struct.pack("<f", mean)[3] & 0x80:
                raise _wrong(f"mean at byte {end} is {mean}", "a finite number, not negative")
            means.append(mean)
        counts.append(held)
        total += held
    if total != count:
        raise _wrong(f"has means for {total} values", count)
    return counts, means


def _wrong(found: str, expected: object) -> PayloadError:
    return wrong_section(_NAME, found, expected)
