"""Gradients that this rank lacks: each counts as zero where another rank has one, and for nothing where none has."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout, Round, Vector, Wire
from lightning_sparsecomm.channel.memory import Memory
from lightning_sparsecomm.channel.saved import Saved, pop_named
from lightning_sparsecomm.exchange import Exchanged
from lightning_sparsecomm.exchange.status import agree, masked

_HOLES, _NONFINITE = "gradients that no rank had", "a gradient that was not finite"


class MissingGradients:
    """Fills in zeros for memories that carry something where this rank has no gradient; see `Memory.carries`.

    Whether another rank has a gradient is known after the exchange. Until then, what is held for the segment is kept in
    copies. If no rank had a gradient of some segment in the last round, ranks agree before the exchange instead, at the
    cost of one small all-reduce: or what is held there would compete for being sent, in vain.

    In a round in which nothing is sent, ranks cannot agree: if all segments had a gradient somewhere in the last
    exchange, zeros are filled in, and otherwise none.

    Attributes:
        carries: Whether any of the memories carries something; if not, nothing is filled in.
        refuses: The name of a segment for which this rank refuses the next exchange, which so tells all ranks; None for
            none. Its gradient was not finite in a round in which nothing was sent. Or it is a weight that other code
            has set amid local steps: then ranks agree on such weights, and repeat the exchange without refusing.
    """

    def __init__(self, memories: Sequence[Memory]) -> None:
        self.carries = any(memory.carries for memory in memories)
        self.refuses: str | None = None
        self._memories = memories
        # Equal on all ranks.
        self._had_holes = False
        # A segment, a view of what is held for it, and a copy of that.
        self._before: list[tuple[int, Tensor, Tensor]] = []

    def filled(self, gradients: Sequence[Tensor | None], context: Round, wire: Wire) -> Sequence[Tensor | None]:
        """The gradients, with a zero for each that this rank lacks and another one may have. Possibly a collective."""
        if not self.carries:
            return gradients
        missing = [gradient is None for gradient in gradients]
        anyone, held = [True] * len(missing), [each for memory in self._memories for each in memory.held.values()]
        like = held[0].flat
        if self._had_holes:
            anyone = agree(Vector(like[:0], [not each for each in missing]), context, wire)
        filled = list(gradients)
        for index, segment in enumerate(context.layout.segments):
            if missing[index] and anyone[index]:
                filled[index] = like.new_zeros(()).expand(segment.shape)
                self._before += [(index, each.parts[index], each.parts[index].clone()) for each in held]
        return filled

    def presumed(self, gradients: Sequence[Tensor | None], context: Round) -> Sequence[Tensor | None]:
        """As `filled`, for a round in which nothing is sent: without a collective, and for good."""
        if not self.carries or self._had_holes:
            return gradients
        held = [each for memory in self._memories for each in memory.held.values()]
        shapes = (segment.shape for segment in context.layout.segments)
        zero = held[0].flat.new_zeros(())
        return [zero.expand(shape) if each is None else each for each, shape in zip(gradients, shapes)]

    def refused_segment(self, layout: Layout) -> int | None:
        """The index of the segment that `refuses` names; None for none, or where the layout has lost it."""
        return next((i for i, each in enumerate(layout.segments) if each.name == self.refuses), None)

    def commit(self, exchanged: Exchanged, layout: Layout) -> Exchanged:
        """Puts back what was held where no rank has turned out to have a gradient: what was sent there is void."""
        present = exchanged.present
        self._had_holes = self.carries and not all(present)
        for index, held, before in self._before:
            if not present[index]:
                held.copy_(before)
        self._before.clear()
        if not self._had_holes:
            return exchanged
        shared, sent = (masked(vector, present, layout) for vector in (exchanged.shared, exchanged.sent))
        return exchanged._replace(shared=shared, sent=sent)

    def abort(self) -> None:
        """Puts back what was held everywhere."""
        for _, held, before in self._before:
            held.copy_(before)
        self._before.clear()
        self.refuses = None

    def state_dict(self, names: Iterable[str]) -> Saved:
        """Whether the last round had holes, under the name of the first parameter; and what was not finite."""
        saved: Saved = {}
        if self._had_holes:
            saved[_HOLES] = {name: torch.tensor(True) for name in list(names)[:1]}
        if self.refuses is not None:
            saved[_NONFINITE] = {self.refuses: torch.tensor(True)}
        return saved

    def load_state_dict(self, saved: Saved, names: Iterable[str]) -> None:
        """Takes out of `saved` what `state_dict` returned."""
        names = list(names)
        self._had_holes = bool(pop_named(saved, _HOLES, names))
        self.refuses = next(iter(pop_named(saved, _NONFINITE, names)), None)
