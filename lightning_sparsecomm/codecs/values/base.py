"""What turns values into bytes and back."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from lightning_sparsecomm.codecs.payload import PayloadError
from lightning_sparsecomm.layout import Layout


class ValueCodec(ABC):
    """The selected elements' values to bytes and back, exactly or rounded. Frozen and pure.

    Attributes:
        code: The byte that names the codec in a payload.
        parameters: What the byte beside it may be.
    """

    code: ClassVar[int]
    parameters: ClassVar[range] = range(1)

    @property
    def parameter(self) -> int:
        """What `decode` must know of how `encode` writes: one of `parameters`."""
        return 0

    @abstractmethod
    def encode(self, values: Tensor, indices: Tensor, layout: Layout) -> Tensor:
        """The value section of a payload.

        Args:
            values: `[k]` float32 or float64, finite.
            indices: `[k]` int64, their positions, strictly increasing.
            layout: Tells which segment each position belongs to.

        Returns:
            `[bytes]` uint8 on the device of `values`.
        """

    @abstractmethod
    def decode(self, section: Tensor, count: int, parameter: int) -> Tensor:
        """The values in a value section.

        Args:
            section: `[bytes]` uint8, from any source.
            count: How many values it holds. Trusted to be affordable: one number may stand for any number of them.
            parameter: The sender's `parameter`, from any source.

        Returns:
            `[count]` float32 or float64, finite; memory of its own.

        Raises:
            PayloadError: The section is not what `encode` writes for any `count` values.
        """

    @abstractmethod
    def bound_bytes(self, count: int, layout: Layout) -> int | None:
        """The length that no section for at most `count` values exceeds; None where that is much above the usual."""

    def check_parameter(self, parameter: int) -> None:
        """Refuses a parameter that `encode` never writes.

        Raises:
            PayloadError: It is not one of `parameters`.
        """
        if parameter not in self.parameters:
            first, last = self.parameters[0], self.parameters[-1]
            raise PayloadError(
                f"sparse body: value codec parameter at byte 3 is {parameter}, expected"
                f" {f'{first} to {last}' if last > first else first} for {type(self).__name__}."
            )
