"""The base class of value codecs, and their registry."""

from abc import abstractmethod
from typing import ClassVar, TypeVar

from torch import Tensor

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.codecs.registry import Codec, register


class ValueCodec(Codec):
    """Encodes the values of the selected elements, exactly or rounded; see `Codec` and `register_value_codec`."""

    _parameter_field: ClassVar[str] = "value codec parameter at byte 3"

    @property
    def parameter(self) -> int:
        """The byte that tells `decode` how `encode` was configured: one of `parameters`."""
        return 0

    @abstractmethod
    def encode(self, values: Tensor, indices: Tensor, layout: Layout) -> Tensor:
        """The value section of a payload.

        Args:
            values: `[k]` float32 or float64, finite. Not changed.
            indices: `[k]` int64, strictly increasing: the values' positions.
            layout: Tells which segment each position belongs to.

        Returns:
            `[bytes]` uint8 on the device of `values`.
        """

    @abstractmethod
    def decode(self, section: Tensor, count: int, parameter: int) -> Tensor:
        """The values in a value section.

        Args:
            section: `[bytes]` uint8, from any source. It begins where it can be viewed in any dtype.
            count: How many values it holds. One number can stand for all of them, so the caller makes sure that there
                is memory for so many.
            parameter: The sender's `parameter`, from any source; see `check_parameter`.

        Returns:
            `[count]` float32 or float64, finite. Shares no memory with the section.

        Raises:
            PayloadError: `encode` writes such a section for no `count` values.
        """

    @abstractmethod
    def bound_bytes(self, count: int, layout: Layout) -> int | None:
        """The greatest length of a section for at most `count` values; None if that is far above the usual length."""


VALUE_CODECS: dict[int, ValueCodec] = {}
"""The codec that decodes a value section, by its code in the payload. `register_value_codec` adds to it."""

_Class = TypeVar("_Class", bound=type[ValueCodec])


def register_value_codec(codec_class: _Class) -> _Class:
    """Class decorator: lets receivers decode what a codec of this class encodes.

    What `register_index_codec` says about codes, and about classes defined again, holds here too.

    >>> from dataclasses import dataclass
    >>> from lightning_sparsecomm.codecs import Float32
    >>> @register_value_codec
    ... @dataclass(frozen=True)
    ... class Halved(Float32):
    ...     code: ClassVar[int] = 128
    ...     def encode(self, values: Tensor, indices: Tensor, layout: Layout) -> Tensor:
    ...         return super().encode(values / 2, indices, layout)
    ...     def decode(self, section: Tensor, count: int, parameter: int) -> Tensor:
    ...         return super().decode(section, count, parameter) * 2
    >>> VALUE_CODECS.pop(128)  # This example leaves nothing behind; yours would stay registered.
    Halved()

    Raises:
        TypeError: The class is not a subclass of `ValueCodec`, has no `code`, or cannot be made without arguments.
        ValueError: `code` is not from 1 to 255, or belongs to another class.
    """
    register(codec_class, ValueCodec, VALUE_CODECS)
    return codec_class
