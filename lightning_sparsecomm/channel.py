"""Memory and exchange: one round of communication, from what a rank has to what all ranks share."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparsecomm.compensation import Contribution
from lightning_sparsecomm.exchange.base import Exchange, Exchanged, Outgoing
from lightning_sparsecomm.gradients import first_nonfinite, sparse_vector
from lightning_sparsecomm.held import Held, take
from lightning_sparsecomm.kernels import OutOfRangeError
from lightning_sparsecomm.layout import Layout
from lightning_sparsecomm.memory import ErrorFeedback, Memory
from lightning_sparsecomm.rounds import Round
from lightning_sparsecomm.wire import Wire


class Channel:
    """What a method is made of: memories that compensate, in order, and an exchange.

    The law that every channel obeys: what its memories forget is what was sent, as receivers decode it.

    Args:
        exchange: The round of communication.
        memories: State kept from round to round; none by default.
    """

    def __init__(self, exchange: Exchange, memories: Sequence[Memory] = ()) -> None:
        self.exchange = exchange
        self.memories = tuple(memories)

    def bind(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        """Makes room for `layout`; called again when the layout grows."""
        self.dtype, self.device = dtype, device
        for memory in self.memories:
            memory.bind(layout, dtype, device)

    def reduce(self, gradients: Sequence[Tensor | None], round: Round, wire: Wire, sparse: bool = False) -> Exchanged:
        """Exchanges one gradient per segment of `round.layout`; None where this rank has none. If `sparse`, all are
        sparse tensors, and no vector is made of the elements that they do not hold.

        Raises:
            NonFiniteGradientError, PayloadError: As the exchange says. Memories are then as they were before.
        """
        with self.reducing(gradients, round, wire, sparse) as reduction:
            reduction.exchange()
        return reduction.finish()

    @contextmanager
    def reducing(
        self, gradients: Sequence[Tensor | None], round: Round, wire: Wire, sparse: bool = False
    ) -> Iterator["Reduction"]:
        """`reduce` in three: entered, what can go on by itself is set going; then it is to be exchanged, within the
        context; and then finished, after it.

        Whatever is raised before, memories are as they were, to round-off: they give back what they had taken in, and
        what was sent goes for nothing. The gradients must not be changed until then.
        """
        contributions: list[Contribution] = []
        try:
            outgoing = self._outgoing(gradients, round, sparse, contributions)
            yield Reduction(self, self.exchange.begin(outgoing, round, wire), round, wire)
        except BaseException:
            self._take_back(contributions, round)
            raise

    def _outgoing(
        self, gradients: Sequence[Tensor | None], round: Round, sparse: bool, contributions: list[Contribution]
    ) -> Outgoing:
        """What is exchanged of gradients; notes what each memory is given, and what the last one gives."""
        present = [gradient is not None for gradient in gradients]
        # Looked over where no finite norm of all of them has told already: by the residual in passing, if nothing
        # before it would hold on to what is not finite; else in a pass of its own, which costs a read of all of them.
        unknown = not math.isfinite(round.gradient_norm)
        takes_in = any(isinstance(memory, ErrorFeedback) for memory in self.memories)
        in_passing = unknown and not sparse and takes_in and all(map(_checks, self.memories))
        if in_passing:
            try:
                self._compensate(gradients, round, contributions, checked=True)
            except OutOfRangeError:
                self._take_back(contributions, round)
        nonfinite = first_nonfinite(gradients) if unknown and not contributions else None
        if sparse:
            return Outgoing(sparse_vector(gradients, round.layout, self.dtype, self.device), present, nonfinite)
        if nonfinite is not None:
            nothing = torch.zeros(round.layout.size, dtype=self.dtype, device=self.device)
            return Outgoing(nothing, present, nonfinite)
        if not contributions:
            self._compensate(gradients, round, contributions, checked=False)
        contribution = contributions[-1].vector(round.layout, self.dtype, self.device)
        assert contribution.flat is not None
        return Outgoing(contribution.flat, present, None, contribution.candidates)

    def _compensate(
        self, gradients: Sequence[Tensor | None], round: Round, contributions: list[Contribution], checked: bool
    ) -> None:
        contributions.append(Contribution(gradients, wanted=self.exchange.wanted(round), checked=checked))
        for memory in self.memories:
            contributions.append(memory.compensate(contributions[-1], round))

    def _take_back(self, contributions: list[Contribution], round: Round) -> None:
        """Undoes what memories have done with the contributions, which they are no longer given then."""
        for contribution in reversed(contributions):
            contribution.take_back()
        for memory, contribution in reversed(list(zip(self.memories, contributions))):
            memory.take_back(contribution, round)
        contributions.clear()

    def finish(self, exchanged: Exchanged, round: Round) -> Exchanged:
        """Memories forget what was sent, and have their say on what is shared."""
        for memory in reversed(self.memories):
            memory.update(exchanged.sent)
        for memory in self.memories:
            exchanged = memory.finish(exchanged, round)
        return exchanged

    @property
    def corrects_momentum(self) -> bool:
        """Whether it applies the optimizer's momentum in the optimizer's place."""
        return any(memory.corrects_momentum for memory in self.memories)

    @property
    def clips(self) -> bool:
        """Whether it clips each rank's own gradient, in the place of clipping the shared one."""
        return any(memory.clips for memory in self.memories)

    def objection(self, optimizer: Optimizer) -> str | None:
        """Why it is not defined for an optimizer; None where it is."""
        objections = (memory.objection(optimizer) for memory in self.memories)
        return next((objection for objection in objections if objection), None)

    def residual_norm(self) -> float:
        """Euclidean norm of what this rank has not sent yet; 0 without error feedback."""
        norms = [memory.norm() for memory in self.memories if isinstance(memory, ErrorFeedback)]
        return math.hypot(*norms)

    def state_dict(self) -> Held:
        """What its parts hold, by their classes and then by parameter name."""
        return {kind: held for kind, part in self._kinds() if (held := part.state_dict())}

    def load_state_dict(self, state: Held, names: Iterable[str]) -> None:
        """Takes out of `state` what parts of the same classes held for these parameters."""
        names = list(names)
        for kind, part in self._kinds():
            part.load_state_dict(take(state, kind, names))

    def _kinds(self) -> Iterator[tuple[str, Memory | Exchange]]:
        """Each part with a name: its class, and its number where there are several of one."""
        met: Counter[str] = Counter()
        parts: tuple[Memory | Exchange, ...] = (*self.memories, self.exchange)
        for part in parts:
            kind = type(part).__name__
            met[kind] += 1
            yield (kind if met[kind] == 1 else f"{kind} {met[kind]}"), part

    def __repr__(self) -> str:
        return f"Channel({self.exchange!r}, {list(self.memories)!r})"


def _checks(memory: Memory) -> bool:
    """Whether the class whose `compensate` it has says so itself: who overrides that does not inherit the promise."""
    defines = next(kind for kind in type(memory).__mro__ if "compensate" in vars(kind))
    return bool(vars(defines).get("checks", False))


class Reduction:
    """A round of a channel that has begun; see `Channel.reducing`."""

    def __init__(self, channel: Channel, outgoing: Outgoing, round: Round, wire: Wire) -> None:
        self._channel = channel
        self._outgoing = outgoing
        self._round = round
        self._wire = wire

    def exchange(self) -> None:
        """Exchanges it, or waits until that is done.

        Raises:
            NonFiniteGradientError, PayloadError: As the exchange says.
        """
        self._exchanged = self._channel.exchange.run(self._outgoing, self._round, self._wire)

    def finish(self) -> Exchanged:
        """Tells the memories what was sent, now that it is sent for good."""
        return self._channel.finish(self._exchanged, self._round)
