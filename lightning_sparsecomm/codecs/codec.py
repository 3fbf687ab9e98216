"""The base classes of codecs, and of what chooses between them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.codecs.payload import PayloadError


class Codec(ABC):
    """Encodes the positions or the values of selected elements. Frozen and pure.

    Receivers decode with another instance, made without arguments. So `decode` can depend only on its own arguments.
    One of them is a byte that the sender chooses, the `parameter`.

    Attributes:
        code: The byte that names the codec in a payload.
        parameters: The values that `parameter` can have: a range within 0 to 255.
        reads_on_gpus: Whether `decode` is meant for GPUs too: without loops over elements, and tried out there; not in
            a subclass that needs the CPU.
    """

    code: ClassVar[int]
    parameters: ClassVar[range] = range(1)
    reads_on_gpus: ClassVar[bool] = False
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


class ValueCoding(ABC):
    """Chooses the value codec for a round: always the same one, or the one that suits a density. Frozen and pure."""

    @abstractmethod
    def codecs(self) -> Sequence["ValueCodec"]:
        """All codecs that `chosen` can return."""

    @abstractmethod
    def chosen(self, count: int, size: int) -> "ValueCodec":
        """The codec for at most `count` values out of `size` elements, which the payload names."""


class ValueCodec(Codec, ValueCoding):
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

    elementwise: ClassVar[bool] = False
    """Whether each value is rounded by itself, to the same whatever values are encoded with it."""

    def codecs(self) -> Sequence["ValueCodec"]:
        return (self,)

    def chosen(self, count: int, size: int) -> "ValueCodec":
        return self

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
