"""From a vector to one self-contained payload and back."""

from abc import ABC, abstractmethod

from torch import Tensor

from lightning_sparsecomm.layout import SparseVector
from lightning_sparsecomm.rounds import Round


class Compressor(ABC):
    """Turns a vector into bytes that decode without any other knowledge. Pure: keeps nothing between calls."""

    @abstractmethod
    def encode(self, x: Tensor, round: Round) -> Tensor:
        """The payload for `x`.

        Args:
            x: `[n]` floating point, finite. Not changed.
            round: Gives layout, step and seeds.

        Returns:
            `[bytes]` uint8 on the device of `x`.
        """

    @abstractmethod
    def decode(self, payload: Tensor) -> SparseVector | Tensor:
        """What receivers make of a payload; `encode`'s caller must decode its own payload too, to know what was sent.

        Args:
            payload: `[bytes]` uint8, from any source: it is checked before anything is allocated from it.

        Returns:
            A sparse or a dense vector, float32 or wider, on the payload's device.

        Raises:
            PayloadError: The bytes are not a payload of this compressor.
        """

    def bound_bytes(self, round: Round) -> int | None:
        """The length that no payload of this round exceeds, equal on all ranks; None where it is not known
        or much above the usual length (then the ranks exchange lengths first)."""
        return None
