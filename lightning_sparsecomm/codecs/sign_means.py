"""Signs of all elements, with a mean magnitude or two for each tensor or column."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_sparsecomm.basis.allocation import empty
from lightning_sparsecomm.basis.arguments import check_one_of, is_whole_number
from lightning_sparsecomm.basis.layout import Layout, Vector
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.codecs.bits import packed, unpacked
from lightning_sparsecomm.codecs.compressor import Compressor
from lightning_sparsecomm.codecs.payload import PayloadError
from lightning_sparsecomm.codecs.varints import read_varint, varint

SignScope = Literal["tensor", "column"]

_SCOPES = ("tensor", "column")
_HEAD = struct.Struct("<IIB")
_LARGEST = torch.finfo(torch.float32).max
_VARINT_BYTES = 5


@dataclass(frozen=True)
class SignMeans(Compressor):
    """Sends each element's sign, and one or two mean magnitudes for each group: 1 bit for each element. Biased.

    With one mean, an element becomes its sign times the group's mean magnitude. With two, it becomes the mean of those
    elements of its group that are not negative, or of the negative ones. Zero counts as not negative. Either is never
    farther from the group than zero is, so that error feedback converges. Means are taken in float64, and sent and
    decoded as float32.

    A payload has 9 bytes, 2 to 10 for each tensor, 4 for each mean, and a bit for each element.

    Source: one mean for a tensor: Karimireddy et al. 2019, Error Feedback Fixes SignSGD; two for a column: Seide et al.
    2014, 1-bit Stochastic Gradient Descent.

    >>> compressor, context = SignMeans(means=2), Round(Layout([("weight", (2, 2))]))
    >>> compressor.decode(compressor.encode(Vector(torch.tensor([1.0, -2.0, 2.0, -4.0])), context), size=4)
    tensor([ 1.5000, -3.0000,  1.5000, -3.0000])

    Args:
        scope: What shares means: a "tensor"; or a "column", whose elements differ in their first index only. A tensor
            of fewer than two dimensions is one column.
        means: 1, or 2.

    Raises:
        ValueError: An unknown scope, or `means` is neither 1 nor 2.
    """

    scope: SignScope = "tensor"
    means: Literal[1, 2] = 1

    def __post_init__(self) -> None:
        check_one_of("scope", self.scope, _SCOPES, "Use 'tensor' for one group, 'column' for many.")
        if not is_whole_number(self.means) or self.means not in (1, 2):
            raise ValueError(f"means must be 1 or 2, for each group; got {self.means!r}. Use 2 where signs are uneven.")

    def encode(self, x: Vector, context: Round) -> Tensor:
        values, table = x.values, bytearray()
        magnitudes: list[Tensor] = []
        shapes = list(self._shapes(context.layout))
        for part, (rows, columns) in zip(values.split([rows * columns for rows, columns in shapes]), shapes):
            table += varint(rows) + varint(columns)
            magnitudes.extend(self._means_of(part.view(rows, columns)))
        head = bytearray(_HEAD.pack(values.numel(), len(shapes), self.means)) + table
        means = torch.cat(magnitudes) if magnitudes else values.new_empty(0)
        start = torch.frombuffer(head, dtype=torch.uint8).to(values.device)
        return torch.cat([start, means.to(torch.float32).view(torch.uint8), packed(values < 0)])

    def decode(self, payload: Tensor, size: int) -> Tensor:
        shapes, means, at = _read_head(payload, size)
        counts = [columns for _, columns in shapes for _ in range(means)]
        end = at + 4 * sum(counts)
        if payload.numel() != end + (size + 7) // 8:
            raise PayloadError(
                f"signs: has {payload.numel()} bytes, expected {end + (size + 7) // 8} for {size} elements with"
                f" {sum(counts)} means."
            )
        # The copy is aligned, wherever the bytes lie in what was received.
        magnitudes = payload[at:end].clone().view(torch.float32)
        if bool((magnitudes.signbit() | ~magnitudes.isfinite()).any()):
            raise PayloadError("signs: a mean is not a finite number, or negative.")
        negative = unpacked(payload[end:], size, "signs")
        values, of_groups = empty(size, magnitudes), iter(magnitudes.split(counts))
        sizes = [rows * columns for rows, columns in shapes]
        for into, flags, shape in zip(values.split(sizes), negative.split(sizes), shapes):
            above = next(of_groups)
            below = next(of_groups) if means == 2 else above
            torch.where(flags.view(shape), -below, above, out=into.view(shape))
        return values

    def bound_bytes(self, context: Round) -> int | None:
        length = _HEAD.size + (context.layout.size + 7) // 8
        for rows, columns in self._shapes(context.layout):
            length += len(varint(rows)) + len(varint(columns)) + 4 * self.means * columns
        return length

    def _shapes(self, layout: Layout) -> Iterator[tuple[int, int]]:
        """Rows and columns of each tensor that has elements: a group is a column."""
        for segment in layout.segments:
            if segment.size:
                by_column = self.scope == "column" and len(segment.shape) > 1
                rows = segment.shape[0] if by_column else segment.size
                yield rows, segment.size // rows

    def _means_of(self, part: Tensor) -> Iterator[Tensor]:
        """One or two mean magnitudes for each column of `[rows, columns]`: `[columns]` float64 each."""
        # Limited, so that no sum overflows.
        magnitudes = part.abs().to(torch.float64).clamp_(max=_LARGEST)
        if self.means == 1:
            yield magnitudes.mean(0)
            return
        negative = part < 0
        below = negative.sum(0)
        sums = magnitudes.sum(0)
        sums_below = magnitudes.mul_(negative).sum(0)
        yield (sums - sums_below).clamp_(min=0) / (len(part) - below).clamp(min=1)
        yield sums_below / below.clamp(min=1)


def _read_head(payload: Tensor, size: int) -> tuple[list[tuple[int, int]], int, int]:
    """Rows and columns of each tensor, how many means a column has, and where these begin. Raises `PayloadError`."""

    def wrong(field: str, offset: int, value: object, expected: str) -> PayloadError:
        return PayloadError(f"signs: {field} at byte {offset} is {value}, expected {expected}.")

    if payload.numel() < _HEAD.size:
        raise PayloadError(f"signs: ends at byte {payload.numel()}, expected a head of {_HEAD.size} bytes.")
    sent_size, tensors, means = _HEAD.unpack(payload[: _HEAD.size].cpu().numpy().tobytes())
    if sent_size != size:
        raise wrong("size", 0, sent_size, f"{size}: the ranks train different parameters")
    if tensors > size:
        raise wrong("number of tensors", 4, tensors, f"at most the size, {size}")
    if means not in (1, 2):
        raise wrong("number of means", 8, means, "1 or 2")
    data = payload[: _HEAD.size + 2 * _VARINT_BYTES * tensors].cpu().numpy().tobytes()
    shapes, at, elements = [], _HEAD.size, 0
    for _ in range(tensors):
        begin = at
        rows, at = read_varint(data, at, "signs")
        columns, at = read_varint(data, at, "signs")
        if not 1 <= rows * columns <= size - elements:
            raise wrong("shape", begin, f"{rows} × {columns}", f"from 1 to {size - elements} elements")
        elements += rows * columns
        shapes.append((rows, columns))
    if elements != size:
        raise wrong("elements of all tensors", at, elements, str(size))
    return shapes, means, at
