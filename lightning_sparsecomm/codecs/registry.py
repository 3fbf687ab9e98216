"""The base class of codecs, and how receivers find the one that a payload names."""

from abc import ABC
from typing import ClassVar, TypeVar

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


AnyCodec = TypeVar("AnyCodec", bound=Codec)


def register(codec_class: type[AnyCodec], base: type[Codec], codecs: dict[int, AnyCodec]) -> None:
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
