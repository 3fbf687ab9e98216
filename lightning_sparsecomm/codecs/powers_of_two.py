"""Elements rounded at random to powers of two: a sign and an exponent."""

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparsecomm.basis.layout import Vector
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.codecs.bits import packed, unpacked
from lightning_sparsecomm.codecs.compressor import Compressor
from lightning_sparsecomm.codecs.payload import PayloadError

_HEAD = struct.Struct("<I")
_MANTISSA = 23
_EXPONENTS = 255
_LARGEST = 2.0**127


@dataclass(frozen=True)
class PowersOfTwo(Compressor):
    """Rounds each element at random to one of the two nearest powers of two: 9 bits for each. Unbiased.

    x between 2^a and 2^(a + 1) becomes sign(x) · 2^(a + 1) with probability |x| / 2^a − 1, else sign(x) · 2^a. Below
    2^-126, float32's smallest normal number, the two are 0 and that. Draws are new in each round and on each rank, and
    have 23 bits, as float32's mantissa: so the mean of what is sent is exactly x, rounded to float32. Above 2^127, the
    largest power that float32 has, that is sent.

    Adds at most 1/8 of the sum of squares.

    Source: Horváth et al. 2019, Natural Compression for Distributed Deep Learning.

    >>> compressor, context = PowersOfTwo(), Round(Layout([("weight", (3,))]))
    >>> compressor.decode(compressor.encode(Vector(torch.tensor([0.0, 0.5, -4.0])), context), size=3)
    tensor([ 0.0000,  0.5000, -4.0000])
    """

    @property
    def largest(self) -> float:
        return _LARGEST

    def encode(self, x: Vector, context: Round) -> Tensor:
        # The negative of the least int32 does not exist, so elements are limited before their bits are read.
        values = x.values.clamp(-_LARGEST, _LARGEST).to(torch.float32)
        device, generator = values.device, context.rank_generator(values.device)
        draws = torch.randint(1 << _MANTISSA, values.shape, generator=generator, dtype=torch.int32, device=device)
        # Added to the mantissa, they carry into the exponent as often as it says.
        exponents = values.abs().view(torch.int32).add_(draws).bitwise_right_shift_(_MANTISSA)
        head = torch.frombuffer(bytearray(_HEAD.pack(values.numel())), dtype=torch.uint8).to(device)
        return torch.cat([head, exponents.to(torch.uint8), packed(values < 0)])

    def decode(self, payload: Tensor, size: int) -> Tensor:
        length = self._bytes(size)
        if payload.numel() != length:
            raise PayloadError(f"powers of two: has {payload.numel()} bytes, expected {length} for {size} elements.")
        (sent_size,) = _HEAD.unpack(payload[: _HEAD.size].cpu().numpy().tobytes())
        if sent_size != size:
            raise PayloadError(
                f"powers of two: size at byte 0 is {sent_size}, expected {size}: the ranks train different parameters."
            )
        exponents = payload[_HEAD.size : _HEAD.size + size]
        if bool((exponents == _EXPONENTS).any()):
            raise PayloadError(f"powers of two: an exponent is {_EXPONENTS}, expected at most {_EXPONENTS - 1}.")
        negative = unpacked(payload[_HEAD.size + size :], size, "signs")
        magnitudes = (exponents.to(torch.int32) << _MANTISSA).view(torch.float32)
        return torch.where(negative, -magnitudes, magnitudes)

    def bound_bytes(self, context: Round) -> int | None:
        return self._bytes(context.layout.size)

    def _bytes(self, size: int) -> int:
        return _HEAD.size + size + (size + 7) // 8
