"""Exchanges of weight changes that take place while training goes on."""

from functools import partial
from typing import Literal

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sparsecomm.basis import UPDATES, Wire
from lightning_sparsecomm.basis.arguments import check_whole_number, is_number
from lightning_sparsecomm.basis.stream import Stream
from lightning_sparsecomm.channel.saved import Saved, add_prefix, pop_named, strip_prefix
from lightning_sparsecomm.sharing.delta_share import IN_FLIGHT, Delayed, DeltaShare, scaled
from lightning_sparsecomm.sharing.flown import ArrivedChanges, by_name, fly, load_arrived, saved_arrived
from lightning_sparsecomm.sharing.flown import Mix as Mix
from lightning_sparsecomm.sharing.gradients import NamedParameters
from lightning_sparsecomm.sharing.in_flight import InFlightShare
from lightning_sparsecomm.sharing.others import Own, all_of
from lightning_sparsecomm.sharing.set_weights import SetWeights
from lightning_sparsecomm.sharing.share import Turn
from lightning_sparsecomm.sharing.starts import change_from
from lightning_sparsecomm.sharing.takeover import mask_momentum_


def check_delay(delay: int, mix: Mix, most_every: float) -> None:
    """Raises `ValueError` unless an exchange can be applied so many steps after its start, `most_every` at most."""
    check_whole_number("delay", delay, 0, "optimizer steps between an exchange's start and its use", "Use 0 to wait.")
    if 0 < delay >= most_every:
        raise ValueError(
            f"delay must be below every, {most_every:.0f} steps, so that an exchange has arrived before the next one of"
            f" the same weights starts; got {delay}. Use a larger every, or delay={most_every - 1:.0f}."
        )
    if mix != "keep" and not (is_number(mix) and 0 <= mix < 1):
        raise ValueError(
            f"mix must be 'keep', or a share of the local weights from 0 to below 1; got {mix!r}. Use 'keep'."
        )


class StreamedShare(InFlightShare[dict[str, Tensor]], DeltaShare):
    """A `DeltaShare` whose exchange starts after one step and is applied `delay` steps later.

        step t:      Δ ← w − anchor;   the exchange of Δ starts;   s ← w
        step t + τ:  anchor ← anchor + mean, or an outer step;     w ← anchor + (w − s), or α·w + (1 − α)·anchor

    Memories, selection, coding and collectives run in the stream's thread. Who needs the memories meanwhile, such as a
    save, waits for it. The anchor does not change before t + τ. When training ends, what is in flight is applied first,
    and what was trained since is exchanged as without delay; so is all while a schedule has an exchange in each step.

    Source: Douillard et al. 2025, Streaming DiLoCo, which mixes. To keep what was trained meanwhile is ours.

    Attributes:
        stream, delay: Where its exchanges take place, and steps between the start of the last one and its use.
    """

    def __init__(
        self,
        sync: Delayed,
        optimizer: Optimizer,
        parameters: NamedParameters,
        wire: Wire,
        fragment: int = 0,
        own: Own = all_of,
        stream: Stream | None = None,
    ) -> None:
        self.delay, self.stream = sync.delay, stream or Stream(wire)
        self._arrived: ArrivedChanges | None = None
        # The weights when the exchange in flight started, by name, and the step after which it is applied.
        self._began: dict[str, Tensor] = {}
        self._arrives = 0
        # What taking it back needs: steps before its start, and what the user had set by then.
        self._steps_before, self._noticed = 0, SetWeights()
        # Whether an exchange was taken back, and is to be made again; whether weights may differ from the anchors.
        self._again = self._apart = False
        self._turn: Literal["start", "land", "whole"] = "start"
        super().__init__(sync, optimizer, parameters, wire, fragment, own)

    def extend(self, parameters: NamedParameters) -> None:
        self._finish_between_turns()
        super().extend(parameters)

    @property
    def closes_round(self) -> bool:
        return self._turn == "start" or (self._turn == "whole" and not self._last)

    @property
    def trained(self) -> int:
        return self.steps + (self._steps_before if self._flight is not None else 0)

    def due(self, turn: Turn) -> bool:
        if turn.kind == "end":
            return self._apart
        if self.under_way:
            late = turn.step >= self._arrives or self.steps >= turn.every(self.sync.every)
            return turn.kind == "land" or (turn.kind == "weights" and late)
        return (self._again and turn.kind == "weights") or super().due(turn)

    def after_step(self) -> None:
        self._apart = True
        super().after_step()

    def prepare(self, turn: Turn) -> None:
        waits = turn.kind == "end" or not (self.under_way or self.sync.delay_at(turn))
        self._turn = "whole" if waits else "land" if self.under_way else "start"
        if waits:
            self._again = False
            self._finish()
            self._apply()
            super().prepare(turn)
        elif self._turn == "start":
            self._start(turn)

    def exchange(self) -> None:
        if self._turn == "whole":
            super().exchange()
        elif self._turn == "land":
            self._finish()

    def commit(self) -> None:
        if self._turn == "whole":
            super().commit()
            self._apart = False
        elif self._turn == "land":
            self._apply()

    def land(self) -> None:
        """Uses what is in flight, once it has arrived."""
        self._turn = "land"
        self._finish()
        self._apply()

    def to_hand_out(self) -> list[tuple[Parameter, Tensor]]:
        if self._turn == "start":
            return []
        # What was trained meanwhile is in the weights, and not in what all ranks share.
        return super().to_hand_out() + [(weight, weight.detach()) for weight, _ in self.in_common()]

    def handed_out(self) -> None:
        if self._turn == "whole":
            super().handed_out()

    def abort(self) -> None:
        """Sets the weights back to the anchors. What is in flight is waited for, and void."""
        self._void()
        self._arrived, self._began, self._again = None, {}, False
        super().abort()
        self._apart = False

    def take_back(self) -> None:
        """As if the exchange in flight had not begun; it is due again. Weights have gone on, and stay as they are."""
        if self._turn == "whole":
            super().take_back()
        elif self.under_way:
            self._void()
            self._moments.abort()
            self._arrived, self._began, self._again = None, {}, True
            self.steps += self._steps_before
            self._set_weights.found = self._noticed.found | self._set_weights.found

    def state_dict(self) -> Saved:
        self._finish_between_turns()
        ours: Saved = {"apart": dict.fromkeys((*self.anchors, *self.others.values), True) if self._apart else {}}
        if self._arrived is not None:
            ours |= saved_arrived(self._arrived, self._began) | self._moments.state_dict()
        if self.under_way:
            # Also after an error, which ranks that exchange other parts of the model may not have met.
            ours[IN_FLIGHT] = dict.fromkeys(self.all_names, self._arrives)
        ours = {kind: parts for kind, parts in ours.items() if parts}
        return super().state_dict() | add_prefix(type(self.sync).__name__, ours)

    def load_state_dict(self, saved: Saved) -> None:
        ours = strip_prefix(type(self.sync).__name__, saved)
        arrived, self._began = load_arrived(ours, self.parameters, self.sync.mix)
        self._moments.load_state_dict(ours, self.parameters)
        arrives = pop_named(ours, IN_FLIGHT, self.all_names)
        self._arrived = arrived if arrives else None
        self._arrives = max(arrives.values(), default=0)
        apart = pop_named(ours, "apart", self.all_names)
        super().load_state_dict(saved)
        self._apart = any(apart.values()) or self.steps > 0  # A run without a delay saves only these.

    @property
    def under_way(self) -> bool:
        """Whether an exchange has started, and has not been used yet."""
        # An error that was found between turns is raised when the exchange would have landed.
        return self._flight is not None or self._arrived is not None or self.failure is not None

    @property
    def _differs(self) -> bool:
        # Steps count from the last start, and weights differ until the end.
        return self._apart

    def _start(self, turn: Turn) -> None:
        self._bind()
        self.delay, self._again = self.sync.delay_at(turn), False
        self._arrives, self._steps_before, self.steps = turn.step + self.delay, self.steps, 0
        # A collective of all ranks, where nodes have several.
        beside = self.stream.wire(UPDATES)
        self._moments.start(self.optimizer, self.parameters, later=True)
        if not self.parameters:
            self._arrived = ArrivedChanges({}, {}, {})
            return
        with self.wire.ledger.exchanging():
            weights = {name: weight.detach().clone() for name, weight in self.parameters}
            changes = [change_from(weight, self.anchored.of(name)) for name, weight in weights.items()]
            self._began = weights if self.sync.mix == "keep" else {}
            # What is set from now on belongs to the next exchange.
            self._noticed = self._set_weights.take()
            sent, context = scaled(changes, self.weight), self._context(turn, "weight update")
            work = partial(fly, self.channel, sent, weights, self._noticed, self._moments, context)
            self._flight = self.stream.start(work, beside)

    def _finish(self) -> None:
        """Waits for what is in flight, and lets memories forget what was sent. Nothing is applied yet."""
        with self.wire.ledger.exchanging():
            if (landed := self._land()) is None:
                return
            set_means, exchanged = landed
            if set_means and self.wire.rank == 0:
                self._set_weights.warn(set_means)
            sent = by_name(exchanged.sent, self.layout) if self.sync.mask_momentum else {}
            self._arrived = ArrivedChanges(by_name(exchanged.shared, self.layout), sent, set_means)

    def _apply(self) -> None:
        """Moves the anchors by what has arrived, and the weights with them."""
        if self._arrived is None:
            return
        with self.wire.ledger.exchanging():
            # What was set since the last step is no training.
            self._look()
            arrived, self._arrived = self._arrived, None
            # What was set in flight stays as it is: the next exchange averages it.
            weights = [named for named in self.parameters if named[0] not in self._set_weights.found]
            arrived.move(self.anchored, weights, self._began, self.sync.mix)
            self._began = {}
            self._set_weights.note(self.parameters)
            self._moments.commit(self.optimizer, self.parameters)
            if arrived.sent:
                mask_momentum_(self.optimizer, self.parameters, arrived.sent_of(self.parameters), self.layout)
