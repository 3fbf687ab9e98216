"""Elements rounded at random to a few multiples of their bucket's norm."""

import math
import struct
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_sparsecomm.basis.arguments import check_one_of, check_whole_number
from lightning_sparsecomm.basis.layout import MAX_SIZE, SparseVector, Vector
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.codecs.bits import packed, unpacked
from lightning_sparsecomm.codecs.compressor import Compressor
from lightning_sparsecomm.codecs.elias import read_digits, read_lengths, write_elias
from lightning_sparsecomm.codecs.payload import PayloadError

Norm = Literal["l2", "max"]

_HEAD = struct.Struct("<IIIIIB")
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class StochasticLevels(Compressor):
    """Rounds each element at random to one of the two nearest multiples of its bucket's norm by `levels`. Unbiased.

    An element x of a bucket of norm N becomes sign(x) · N · l / s, with l = ⌊s·|x| / N + u⌋ and u uniform in [0, 1).
    What is not zero is sent, as in the paper: the distance from the last one, a sign, and the level, in an Elias code.
    With few levels, that is at most s·(s + √n) elements of a bucket of n on average. Draws are new in each round and on
    each rank.

    The norm is rounded to float32, and u has 24 bits. Where the norm is above float32's largest number, it is that, and
    larger elements are sent as that.

    Source: Alistarh et al. 2017, QSGD, sections 3.1 and 3.2. Its code of numbers is Elias' recursive one; the gamma
    code here is never longer up to 31.

    >>> compressor, context = StochasticLevels(levels=1, bucket=4), Round(Layout([("weight", (4,))]))
    >>> compressor.decode(compressor.encode(Vector(torch.tensor([0.0, -2.0, 0.0, 0.0])), context), size=4).dense()
    tensor([ 0., -2.,  0.,  0.])

    Args:
        levels: s, the multiples above zero: 1 to 255.
        bucket: Consecutive elements that share a norm. The last bucket may have fewer.
        norm: "l2", the Euclidean norm; or "max", the largest magnitude, which adds less noise and sends more elements.

    Raises:
        ValueError: `levels` outside 1 to 255, `bucket` outside 1 to 2^32 − 1, or an unknown norm.
    """

    levels: int = 15
    bucket: int = 512
    norm: Norm = "l2"

    _norms: ClassVar[dict[str, float]] = {"l2": 2.0, "max": math.inf}

    def __post_init__(self) -> None:
        check_whole_number("levels", self.levels, 1, "multiples of the norm above zero", "Use 15.")
        if self.levels > 255:
            raise ValueError(f"levels must be at most 255, as they travel in one byte; got {self.levels}. Use 15.")
        check_whole_number("bucket", self.bucket, 1, "elements that share a norm", "Use 512.")
        if self.bucket > MAX_SIZE:
            raise ValueError(
                f"bucket must be at most {MAX_SIZE:,}, as it travels in 4 bytes; got {self.bucket:,}. Use 512."
            )
        check_one_of("norm", self.norm, self._norms, "Use 'l2', as in the paper.")

    def encode(self, x: Vector, context: Round) -> Tensor:
        values = x.values
        size = values.numel()
        norms, levels = self._rounded(values, context)
        indices = levels.nonzero().view(-1)
        distances = torch.diff(indices, prepend=indices.new_full((1,), -1))
        sent = write_elias(distances), write_elias(levels[indices].to(torch.int64))
        signs = packed(values[indices] < 0)
        lengths = [unary.numel() for unary, _ in sent]
        head = bytearray(_HEAD.pack(size, indices.numel(), self.bucket, *lengths, self.levels))
        sections = [section for each in sent for section in each]
        start = torch.frombuffer(head, dtype=torch.uint8).to(values.device)
        return torch.cat([start, norms.view(torch.uint8), *sections, signs])

    def decode(self, payload: Tensor, size: int) -> SparseVector:
        if payload.numel() < _HEAD.size:
            raise PayloadError(f"levels: ends at byte {payload.numel()}, expected a head of {_HEAD.size} bytes.")
        head = _HEAD.unpack(payload[: _HEAD.size].cpu().numpy().tobytes())
        sent_size, count, bucket, distance_bytes, level_bytes, most = head
        if sent_size != size:
            raise _wrong("size", 0, sent_size, f"{size}: the ranks train different parameters")
        if count > size:
            raise _wrong("count", 4, count, f"at most the size, {size}")
        if not bucket:
            raise _wrong("bucket", 8, bucket, "at least 1")
        if not most:
            raise _wrong("levels", 20, most, "at least 1")
        sections = _Sections(payload)
        # The copy is aligned, wherever the bytes lie in what was received.
        norms = sections.next(4 * -(-size // bucket), "norms").clone().view(torch.float32)
        if bool((norms.signbit() | ~norms.isfinite()).any()):
            raise PayloadError("levels: a norm is not a finite number, or negative.")
        indices = torch.cumsum(sections.numbers(count, distance_bytes, 32, "distances"), 0).sub_(1)
        if count and int(indices[-1]) >= size:
            raise PayloadError(f"levels: distances reach element {int(indices[-1])}, expected less than {size}.")
        levels = sections.numbers(count, level_bytes, 8, "levels")
        if count and int(levels.max()) > most:
            raise PayloadError(f"levels: a level is {int(levels.max())}, expected at most {most}.")
        negative = unpacked(sections.next((count + 7) // 8, "signs"), count, "signs")
        if sections.at != payload.numel():
            raise PayloadError(f"levels: has {payload.numel()} bytes, expected {sections.at}.")
        # Divided first, so that no product is above the norm.
        values = (levels.to(torch.float32) / most).mul_(norms[indices // bucket])
        return SparseVector(indices, torch.where(negative, -values, values), size)

    def _rounded(self, values: Tensor, context: Round) -> tuple[Tensor, Tensor]:
        """The norms, `[buckets]` float32, and each element's level, `[n]` in the dtype of `values`."""
        size = values.numel()
        # A bucket may be longer than the vector.
        width = max(1, min(self.bucket, size))
        parts = torch.nn.functional.pad(values.abs(), (0, -size % width)).view(-1, width)
        largest = parts.amax(1, keepdim=True)
        # Relative to the largest, so that no square is too large or too small.
        parts.div_(torch.where(largest > 0, largest, 1))
        order = self._norms[self.norm]
        norms = torch.linalg.vector_norm(parts, order, 1, keepdim=True, dtype=torch.float64) * largest
        norms = norms.clamp_(max=_LARGEST).to(torch.float32)
        source = context.rank_generator(values.device)
        draws = torch.rand(size, generator=source, dtype=torch.float32, device=values.device)
        # Where a norm is zero, or rounded to it, so is its bucket.
        parts.mul_(largest / torch.where(norms > 0, norms, torch.inf).to(values.dtype) * self.levels)
        levels = parts.view(-1)[:size].add_(draws).floor_().clamp_(max=self.levels)
        return norms.view(-1), levels


class _Sections:
    """Reads the sections that follow the head of a payload, one after the other.

    Attributes:
        at: The byte where the next one begins.
    """

    def __init__(self, payload: Tensor) -> None:
        self._payload = payload
        self.at = _HEAD.size

    def next(self, length: int, name: str) -> Tensor:
        """The next section, of so many bytes. Raises `PayloadError` if fewer follow."""
        follow = self._payload.numel() - self.at
        if length > follow:
            raise _wrong(name, self.at, f"{length} bytes long", f"at most the {follow} bytes that follow")
        self.at += length
        return self._payload[self.at - length : self.at]

    def numbers(self, count: int, unary_bytes: int, digits: int, name: str) -> Tensor:
        """`[count]` int64 in the next two sections. Raises `PayloadError`, also for more digits than expected."""
        lengths_name, digits_name = f"lengths of {name}", f"digits of {name}"
        lengths = read_lengths(self.next(unary_bytes, lengths_name), count, digits, lengths_name)
        total = int(lengths.sum())
        return read_digits(unpacked(self.next((total + 7) // 8, digits_name), total, digits_name), lengths)


def _wrong(field: str, offset: int, value: object, expected: str) -> PayloadError:
    return PayloadError(f"levels: {field} at byte {offset} is {value}, expected {expected}.")
