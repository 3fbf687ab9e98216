"""What turns positions into bytes and back, and what chooses it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparsecomm.codecs.payload import PayloadError


class IndexCoding(ABC):
    """How positions are written: in one codec, or in the one that suits them. Frozen and pure."""

    @abstractmethod
    def codecs(self) -> Sequence["IndexCodec"]:
        """All that may be chosen."""

    @abstractmethod
    def chosen(self, indices: Tensor, size: int) -> "IndexCodec":
        """The codec for these very positions, of which the payload then holds the code; arguments as for `encode`."""

    @abstractmethod
    def bound_bytes(self, count: int, size: int) -> int | None:
        """The length that no section for at most `count` positions exceeds; None where that is much above the usual."""


class IndexCodec(IndexCoding):
    """Sorted positions to bytes and back, exactly. Frozen and pure.

    Attributes:
        code: The byte that names the codec in a payload.
        parameters: What the byte beside it may be.
    """

    code: ClassVar[int]
    parameters: ClassVar[range] = range(1)

    def codecs(self) -> Sequence["IndexCodec"]:
        return (self,)

    def chosen(self, indices: Tensor, size: int) -> "IndexCodec":
        return self

    def parameter(self, count: int, size: int) -> int:
        """What `decode` must know of how `encode` writes `count` of `size` positions: one of `parameters`."""
        return 0

    @abstractmethod
    def section_bytes(self, indices: Tensor, size: int) -> int:
        """The length of what `encode` writes; quicker than writing it."""

    @abstractmethod
    def encode(self, indices: Tensor, size: int) -> Tensor:
        """The index section of a payload.

        Args:
            indices: `[k]` int64, strictly increasing, each in `[0, size)`.
            size: Length of the vector that they point into.

        Returns:
            `[bytes]` uint8 on the device of `indices`.
        """

    @abstractmethod
    def decode(self, section: Tensor, count: int, size: int, parameter: int) -> Tensor:
        """The positions in an index section.

        Args:
            section: `[bytes]` uint8, from any source.
            count: How many positions it holds, at most `size`. Trusted to be affordable: a full selection of `count`
                positions comes from no bytes at all.
            size: Length of the vector that they point into.
            parameter: The sender's `parameter`, from any source.

        Returns:
            `[count]` int64, strictly increasing, each in `[0, size)`; memory of its own.

        Raises:
            PayloadError: The section is not what `encode` writes for any such positions.
        """

    def check_parameter(self, parameter: int) -> None:
        """Refuses a parameter that `encode` never writes.

        Raises:
            PayloadError: It is not one of `parameters`.
        """
        if parameter not in self.parameters:
            last = self.parameters[-1]
            raise PayloadError(
                f"sparse body: index codec parameter at byte 2 is {parameter}, expected"
                f" {f'0 to {last}' if last else 0} for {type(self).__name__}."
            )


def everything(name: str, section: Tensor, size: int) -> Tensor:
    """All positions, which any codec writes as no bytes.

    Raises:
        PayloadError: There are bytes.
    """
    if section.numel():
        raise PayloadError(
            f"{name} index section: has {section.numel()} bytes, expected 0 for {size} of {size} positions."
        )
    return torch.arange(size, device=section.device)
