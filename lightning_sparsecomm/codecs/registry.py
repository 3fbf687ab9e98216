"""The base classes of codecs, and the registries in which receivers find the one that a payload names."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, TypeVar

from torch import Tensor

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.codecs.payload import PayloadError

_FREE = "codes 128 to 255 are free for codecs of your own"


class Codec(ABC):
    """Encodes the positions or the values of selected elements. Frozen and pure.

    Receivers decode with another instance, made without arguments. So `decode` can depend only on its own arguments.
    One of them is a byte that the sender chooses, the `parameter`.

    Attributes:
        code: The byte that names the codec in a payload.
        parameters: The values that `parameter` can have: a range within 0 to 255.
    """

    code: ClassVar[int]
    parameters: ClassVar[range] = range(1)
    # Where a payload has the parameter, for messages.
    _parameter_field: ClassVar[str]

    def check_parameter(self, parameter: int) -> None:
        """Raises `PayloadError` for a parameter that `encode` never writes: one that is not in `parameters`."""
        if parameter not in self.parameters:
            first, last = self.parameters[0], self.parameters[-1]
            allowed = f"{first} to {last}" if last > first else first
            raise PayloadError(
                f"sparse body: {self._parameter_field} is {parameter}, expected {allowed} for {type(self).__name__}."
            )


class IndexCoding(ABC):
    """Chooses the index codec for given positions: always the same one, or the one that suits them. Frozen and pure."""

    @abstractmethod
    def codecs(self) -> Sequence["IndexCodec"]:
        """All codecs that `chosen` can return."""

    @abstractmethod
    def chosen(self, indices: Tensor, size: int) -> "IndexCodec":
        """The codec for these positions, which the payload names. Arguments as for `IndexCodec.encode`."""

    def encoded(self, indices: Tensor, size: int) -> tuple["IndexCodec", Tensor]:
        """The codec that `chosen` returns, and the section that its `encode` does. Override it to do both at once."""
        codec = self.chosen(indices, size)
        return codec, codec.encode(indices, size)

    @abstractmethod
    def bound_bytes(self, count: int, size: int) -> int | None:
        """The greatest length of a section for at most `count` of `size` positions; None if far above the usual."""


class IndexCodec(Codec, IndexCoding):
    """Encodes sorted positions exactly; see `Codec` and `register_index_codec`.

    >>> section = Raw32().encode(torch.tensor([2, 5]), size=8)
    >>> section.numel(), Raw32().decode(section, count=2, size=8, parameter=0)
    (8, tensor([2, 5]))
    """

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


class ValueCodec(Codec):
    """Encodes the values of the selected elements, exactly or rounded; see `Codec` and `register_value_codec`.

    >>> class Signs(ValueCodec):
    ...     # One byte for each value: its sign.
    ...     code: ClassVar[int] = 200
    ...     def encode(self, values: Tensor, indices: Tensor, layout: Layout) -> Tensor:
    ...         return values.sign().to(torch.int8).view(torch.uint8)
    ...     def decode(self, section: Tensor, count: int, parameter: int) -> Tensor:
    ...         self.check_parameter(parameter)
    ...         if section.numel() != count or bool((section.view(torch.int8).abs() > 1).any()):
    ...             raise PayloadError(f"signs: {section.numel()} bytes are not {count} signs.")
    ...         return section.view(torch.int8).to(torch.float32)
    ...     def bound_bytes(self, count: int, layout: Layout) -> int | None:
    ...         return count
    >>> section = Signs().encode(torch.tensor([0.5, -3.0]), torch.tensor([0, 4]), Layout([("weight", (8,))]))
    >>> Signs().decode(section, count=2, parameter=0)
    tensor([ 1., -1.])
    """

    _parameter_field: ClassVar[str] = "value codec parameter at byte 3"

    largest: ClassVar[float] = math.inf
    """The largest magnitude that it can send: larger values are clamped to it."""

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


INDEX_CODECS: dict[int, IndexCodec] = {}
"""The codec that decodes an index section, by its code in the payload. `register_index_codec` adds to it."""

VALUE_CODECS: dict[int, ValueCodec] = {}
"""The codec that decodes a value section, by its code in the payload. `register_value_codec` adds to it."""

IndexClass = TypeVar("IndexClass", bound=type[IndexCodec])
ValueClass = TypeVar("ValueClass", bound=type[ValueCodec])
AnyCodec = TypeVar("AnyCodec", bound=Codec)


def register_index_codec(codec_class: IndexClass) -> IndexClass:
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
    _register(codec_class, IndexCodec, INDEX_CODECS)
    return codec_class


def register_value_codec(codec_class: ValueClass) -> ValueClass:
    """Class decorator: lets receivers decode what a codec of this class encodes.

    What `register_index_codec` says about codes, and about classes defined again, holds here too. docs/extending.md
    builds an example.

    >>> from dataclasses import dataclass
    >>> @register_value_codec
    ... @dataclass(frozen=True)
    ... class Negative(Float32):
    ...     code: ClassVar[int] = 129
    ...     def encode(self, values: Tensor, indices: Tensor, layout: Layout) -> Tensor:
    ...         return super().encode(-values, indices, layout)
    ...     def decode(self, section: Tensor, count: int, parameter: int) -> Tensor:
    ...         return -super().decode(section, count, parameter)
    >>> VALUE_CODECS.pop(129)  # This example leaves nothing behind; yours would stay registered.
    Negative()

    Raises:
        TypeError: The class is not a subclass of `ValueCodec`, has no `code`, or cannot be made without arguments.
        ValueError: `code` is not from 1 to 255, or belongs to another class.
    """
    _register(codec_class, ValueCodec, VALUE_CODECS)
    return codec_class


def _register(codec_class: type[AnyCodec], base: type[Codec], codecs: dict[int, AnyCodec]) -> None:
    """Enters an instance of `codec_class` in `codecs`, kept in the order of codes; see `register_index_codec`."""
    if not (isinstance(codec_class, type) and issubclass(codec_class, base)):
        raise TypeError(
            f"codec_class must be a subclass of {base.__name__}; got {codec_class!r}. Decorate the class itself, and"
            " derive it from that."
        )
    name = _name(codec_class)
    free = min(set(range(128, 256)) - codecs.keys(), default=128)
    code = getattr(codec_class, "code", None)
    if code is None:
        raise TypeError(
            f"code must be a class attribute, the byte that names the codec in a payload; {name} has none."
            f" Add `code: ClassVar[int] = {free}`: {_FREE}."
        )
    if type(code) is not int or code not in range(1, 256):
        rule = "code must be a whole number from 1 to 255, as it travels in one byte"
        raise ValueError(f"{rule}; got {code!r} for {name}. Use {free}: {_FREE}.")
    # Notebook cells and reloaded modules define the same class again.
    if code in codecs and not is_same_class(codec_class, type(codecs[code])):
        rule, owner = "code must differ from the codes of all other codecs", _name(type(codecs[code]))
        raise ValueError(f"{rule}; got {code} for {name}, but it belongs to {owner}. Use {free}: {_FREE}.")
    try:
        codec = codec_class()
    except TypeError as error:
        raise TypeError(
            f"codec_class must be callable without arguments, as receivers decode with an instance made so; got {name}:"
            f" {error}. Implement its abstract methods, and give every parameter a default."
        ) from error
    codecs[code] = codec
    # In the order of codes, whatever the order of imports.
    for each in sorted(codecs):
        codecs[each] = codecs.pop(each)


def is_same_class(one: type[object], other: type[object]) -> bool:
    """Whether two classes have the same module and qualified name."""
    return _name(one) == _name(other)


def _name(cls: type[object]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
