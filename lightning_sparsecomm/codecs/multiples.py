"""Values as whole multiples of one number."""

import struct
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparsecomm.basis.arguments import check_booleans
from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.codecs.bits import packed, unpacked
from lightning_sparsecomm.codecs.codec import ValueCodec
from lightning_sparsecomm.codecs.elias import read_digits, read_lengths, write_elias
from lightning_sparsecomm.codecs.payload import PayloadError, wrong_section
from lightning_sparsecomm.codecs.registry import register_value_codec
from lightning_sparsecomm.codecs.selectors.threshold import check_threshold

_HEAD = struct.Struct("<fI")
_NAME = "multiples"
_LARGEST = torch.finfo(torch.float32).max
# Larger numbers are not exact in float32.
_DIGITS = 23
_MOST = 2**24 - 1


@register_value_codec
@dataclass(frozen=True)
class Multiples(ValueCodec):
    """Rounds each value towards zero, to a whole multiple of `step`, but at least one: 1 bit and the multiple's.

    The bit is the sign. Multiples take the bits of Elias' gamma code, one for 1, three for 2 and 3; and none at all
    where all are 1. The section has 8 bytes besides. Multiples are at most 2^24 − 1, and decoded as float32. Meant for
    values of at least `step`, as `Threshold` selects them: smaller ones become `step` too. Biased; use it with error
    feedback.

    Source: Strom 2015, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, where all are 1.

    >>> codec, layout, at = Multiples(0.5), Layout([("weight", (8,))]), torch.tensor([0, 4])
    >>> codec.decode(codec.encode(torch.tensor([0.75, -1.6]), at, layout), count=2, parameter=0)
    tensor([ 0.5000, -1.5000])
    >>> codec = Multiples(0.5, once=True)
    >>> codec.decode(codec.encode(torch.tensor([0.75, -1.6]), at, layout), count=2, parameter=0)
    tensor([ 0.5000, -0.5000])

    Args:
        step: What values are multiples of; rounded to float32.
        once: Whether each value becomes `step` or its negative, however large it is, as in the paper.

    Raises:
        ValueError: `step` is not positive, or not finite, or float32 has no such number.
        TypeError: `once` is neither True nor False.
    """

    step: float = 0.01
    once: bool = False
    code: ClassVar[int] = 10
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_threshold("step", self.step)
        check_booleans(once=self.once)
        if not 0 < self._sent < float("inf"):
            raise ValueError(f"step must be within float32's range, in which it is sent; got {self.step!r}. Use 0.01.")

    @property
    def _sent(self) -> float:
        return float(torch.tensor(self.step, dtype=torch.float64).to(torch.float32))

    def encode(self, values: Tensor, indices: Tensor, layout: Layout) -> Tensor:
        step = self._sent
        unary = digits = torch.empty(0, dtype=torch.uint8, device=values.device)
        if not self.once:
            # No product is above float32's largest number.
            most = min(_MOST, int(_LARGEST / step))
            multiples = (values.abs().to(torch.float64) / step).floor_().clamp_(1, most).to(torch.int64)
            if values.numel() and int(multiples.max()) > 1:
                unary, digits = write_elias(multiples)
        head = torch.frombuffer(bytearray(_HEAD.pack(step, unary.numel())), dtype=torch.uint8)
        return torch.cat([head.to(values.device), unary, digits, packed(values < 0)])

    def decode(self, section: Tensor, count: int, parameter: int) -> Tensor:
        self.check_parameter(parameter)
        sign_bytes = (count + 7) // 8
        if section.numel() < _HEAD.size + sign_bytes:
            raise _wrong(f"has {section.numel()} bytes", f"at least {_HEAD.size + sign_bytes} for {count} values")
        step, unary_bytes = _HEAD.unpack(section[: _HEAD.size].cpu().numpy().tobytes())
        # Written so that NaN fails.
        if not 0 < step < float("inf"):
            raise _wrong(f"step at byte 0 is {step}", "a positive, finite number")
        body, signs = section[_HEAD.size : section.numel() - sign_bytes], section[section.numel() - sign_bytes :]
        if unary_bytes > body.numel():
            raise _wrong(f"length at byte 4 is {unary_bytes}", f"at most {body.numel()}")
        magnitudes = torch.full((1,), step, dtype=torch.float32, device=section.device)
        if unary_bytes:
            magnitudes = _read(body[:unary_bytes], body[unary_bytes:], count).to(torch.float32) * magnitudes
            if not bool(magnitudes.isfinite().all()):
                raise _wrong(f"a multiple of {step} is not finite", "finite numbers")
        elif body.numel():
            raise _wrong(f"has {section.numel()} bytes", f"{_HEAD.size + sign_bytes} for {count} values")
        return torch.where(unpacked(signs, count, "signs"), -magnitudes, magnitudes)

    def bound_bytes(self, count: int, layout: Layout) -> int | None:
        # The bound, 47 bits for each multiple, is far above the usual length.
        return _HEAD.size + (count + 7) // 8 if self.once or not count else None


def _read(unary: Tensor, digits: Tensor, count: int) -> Tensor:
    """`[count]` int64, of which one at least is above 1. Raises `PayloadError`."""
    lengths = read_lengths(unary, count, _DIGITS, f"lengths of {_NAME}")
    total = int(lengths.sum())
    if not total:
        raise _wrong("all multiples are 1", "none to be written then")
    if digits.numel() != (total + 7) // 8:
        raise _wrong(f"has {digits.numel()} bytes of digits", (total + 7) // 8)
    return read_digits(unpacked(digits, total, f"digits of {_NAME}"), lengths)


def _wrong(found: str, expected: object) -> PayloadError:
    return wrong_section(_NAME, found, expected)
