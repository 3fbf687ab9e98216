"""The registries in which receivers find the codec that a payload names."""

from typing import TypeVar

from lightning_sparsecomm.codecs.codec import Codec, IndexCodec, ValueCodec

_FREE = "codes 128 to 255 are free for codecs of your own"

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
