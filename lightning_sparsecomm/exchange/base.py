"""One whole round of communication, be it one collective or several."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparsecomm.compensation import Wanted
from lightning_sparsecomm.layout import Layout, SparseVector
from lightning_sparsecomm.rounds import Round
from lightning_sparsecomm.wire import Wire


class NonFiniteGradientError(RuntimeError):
    """A gradient holds an infinity or a NaN. Raised on all ranks in the same step, before any weight changes."""

    @classmethod
    def of(cls, segment: int, round: Round, rank: int) -> "NonFiniteGradientError":
        """The error for one segment of the round's layout.

        Args:
            segment: Its index.
            round: In which it was found.
            rank: Whose gradient it is.
        """
        return cls(
            f"rank {rank} has a {round.quantity} that is not finite, for parameter"
            f" {round.layout.segments[segment].name!r} in step {round.step}."
            " Lower the learning rate, clip gradients, or look for a division by zero in the loss."
        )

    @classmethod
    def found_on_any(
        cls, segment: int | None, round: Round, wire: Wire, device: torch.device
    ) -> "NonFiniteGradientError":
        """The error, where ranks know by now that some of them have such a gradient, but not which: they say it.

        A collective: only where all of them know, since all must come here. Bytes handed over: 8.

        Args:
            segment: The first on this rank; None where all its gradients are finite.
            round: In which it was found.
            wire: Where to communicate.
            device: Of the vectors that are exchanged.
        """
        own = torch.tensor([-1 if segment is None else segment], device=device)
        segments = wire.all_gather(own).view(-1).tolist()
        rank = next(rank for rank, found in enumerate(segments) if found >= 0)
        return cls.of(segments[rank], round, rank)


class Outgoing(NamedTuple):
    """What one rank brings to a round.

    Attributes:
        x: `[n]` float32 or wider; zero in the segments that are not present. Not to be changed. Sparse where the
            gradients themselves are, which only an exchange with `takes_sparse` is given.
        present: For each segment of the layout, whether this rank has a gradient for it.
        nonfinite_segment: The first segment whose gradient is not finite; then `x` is meaningless, and the others must
            learn of it. None where all are.
        candidates: As `Exchange.wanted` asked for; they make selection quicker, and change nothing.
        begun: Ends what `Exchange.begin` has set going; None where nothing was.
    """

    x: Tensor | SparseVector
    present: Sequence[bool]
    nonfinite_segment: int | None = None
    candidates: Sequence[Tensor | None] = ()
    begun: "Callable[[], Exchanged] | None" = None


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

    takes_sparse = False
    """Whether it also exchanges vectors of which only some elements are held, and then gives such back."""

    @property
    def overlaps(self) -> bool:
        """Whether `begin` sets all of it going, so that others can select and code while it is on the wire."""
        return False

    def objection(self, layout: Layout) -> str | None:
        """Why it cannot exchange vectors of this layout, and what to do; None where it can."""
        return None

    def wanted(self, round: Round) -> Sequence[Wanted]:
        """What will be selected by magnitude, in order; whoever computes the vector may note candidates for it."""
        return ()

    def state_dict(self) -> dict[str, Tensor]:
        """What is held from round to round, by parameter name; nothing, in most exchanges."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:  # noqa: B027
        """Takes over what `state_dict` gave, before the next round."""

    def dense(self, outgoing: Outgoing) -> Tensor:
        """What this rank brings, where it cannot be sparse."""
        if isinstance(outgoing.x, SparseVector):
            raise TypeError(
                f"{type(self).__name__} cannot take sparse gradients. Use BlockReduce for them, or build the layer with"
                " nn.Embedding(sparse=False)."
            )
        return outgoing.x

    def begin(self, outgoing: Outgoing, round: Round, wire: Wire) -> Outgoing:
        """Sets going what can go on by itself until `run` is called with what this gives; nothing, in most exchanges.

        All ranks call it in the same rounds and order. After an error of another exchange, `run` may not be called.
        """
        return outgoing

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
