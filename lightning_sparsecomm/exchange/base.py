"""One whole round of communication, be it one collective or several."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from lightning_sparsecomm.basis import Layout, Round, SparseVector, Vector, Wire
from lightning_sparsecomm.basis.layout import count_of
from lightning_sparsecomm.basis.parts import Part, parts_in
from lightning_sparsecomm.codecs.selectors.candidates import HintedSelector, Wanted
from lightning_sparsecomm.exchange.status import agree, masked


class Exchanged(NamedTuple):
    """The result of a round.

    Attributes:
        shared: The mean over ranks of what they sent; bit-equal on all ranks.
        sent: This rank's own part of `shared`, as receivers decode it: what its memories forget.
        present: For each segment, whether any rank had a gradient for it; equal on all ranks.
    """

    shared: SparseVector | Tensor
    sent: SparseVector | Tensor
    present: list[bool]


class Exchange(Part, ABC):
    """Selects, encodes, communicates, decodes and reduces. All ranks take part in the same rounds.

    A round calls `prepare`, `exchange`, and then `commit` or, after any error, `abort`. An exchange that keeps state
    from round to round changes it in `commit` only. This class is for exchanges that carry the ranks' status (see
    `exchange.status`) in bytes of their own; derive from `PlainExchange` to have it agreed on for you.

    Attributes:
        sums_pieces: Whether each rank sends on the mean of a piece, and answers for what it rounds off there: it has
            sent that much less, also where it has no gradient of its own.
        renewable: Whether its state only makes it faster, and is of these very ranks: on others it begins anew.

    >>> def exchange(rank):
    ...     context = Round(Layout([("weight", (2,))]), rank=rank, world_size=2)
    ...     return DenseAllReduce().exchange(Vector(torch.tensor([1.0, rank])), context, Wire()).shared.tolist()
    >>> run_ranks(2, exchange)
    [[1.0, 0.5], [1.0, 0.5]]
    """

    sums_pieces: bool = False
    renewable: bool = False

    @property
    def overlaps(self) -> bool:
        """Whether `prepare` starts communication, so that other exchanges can do their work meanwhile."""
        return type(self).prepare is not Exchange.prepare

    def objection(self, layout: Layout) -> str | None:
        """Why it cannot exchange vectors of this layout, and what to do; None where it can."""
        return None

    def check_ranks(self, world_size: int) -> None:
        """Called before the first round. Raises `ValueError` if it cannot work with so many ranks."""

    def wanted(self, context: Round) -> Sequence[Wanted]:
        """The stretches of whose elements it will send the largest, for memories that can note candidates."""
        selector = next(parts_in(self, HintedSelector), None)  # type: ignore[type-abstract]
        return selector.wanted(context) if selector is not None else ()

    def prepare(self, x: Vector, context: Round, wire: Wire) -> None:
        """Starts what needs no answer from other ranks; nothing, in most exchanges.

        All ranks call it in the same rounds and order. After an error elsewhere, `abort` follows instead of `exchange`.
        """

    @abstractmethod
    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        """Exchanges one vector, or waits for what `prepare` has started with the same arguments.

        Args:
            x: What this rank brings. Sparse (with `indices`) only in a sync of sparse gradients.
            context: Layout, step and seeds of this round.
            wire: Where to communicate.

        Raises:
            PayloadError: A rank's payload is corrupt, or belongs to another method or model.
            NonFiniteGradientError: Some rank has a gradient that is not finite; raised on all of them.
        """

    def elements(self, exchanged: Exchanged) -> int:
        """How many elements this rank's messages held in the last round; as many as `sent` holds, in most exchanges."""
        return count_of(exchanged.sent)

    def commit(self) -> None:
        """The round counts: keeps the state that it led to."""

    def abort(self) -> None:
        """The round does not count, on all ranks: drops what it has started, and keeps the state from before."""

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors that are kept from round to round, by any names; nothing, in most exchanges."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes over what `state_dict` returned, before the next round."""


class SparseExchange(Exchange):
    """An exchange that also takes vectors of which only some elements are held, and then returns such vectors."""


class PlainExchange(Exchange):
    """An exchange that only reduces. Which ranks have a gradient is agreed on beforehand, in one small all-reduce.

    So `reduce` is called only where all gradients are finite. It costs two bits for each tensor.

    >>> class Signs(PlainExchange):
    ...     # The mean of the ranks' signs.
    ...     def reduce(self, x: Vector, context: Round, wire: Wire) -> tuple[Tensor, Tensor]:
    ...         sent = x.values.sign()
    ...         return wire.all_reduce_(sent / wire.world_size), sent
    """

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        present = agree(x, context, wire)
        shared, sent = self.reduce(x, context, wire)
        here = () if x.carries else x.present
        return Exchanged(masked(shared, present, context.layout), masked(sent, here, context.layout), present)

    @abstractmethod
    def reduce(self, x: Vector, context: Round, wire: Wire) -> tuple[SparseVector | Tensor, SparseVector | Tensor]:
        """The mean over ranks of what they send, and what this rank has sent.

        Args:
            x: What this rank brings: dense and finite.
            context: Layout, step and seeds of this round.
            wire: Where to communicate.

        Returns:
            `shared`, bit-equal on all ranks, and `sent`, this rank's part of it as receivers decode it. Each is `[n]`,
            in the dtype of `x.values`, or a `SparseVector`. What is sent for a segment without a gradient
            counts only where `x.carries` and another rank has one.
        """


def dense_values(x: Vector, exchange: Exchange) -> Tensor:
    """The values of a vector that an exchange can only take whole; raises `TypeError` if it is sparse."""
    if x.indices is not None:
        raise TypeError(
            f"{type(exchange).__name__} cannot take sparse gradients. Use BlockReduce for them, or build the layer with"
            " nn.Embedding(sparse=False)."
        )
    return x.values
