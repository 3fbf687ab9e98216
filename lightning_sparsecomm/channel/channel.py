"""Memories and an exchange: one round of communication, from what a rank has to what all ranks share."""

import copy
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparsecomm.basis import Layout, Round, Vector, Wire
from lightning_sparsecomm.basis.parts import Part, parts_in
from lightning_sparsecomm.channel.adam import LocalAdam
from lightning_sparsecomm.channel.asides import Asides
from lightning_sparsecomm.channel.clipping import ClipLocalNorm
from lightning_sparsecomm.channel.contribution import Contribution, StepSettings
from lightning_sparsecomm.channel.ef21 import EF21
from lightning_sparsecomm.channel.error_feedback import ErrorFeedback
from lightning_sparsecomm.channel.inspection import first_nonfinite, joined_sparse
from lightning_sparsecomm.channel.memory import Memory
from lightning_sparsecomm.channel.missing import MissingGradients
from lightning_sparsecomm.channel.momentum import Momentum, MomentumCorrection
from lightning_sparsecomm.channel.open_round import OpenRound, apart_from, nothing_of
from lightning_sparsecomm.channel.order import check_parts
from lightning_sparsecomm.channel.saved import Saved, load_saved, saved_of
from lightning_sparsecomm.channel.shared_adam import SharedAdam
from lightning_sparsecomm.channel.signs import SharedSign
from lightning_sparsecomm.codecs import EnteringCompressor
from lightning_sparsecomm.exchange import Exchange, Exchanged
from lightning_sparsecomm.kernels import OutOfRangeError

# Memories that are safe to call with gradients that are not finite: they only describe, or check as they take in. Their
# subclasses, and all others, are given gradients that were checked in a pass of its own.
_CHECK_IN_PASSING = (
    *(ClipLocalNorm, MomentumCorrection, LocalAdam, SharedAdam, Momentum, ErrorFeedback, EF21, SharedSign),
)


Gradients = Sequence[Tensor | None]
"""One for each segment of the layout; None where this rank has none."""


class Channel(Part):
    """What a method is made of: memories, in order, and an exchange.

    A round is `prepare`, `run`, and then `commit` or `abort`. Memories forget what was sent, as receivers decode it.
    The channel that is given to a sync is a prototype and holds nothing; each optimizer works with a `fresh` one.

    >>> channel = Channel(Gather(SparseCodec(TopK(0.01))), [ErrorFeedback()])

    Args:
        exchange: The round of communication.
        memories: State kept from round to round; none by default.

    Raises:
        ValueError: Memories are in an order in which they cannot work, or two of them apply momentum.
        TypeError: `exchange` is no exchange, or `memories` is no list of memories.
    """

    prepared = 0  # rounds so far

    def __init__(self, exchange: Exchange, memories: Sequence[Memory] = ()) -> None:
        check_parts(exchange, memories)
        self.exchange = exchange
        self.memories = tuple(memories)
        self._names: list[str] = []
        self._round: OpenRound | None = None
        self.missing = MissingGradients(self.memories)

    def fresh(self) -> "Channel":
        """A channel of the same parts, for one optimizer's use."""
        return copy.deepcopy(self)

    def bind(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        """As `Memory.bind`, for all memories. Call it again when the layout has grown. Errors as for `state_dict`."""
        self.dtype, self.device = dtype, device
        self._names = [segment.name for segment in layout.segments]
        for memory in self.memories:
            memory.bind(layout, dtype, device)
        # What cannot be saved is refused now, not at the first checkpoint.
        self.state_dict()

    def reduce(
        self,
        gradients: Gradients,
        context: Round,
        wire: Wire,
        settings: StepSettings = StepSettings(),  # noqa: B008
    ) -> Exchanged:
        """A whole round; arguments and errors as for `prepare` and `run`. After an error, memories are as before."""
        try:
            self.prepare(gradients, context, wire, settings)
            self.run()
        except BaseException:
            self.abort()
            raise
        return self.commit()

    def prepare(
        self,
        gradients: Gradients,
        context: Round,
        wire: Wire,
        settings: StepSettings = StepSettings(),  # noqa: B008
        sparse: bool = False,
        sends: bool = True,
    ) -> None:
        """Memories take in the gradients; the exchange starts what it can.

        Args:
            gradients: One for each segment of the layout, in its shape; None where this rank has none. They must not
                change before `commit` or `abort`.
            context: Layout, step and seeds of this round.
            wire: Where to communicate.
            settings: What the optimizer prescribes for this step.
            sparse: Whether the gradients are sparse tensors; then no dense vector is made of them.
            sends: Whether anything is sent. Otherwise residuals keep all, `run` does nothing, and no other rank takes
                part. A gradient that is not finite is left out, and refused by the next exchange.
        """
        assert self._round is None, "the round before has neither been committed nor aborted"
        self._round = OpenRound(context, wire, sends)
        self.prepared += 1
        self._round.vector = self._vector_of(gradients, settings, sparse, self._round)
        if sends:
            self.exchange.prepare(self._round.vector, context, wire)
            self._round.asides = Asides(self.memories, context, wire)

    def run(self) -> None:
        """Exchanges what was prepared, or waits for it.

        Raises:
            NonFiniteGradientError, PayloadError: As the exchange says.
        """
        assert self._round is not None
        self._round.run(self.exchange)

    def commit(self) -> Exchanged:
        """Memories forget what was sent.

        Returns:
            What is shared, as memories have changed it.
        """
        this, self._round = self._round, None
        assert this is not None and this.vector is not None
        context, exchanged = this.context, this.exchanged or nothing_of(this.vector)
        if this.sends:
            assert this.asides is not None
            exchanged = apart_from(self.memories, exchanged)
            self.exchange.commit()
            exchanged = self.missing.commit(exchanged, context.layout)
            this.asides.hand_over()
        elif this.vector.nonfinite_segment is not None:
            self.missing.refuses = context.layout.segments[this.vector.nonfinite_segment].name
            return exchanged
        # The last to take in is the first to forget.
        for memory in reversed(self.memories):
            exchanged = memory.commit(exchanged, context)
        return exchanged

    def abort(self) -> None:
        """Memories are as before `prepare`, to round-off. What was sent is void, on all ranks. May come at any time."""
        failed, self._round = self._round, None
        try:
            if failed is not None and failed.sends:
                self.exchange.abort()
        finally:
            if failed is not None:
                failed.take_back(self.memories)
            self.missing.abort()

    def _vector_of(self, gradients: Gradients, settings: StepSettings, sparse: bool, this: OpenRound) -> Vector:
        context, missing = this.context, self.missing
        filled = missing.filled(gradients, context, this.wire) if this.sends else missing.presumed(gradients, context)
        # In a round that sends nothing, a gradient that is presumed to be zero counts like any other.
        present = [gradient is not None for gradient in (gradients if this.sends else filled)]
        # A finite norm of all gradients says that all are finite. Otherwise the residual checks them as it takes
        # them in, or a separate pass does, at the cost of one read.
        unknown = not math.isfinite(settings.gradient_norm)
        takes_in = any(isinstance(memory, (ErrorFeedback, EF21)) for memory in self.memories)
        if unknown and not sparse and takes_in and all(type(each) in _CHECK_IN_PASSING for each in self.memories):
            try:
                self._take_in(filled, settings, this, checked=True)
            except OutOfRangeError:
                this.take_back(self.memories)
        nonfinite = first_nonfinite(gradients) if unknown and not this.contributions else None
        if nonfinite is None and this.sends and missing.refuses is not None:
            this.take_back(self.memories)
            nonfinite = missing.refused_segment(context.layout)
        if sparse:
            values, indices = joined_sparse(gradients, context.layout, self.dtype, self.device)
            return Vector(values, present, nonfinite_segment=nonfinite, indices=indices)
        if nonfinite is not None:
            nothing = torch.zeros(context.layout.size, dtype=self.dtype, device=self.device)
            return Vector(nothing, present, nonfinite_segment=nonfinite, carries=self.missing.carries)
        if not this.contributions:
            self._take_in(filled, settings, this, checked=False)
        contribution = this.contributions[-1].vector(context.layout, self.dtype, self.device)
        assert contribution.flat is not None
        entering = _entering(self.exchange, self.memories, context.layout, contribution.flat)
        return Vector(contribution.flat, present, contribution.hints, carries=self.missing.carries, entering=entering)

    def _take_in(self, gradients: Gradients, settings: StepSettings, this: OpenRound, checked: bool) -> None:
        wanted = self.exchange.wanted(this.context)
        this.contributions.append(Contribution(gradients, settings, wanted=wanted, checked=checked))
        for memory in self.memories:
            given = this.contributions[-1]
            if type(memory) not in _CHECK_IN_PASSING and (given.steps or given.scale != 1):
                # Only our own memories know what is still to be applied to the parts.
                given = this.contributions[-1] = given.vector(this.context.layout, self.dtype, self.device)
            this.contributions.append(memory.prepare(given, this.context))

    def objection(self, optimizer: Optimizer) -> str | None:
        """Why it is not defined for an optimizer, and what to use instead; None where it is."""
        objections = (memory.objection(optimizer) for memory in self.memories)
        return next((objection for objection in objections if objection), None)

    @property
    def residuals(self) -> list[ErrorFeedback]:
        """Its memories that hold what has not been sent yet."""
        return [memory for memory in self.memories if isinstance(memory, ErrorFeedback)]

    def residual_norm(self) -> float:
        """Euclidean norm of what this rank has not sent yet; 0 without error feedback."""
        return math.hypot(*(memory.norm() for memory in self.residuals))

    def state_dict(self) -> Saved:
        """What its parts hold, by kind and name. Tensors share storage with the parts.

        Raises:
            TypeError: A part holds something that cannot be saved.
        """
        return saved_of((*self.memories, self.exchange), self._names) | self.missing.state_dict(self._names)

    def load_state_dict(self, saved: Saved, names: Iterable[str]) -> None:
        """Takes out of `saved` what parts of the same kinds held for these parameters."""
        self._names = list(names)
        self.missing.load_state_dict(saved, self._names)
        load_saved((*self.memories, self.exchange), self._names, saved)

    def __repr__(self) -> str:
        return f"Channel({self.exchange!r}, {list(self.memories)!r})"


def _entering(exchange: Exchange, memories: Sequence[Memory], layout: Layout, like: Tensor) -> Tensor | None:
    """What the gradients have added to the residual, `[n]`, where the exchange asks for it."""
    residual = memories[-1] if memories else None
    if not isinstance(residual, ErrorFeedback) or not any(parts_in(exchange, EnteringCompressor)):
        return None
    added = torch.zeros_like(like)
    for view, part in zip(layout.views(added), residual.entering()):
        if part is not None:
            view.copy_(part)
    return added
