"""The base classes of index codecs and of their choice, and the codecs' registry."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from lightning_sparsecomm.codecs.payload import PayloadError, wrong_section
from lightning_sparsecomm.codecs.registry import Codec, register


class IndexCoding(ABC):
    """Chooses the index codec for given positions: always the same one, or the one that suits them. Frozen and pure."""

    @abstractmethod
    def codecs(self) -> Sequence["IndexCodec"]:
        """All codecs that `chosen` can return."""

    @abstractmethod
    def chosen(self, indices: Tensor, size: int) -> "IndexCodec":
        """The codec for these positions, which the payload names. Arguments as for `IndexCodec.encode`."""

    @abstractmethod
    def bound_bytes(self, count: int, size: int) -> int | None:
        """The greatest length of a section for at most `count` of `size` positions; None if far above the usual."""


class IndexCodec(Codec, IndexCoding):
    """Encodes sorted positions exactly; see `Codec` and `register_index_codec`."""

    _parameter_field: ClassVar[str] = "index codec parameter at byte 2"

    def codecs(self) -> Sequence["IndexCodec"]:
        return (self,)

    def chosen(self, indices: Tensor, size: int) -> "IndexCodec":
        return self

    def parameter(self, count: int, size: int) -> int:
        """The byte that tells `decode` how `encode` writes `count` of `size` positions: one of `parameters`."""
        return 0

    @abstractmethod
    def section_bytes(self, indices: Tensor, size: int) -> int:
        """The length of the section that `encode` returns, computed without writing it."""

    @abstractmethod
    def encode(self, indices: Tensor, size: int) -> Tensor:
        """The index section of a payload.

        Args:
            indices: `[k]` int64, strictly increasing, each in `[0, size)`. Not changed.
            size: Length of the vector that they point into.

        Returns:
            `[bytes]` uint8 on the device of `indices`.
        """

    @abstractmethod
    def decode(self, section: Tensor, count: int, size: int, parameter: int) -> Tensor:
        """The positions in an index section.

        Args:
            section: `[bytes]` uint8, from any source.
            count: How many positions it holds, at most `size`. A full selection has no bytes, so the caller makes sure
                that there is memory for so many.
            size: Length of the vector that they point into.
            parameter: The sender's `parameter`, from any source; see `check_parameter`.

        Returns:
            `[count]` int64, strictly increasing, each in `[0, size)`. Shares no memory with the section.

        Raises:
            PayloadError: `encode` writes such a section for no `count` of `size` positions.
        """


INDEX_CODECS: dict[int, IndexCodec] = {}
"""The codec that decodes an index section, by its code in the payload. `register_index_codec` adds to it."""

_Class = TypeVar("_Class", bound=type[IndexCodec])


def register_index_codec(codec_class: _Class) -> _Class:
    """Class decorator: lets receivers decode what a codec of this class encodes.

    A payload names its index codec by one byte. Codes 128 to 255 are free for codecs of your own; lower ones are this
    package's, now or later. Every rank must register the same codecs. A class defined again under the same name, as in
    notebooks and reloaded modules, replaces the earlier one.

    >>> from dataclasses import dataclass
    >>> from lightning_sparsecomm.codecs import Raw32
    >>> @register_index_codec
    ... @dataclass(frozen=True)
    ... class FromTheEnd(Raw32):
    ...     code: ClassVar[int] = 128
    ...     def encode(self, indices: Tensor, size: int) -> Tensor:
    ...         return super().encode((size - 1 - indices).flip(0), size)
    ...     def decode(self, section: Tensor, count: int, size: int, parameter: int) -> Tensor:
    ...         return (size - 1 - super().decode(section, count, size, parameter)).flip(0)
    >>> INDEX_CODECS.pop(128)  # This example leaves nothing behind; yours would stay registered.
    FromTheEnd()

    Raises:
        TypeError: The class is not a subclass of `IndexCodec`, has no `code`, or cannot be made without arguments.
        ValueError: `code` is not from 1 to 255, or belongs to another class.
    """
    register(codec_class, IndexCodec, INDEX_CODECS)
    return codec_class


class PartialCodec(IndexCodec):
    """An index codec that writes a part of all positions, and no bytes for a full selection."""

    name: ClassVar[str]

    @abstractmethod
    def part_bytes(self, indices: Tensor, size: int) -> int:
        """`section_bytes`, if not all positions are selected."""

    @abstractmethod
    def write_part(self, indices: Tensor, size: int) -> Tensor:
        """`encode`, if not all positions are selected."""

    @abstractmethod
    def read_part(self, section: Tensor, count: int, size: int, parameter: int) -> Tensor:
        """`decode`, if not all positions are selected; `parameter` has been checked."""

    def section_bytes(self, indices: Tensor, size: int) -> int:
        return self.part_bytes(indices, size) if indices.numel() < size else 0

    def encode(self, indices: Tensor, size: int) -> Tensor:
        return self.write_part(indices, size) if indices.numel() < size else indices.new_empty(0, dtype=torch.uint8)

    def decode(self, section: Tensor, count: int, size: int, parameter: int) -> Tensor:
        self.check_parameter(parameter)
        if count < size:
            return self.read_part(section, count, size, parameter)
        self.check_length(section, 0, f"{size} of {size} positions")
        return torch.arange(size, device=section.device)

    def check_length(self, section: Tensor, expected: int, content: str) -> None:
        if section.numel() != expected:
            raise self.wrong(f"has {section.numel()} bytes", f"{expected} for {content}")

    def wrong(self, found: str, expected: str) -> PayloadError:
        return wrong_section(f"{self.name} index", found, expected)
