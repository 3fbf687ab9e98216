"""One whole round of communication, be it one collective or several."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from lightning_sparsecomm.compensation import Wanted
from lightning_sparsecomm.layout import SparseVector
from lightning_sparsecomm.rounds import Round
from lightning_sparsecomm.wire import Wire


class NonFiniteGradientError(RuntimeError):
    """A gradient holds an infinity or a NaN. Raised on all ranks in the same step, before any weight changes."""


class Outgoing(NamedTuple):
    """What one rank brings to a round.

    Attributes:
        x: `[n]` float32 or wider; zero in the segments that are not present. Not to be changed.
        present: For each segment of the layout, whether this rank has a gradient for it.
        nonfinite_segment: The first segment whose gradient is not finite; then `x` is meaningless, and the others must
            learn of it. None where all are.
        candidates: As `Exchange.wanted` asked for; they make selection quicker, and change nothing.
    """

    x: Tensor
    present: Sequence[bool]
    nonfinite_segment: int | None = None
    candidates: Sequence[Tensor | None] = ()


class Exchanged(NamedTuple):
    """What a round gives.

    Attributes:
        shared: The mean over ranks of what they sent; bit-equal on all ranks.
        sent: What this rank's memories must forget: its own part of `shared`, as receivers decode it.
        present: For each segment, whether any rank had a gradient for it; equal on all ranks.
    """

    shared: SparseVector | Tensor
    sent: SparseVector | Tensor
    present: Sequence[bool]


class Exchange(ABC):
    """Selects, encodes, communicates, decodes and reduces. All ranks call it in the same rounds."""

    def wanted(self, round: Round) -> Sequence[Wanted]:
        """What will be selected by magnitude, in order; whoever computes the vector may note candidates for it."""
        return ()

    @abstractmethod
    def run(self, outgoing: Outgoing, round: Round, wire: Wire) -> Exchanged:
        """Exchanges one vector.

        Args:
            outgoing: What this rank brings.
            round: Layout, step and seeds.
            wire: Where to communicate.

        Raises:
            PayloadError: A rank's payload is corrupt, or is not one of this method and these parameters.
            NonFiniteGradientError: Some rank has a gradient that is not finite; raised on all of them.
        """
