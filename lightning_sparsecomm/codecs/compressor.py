"""From a vector to one self-contained payload, and back."""

import math
from abc import ABC, abstractmethod

from torch import Tensor

from lightning_sparsecomm.basis.layout import SparseVector, Vector
from lightning_sparsecomm.basis.parts import Part
from lightning_sparsecomm.basis.rounds import Round


class Compressor(Part, ABC):
    """Turns a vector into bytes that decode with no other knowledge than its length. Pure: no state between calls.

    >>> class Whole(Compressor):
    ...     # Sends every element, in float32.
    ...     def encode(self, x: Vector, context: Round) -> Tensor:
    ...         return x.values.float().view(torch.uint8)
    ...     def decode(self, payload: Tensor, size: int) -> Tensor:
    ...         if payload.numel() != 4 * size:
    ...             raise PayloadError(f"whole vector: has {payload.numel()} bytes, expected {4 * size}.")
    ...         return payload.view(torch.float32)
    >>> Whole().decode(Whole().encode(Vector(torch.tensor([0.5, 2.0])), context=None), size=2)
    tensor([0.5000, 2.0000])
    """

    @property
    def largest(self) -> float:
        """The largest magnitude that it can send: larger values are clamped to it."""
        return math.inf

    @property
    def reads_on_gpus(self) -> bool:
        """Whether long payloads are decoded on the GPU where they arrive. Otherwise they are on the CPU."""
        return False

    @abstractmethod
    def encode(self, x: Vector, context: Round) -> Tensor:
        """The payload for `x`.

        Args:
            x: A dense, finite vector. Its `values` are not changed.
            context: Layout, step and seeds of this round.

        Returns:
            `[bytes]` uint8 on the device of `x.values`: at most 32 bytes, and 16 more for each element of `x`.
        """

    @abstractmethod
    def decode(self, payload: Tensor, size: int) -> SparseVector | Tensor:
        """The vector in a payload. The sender decodes its own payload too: that is what its memories count as sent.

        Args:
            payload: `[bytes]` uint8, from any source. Check a field before allocating memory for it. It begins where it
                can be viewed in any dtype.
            size: Length of the vector.

        Returns:
            A sparse or dense vector of `size` elements, float32 or wider, on the payload's device.

        Raises:
            PayloadError: The bytes are not a payload of this compressor, or hold a vector of another length.
        """

    def bound_bytes(self, context: Round) -> int | None:
        """The greatest length of a payload in this round, equal on all ranks.

        None if there is no such bound, or if it is far above the usual length. Ranks then exchange lengths first.
        """
        return None


class EnteringCompressor(Compressor):
    """A compressor that is also told what this round's gradients have added to the residual: `Vector.entering`.

    So it is by a channel whose last memory is `ErrorFeedback`, through the exchange `Gather`. Elsewhere that is None.

    >>> class Growing(EnteringCompressor):
    ...     # Sends every element, but zero for those that this round has made smaller; in float32.
    ...     def encode(self, x: Vector, context: Round) -> Tensor:
    ...         entering = x.values if x.entering is None else x.entering
    ...         return torch.where(x.values * entering > 0, x.values, 0).float().view(torch.uint8)
    ...     def decode(self, payload: Tensor, size: int) -> Tensor:
    ...         if payload.numel() != 4 * size:
    ...             raise PayloadError(f"growing elements: has {payload.numel()} bytes, expected {4 * size}.")
    ...         return payload.view(torch.float32)
    >>> x = Vector(torch.tensor([0.5, 2.0]), entering=torch.tensor([1.0, -1.0]))
    >>> Growing().decode(Growing().encode(x, context=None), size=2)
    tensor([0.5000, 0.0000])
    """
