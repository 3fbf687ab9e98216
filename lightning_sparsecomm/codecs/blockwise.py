"""Dense vectors in a few bits for each element, and a scale or two for each block of them. See docs/formats.md."""

import math
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.codecs.grouped import TwoBit
from lightning_sparsecomm.codecs.payload import PayloadError

Bits = Literal[8, 4, 2]

_SCALE_BYTES = 4


class DenseCodec(Protocol):
    """Writes a vector of a known number of elements as bytes.

    Attributes:
        block: Elements that share a scale, or two magnitudes.
    """

    @property
    def block(self) -> int: ...

    @property
    def largest(self) -> float:
        """The largest magnitude that it can send: larger ones are clamped to it."""

    def size_bytes(self, count: int) -> int:
        """The bytes of a vector of `count` elements."""

    def encode(self, values: Tensor) -> Tensor:
        """`[bytes]` uint8 on the device of `values`, which are `[n]`, finite, float32 or wider."""

    def decode(self, data: Tensor, count: int) -> Tensor:
        """The `[count]` float32 in what `encode` wrote; a `PayloadError` where that cannot be."""


def dense_codec(bits: Bits, block: int | None = None) -> "DenseCodec":
    """The codec with so many bits: `Blockwise`, or `TwoBitBlocks`.

    >>> dense_codec(4), dense_codec(2, block=64)
    (Blockwise(bits=4, block=256), TwoBitBlocks(block=64))

    Args:
        bits: 8, 4 or 2.
        block: Elements that share a scale; None for 256, or 128 with 2 bits.

    Raises:
        ValueError: `bits` is none of these, or `block` is below 1 (or above 255, with 2 bits).
    """
    if isinstance(bits, bool) or bits not in get_args(Bits):
        raise ValueError(f"bits must be 8, 4 or 2, for each element on the wire; got {bits!r}. Use 8.")
    if bits == 2:
        return TwoBitBlocks() if block is None else TwoBitBlocks(block)
    return Blockwise(bits) if block is None else Blockwise(bits, block)


@dataclass(frozen=True)
class Blockwise:
    """Writes each element as a multiple of its block's scale: the block's largest magnitude by 127, or by 7.

    A vector of n elements takes n bytes (half as many with 4 bits), and 4 for each block. Rounds to the nearest
    multiple: an element is off by at most half a scale, 1/254 or 1/14 of the block's largest magnitude.

    >>> codec = Blockwise(4, block=3)
    >>> codec.decode(codec.encode(torch.tensor([7.0, -3.2, 0.4, 0.07])), 4)
    tensor([ 7.0000, -3.0000,  0.0000,  0.0700])

    Args:
        bits: 8 or 4.
        block: Elements that share a scale. The last block may have fewer.

    Raises:
        ValueError: `bits` is neither 8 nor 4, or `block` is below 1.
    """

    bits: Literal[8, 4] = 8
    block: int = 256

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or self.bits not in (8, 4):
            raise ValueError(f"bits must be 8 or 4, for each element on the wire; got {self.bits!r}. Use 8.")
        if not isinstance(self.block, int) or isinstance(self.block, bool) or self.block < 1:
            raise ValueError(
                f"block must be a whole number, at least 1: elements that share a scale; got {self.block!r}. Use 256."
            )

    @property
    def largest(self) -> float:
        """No magnitude is clamped."""
        return math.inf

    @property
    def most(self) -> int:
        """The largest multiple."""
        return int(2 ** (self.bits - 1) - 1)

    def size_bytes(self, count: int) -> int:
        """The bytes of a vector of `count` elements."""
        return _SCALE_BYTES * self._blocks(count) + -(-count * self.bits // 8)

    def encode(self, values: Tensor) -> Tensor:
        """`[bytes]` uint8 on the device of `values`, which are `[n]`, finite, float32 or wider. See docs/formats.md."""
        count = values.numel()
        blocks = self._blocks_of(values)
        scales = blocks.abs().amax(1, keepdim=True).div_(self.most).clamp_(max=self._largest_scale).to(torch.float32)
        # Where a scale is rounded to zero, so is its block.
        divisors = torch.where(scales > 0, scales, torch.inf).to(values.dtype)
        multiples = (blocks / divisors).round_().clamp_(-self.most, self.most).to(torch.int8).view(-1)[:count]
        if self.bits == 4:
            nibbles = torch.nn.functional.pad(multiples, (0, count % 2)).view(torch.uint8).view(-1, 2) & 15
            codes = nibbles[:, 0] | nibbles[:, 1] << 4
        else:
            codes = multiples.view(torch.uint8)
        return torch.cat([scales.view(-1).view(torch.uint8), codes])

    def decode(self, data: Tensor, count: int) -> Tensor:
        """The `[count]` float32 in what `encode` wrote.

        Args:
            data: `[bytes]` uint8, from any source.
            count: How many elements are expected.

        Raises:
            PayloadError: The bytes are not those of so many elements.
        """
        if data.numel() != self.size_bytes(count):
            raise PayloadError(
                f"quantized vector: has {data.numel()} bytes, expected {self.size_bytes(count)} for {count} elements."
            )
        # The copy is aligned, wherever the bytes lie in what was received.
        head = data[: _SCALE_BYTES * self._blocks(count)].clone().view(torch.float32)
        codes = data[head.nbytes :]
        if bool(((head < 0) | ~(head <= self._largest_scale)).any()):
            raise PayloadError(f"quantized vector: a scale is not from 0 to {self._largest_scale:.4g}.")
        if self.bits == 4:
            # From 4 bits to 8, with the sign.
            both = torch.stack([codes << 4, codes & 0xF0], 1).view(-1).view(torch.int8) >> 4
            multiples, rest = both[:count], both[count:]
            if bool(rest.any()):
                raise PayloadError("quantized vector: the last 4 bits are not 0, as they are no element's.")
        else:
            multiples = codes.view(torch.int8)
        if bool((multiples < -self.most).any()):
            raise PayloadError(f"quantized vector: a multiple is below -{self.most}.")
        return (self._blocks_of(multiples) * head[:, None]).view(-1)[:count]

    @property
    def _largest_scale(self) -> float:
        # A little less than float32's largest number allows, so that no multiple is rounded to infinity.
        return torch.finfo(torch.float32).max / self.most * (1 - 1e-6)

    def _blocks_of(self, values: Tensor) -> Tensor:
        """`[blocks, block]`, the last one padded with zeros."""
        blocks = self._blocks(values.numel())
        return torch.nn.functional.pad(values, (0, blocks * self.block - values.numel())).view(blocks, self.block)

    def _blocks(self, count: int) -> int:
        return -(-count // self.block)


@dataclass(frozen=True)
class TwoBitBlocks:
    """Writes each element as its sign and one of its block's two magnitudes, as `TwoBit` does of the values it gets.

    A vector of n elements takes n/4 bytes, and 4 for each block. What is written is never farther from the vector than
    zero is, so that error feedback converges; of normal values, it loses 12% of the sum of squares.

    >>> codec = TwoBitBlocks(block=4)
    >>> codec.decode(codec.encode(torch.tensor([1.0, -2.0, 8.0, -8.0])), 4)
    tensor([ 1.5000, -1.5000,  8.0000, -8.0000])

    Args:
        block: Elements that share two magnitudes, at most 255. The last block may have fewer.

    Raises:
        ValueError: `block` is not a whole number from 1 to 255.
    """

    block: int = 128

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block not in TwoBit.parameters:
            raise ValueError(
                f"block must be a whole number from 1 to 255 with 2 bits: elements that share two magnitudes; got"
                f" {self.block!r}. Use 128."
            )

    @property
    def largest(self) -> float:
        """The largest magnitude that it can send: larger ones are clamped to it."""
        return TwoBit.largest

    def size_bytes(self, count: int) -> int:
        """The bytes of a vector of `count` elements."""
        return TwoBit.head_bytes * -(-count // self.block) + -(-count * TwoBit.bits // 8)

    def encode(self, values: Tensor) -> Tensor:
        """`[bytes]` uint8 on the device of `values`, which are `[n]`, finite, float32 or wider. See docs/formats.md."""
        return TwoBit(self.block).encode(values, values, _ANY_LAYOUT)

    def decode(self, data: Tensor, count: int) -> Tensor:
        """The `[count]` float32 in what `encode` wrote.

        Raises:
            PayloadError: The bytes are not those of so many elements.
        """
        return TwoBit(self.block).decode(data, count, self.block)


# Values are written without their positions, and so without a layout.
_ANY_LAYOUT = Layout([])
