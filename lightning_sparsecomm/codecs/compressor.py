"""From a vector to one self-contained payload and back."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from lightning_sparsecomm.compensation import Wanted
from lightning_sparsecomm.layout import SparseVector
from lightning_sparsecomm.rounds import Round


class Compressor(ABC):
    """Turns a vector into bytes that decode without any other knowledge than its length. Pure: keeps nothing between
    calls."""

    def wanted(self, round: Round) -> Sequence[Wanted]:
        """What `encode` will select by magnitude, in order, if it does; candidates for it may be given."""
        return ()

    @abstractmethod
    def encode(self, x: Tensor, round: Round, candidates: Sequence[Tensor | None] = ()) -> Tensor:
        """The payload for `x`.

        Args:
            x: `[n]` floating point, finite. Not changed.
            round: Gives layout, step and seeds.
            candidates: For each of `wanted`, sorted positions that hold what is wanted; None, or none at all, where
                they are not known. They change nothing but the time it takes.

        Returns:
            `[bytes]` uint8 on the device of `x`; at most 32, and 16 more for each element of `x`.
        """

    @abstractmethod
    def decode(self, payload: Tensor, size: int) -> SparseVector | Tensor:
        """What receivers make of a payload; `encode`'s caller must decode its own payload too, to know what was sent.

        Args:
            payload: `[bytes]` uint8, from any source: it is checked before anything is allocated from it.
            size: How long the vector must be.

        Returns:
            A sparse or a dense vector of `size` elements, float32 or wider, on the payload's device.

        Raises:
            PayloadError: The bytes are not a payload of this compressor, or one of a vector of another length.
        """

    def bound_bytes(self, round: Round) -> int | None:
        """The length that no payload of this round exceeds, equal on all ranks; None where it is not known
        or much above the usual length (then the ranks exchange lengths first)."""
        return None
