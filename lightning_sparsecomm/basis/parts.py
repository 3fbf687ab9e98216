"""Methods are compositions of parts: what they have in common, and how to find one."""

import inspect
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


class Part:
    """Base of everything that a method is composed of. Its attributes may be parts, or lists of them.

    Ranks compare their methods by `repr`: it must tell whatever ranks need to have in common.
    """

    def __repr__(self) -> str:
        """The class, with those arguments of its constructor that are kept as attributes of the same names."""
        names = [name for name in inspect.signature(type(self)).parameters if hasattr(self, name)]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


def parts_in(part: object, kind: type[T]) -> Iterator[T]:
    """All objects of one kind in a part or in lists of parts, however deep."""
    if isinstance(part, kind):
        yield part
    elif isinstance(part, (list, tuple)):
        for item in part:
            yield from parts_in(item, kind)
    elif isinstance(part, Part):
        for item in vars(part).values():
            yield from parts_in(item, kind)
