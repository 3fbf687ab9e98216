"""A channel's round, while it is open."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Round, SparseVector, Vector, Wire
from lightning_sparsecomm.channel.asides import Asides
from lightning_sparsecomm.channel.contribution import Contribution
from lightning_sparsecomm.channel.memory import Memory
from lightning_sparsecomm.exchange import Exchange, Exchanged


@dataclass
class OpenRound:
    """A round that is neither committed nor aborted yet.

    Attributes:
        context: Layout, step and seeds.
        wire: Where to communicate.
        sends: Whether anything is sent.
        contributions: What each memory was given, and what the last one returned.
        vector: What the exchange is given.
        exchanged: Its result.
        asides: What memories sum beside it.
    """

    context: Round
    wire: Wire
    sends: bool = True
    contributions: list[Contribution] = field(default_factory=list)
    vector: Vector | None = None
    exchanged: Exchanged | None = None
    asides: Asides | None = None

    def run(self, exchange: Exchange) -> None:
        """Exchanges what was prepared, if anything is sent."""
        if self.sends:
            assert self.vector is not None and self.asides is not None
            self.exchanged = exchange.exchange(self.vector, self.context, self.wire)
            self.asides.wait()

    def take_back(self, memories: Sequence[Memory]) -> None:
        """Memories are as before they took in the gradients, to round-off."""
        for contribution in reversed(self.contributions):
            contribution.abort()
        for memory, contribution in reversed(list(zip(memories, self.contributions))):
            memory.abort(contribution, self.context)
        self.contributions.clear()


def nothing_of(x: Vector) -> Exchanged:
    """The result of a round in which nothing is sent."""
    empty = x.values.new_empty(0)
    vector = SparseVector(empty.to(torch.int64), empty, x.values.numel())
    return Exchanged(vector, vector, list(x.present))


def apart_from(memories: Sequence[Memory], exchanged: Exchanged) -> Exchanged:
    """The result, in other memory where it is a memory's own, such as the residual that it is subtracted from."""
    held = {each.flat.untyped_storage().data_ptr() for memory in memories for each in memory.held.values()}

    def apart(vector: SparseVector | Tensor) -> SparseVector | Tensor:
        shared = isinstance(vector, Tensor) and vector.untyped_storage().data_ptr() in held
        return vector.clone() if shared and isinstance(vector, Tensor) else vector

    return exchanged._replace(shared=apart(exchanged.shared), sent=apart(exchanged.sent))
