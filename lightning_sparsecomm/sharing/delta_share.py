"""What runs an exchange of changes of weights for one optimizer."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sparsecomm.basis import UPDATES, Wire
from lightning_sparsecomm.basis.schedules import Every
from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.channel.saved import Saved, add_prefix, pop_named, strip_prefix
from lightning_sparsecomm.sharing.anchored import Anchored
from lightning_sparsecomm.sharing.averaging import averaged
from lightning_sparsecomm.sharing.flown import Mix
from lightning_sparsecomm.sharing.fragments import is_due
from lightning_sparsecomm.sharing.gradients import NamedParameters
from lightning_sparsecomm.sharing.moments import Moments, kept_by
from lightning_sparsecomm.sharing.others import Own, PartShare, all_of
from lightning_sparsecomm.sharing.outer import OuterOptimizer
from lightning_sparsecomm.sharing.set_weights import NOTED, SetWeights
from lightning_sparsecomm.sharing.share import Turn
from lightning_sparsecomm.sharing.starts import Starts
from lightning_sparsecomm.sharing.takeover import MOMENTA, mask_momentum_

# Kinds of state besides those of the channel and of the anchors.
_STEPS, _EXCHANGES, _SET = "steps", "exchanges", "set by the user"

IN_FLIGHT = "in flight, arrives"
"""What a share with a delay saves of an exchange that has not been used yet: after which step it will be."""


class Delayed(Protocol):
    """What a share reads of its `DeltaSync`, which says what each means."""

    channel: Channel
    every: Every
    outer: OuterOptimizer | None
    mask_momentum: bool
    fragments: int
    delay: int
    mix: Mix
    moments: Mapping[str, int]
    residual_in_weights: bool

    def delay_at(self, turn: Turn) -> int: ...


class DeltaShare(PartShare):
    """Runs a `DeltaSync`, or a fragment of it, for one optimizer.

    Attributes:
        anchors: By name, what ranks share of the parameters that this one exchanges; noted before the first step.
        anchored: The same, with what moves them.
        steps: Optimizer steps since the last exchange.
        weight, pace: Of an elastic replica: its change's factor in the mean, and the part of `every` steps it makes.
    """

    weight = pace = 1.0

    def __init__(
        self,
        sync: Delayed,
        optimizer: Optimizer,
        parameters: NamedParameters,
        wire: Wire,
        fragment: int = 0,
        own: Own = all_of,
    ) -> None:
        self.sync = sync
        self._fragment = fragment
        self.channel = sync.channel.fresh()
        self.channel.exchange.check_ranks(wire.world_size)
        self.anchored = Anchored(sync.outer)
        self.anchors = self.anchored.anchors
        self._starts = Starts(self.anchored, self.channel, sync.residual_in_weights)
        self.steps = 0
        self._set_weights = SetWeights()
        self._moments = Moments(kept_by(optimizer, sync.moments))
        # Whether this turn's exchange is the run's last; whether weights were noted after this step's update.
        self._last = self._noted = False
        # In a turn: anchors of weights that were set, by name; before the exchange, this rank's own weights.
        self._set: dict[str, Tensor] = {}
        super().__init__(optimizer, parameters, wire, own)

    @property
    def trained(self) -> int:
        """Optimizer steps since the last exchange that counts for certain."""
        return self.steps

    def due(self, turn: Turn) -> bool:
        if turn.kind == "weights":
            every, count = turn.every(self.sync.every), self.sync.fragments
            # Fragments too: where a schedule changes `every`, their times may move past them.
            waited = self.steps >= max(1, round(every * self.pace))
            return waited or (count > 1 and self.steps > 0 and is_due(turn.step, every, self._fragment, count))
        return turn.kind == "end" and self._differs

    def before_step(self) -> None:
        self._bind()
        if not self._set_weights.updating and self._starts.leave(self.parameters):
            self._set_weights.note(self.parameters)
        self._look()
        self._count_ddp()

    def before_update(self) -> None:
        # What hooks have set within the step is no training either.
        self._look()
        self._set_weights.updating = True

    def after_update(self) -> None:
        self._set_weights.note(self.parameters)
        self._moments.stepped(self.optimizer, self.parameters)
        self._noted = True

    def after_step(self) -> None:
        self.steps += 1
        if self._noted:
            self._look()
        else:
            self._set_weights.note(self.parameters)
        self._noted = False

    def prepare(self, turn: Turn) -> None:
        self._bind()
        self._last = turn.kind == "end"
        if not self.parameters:
            return
        with self.wire.ledger.exchanging():
            if self._last:
                self._look()
            device = self.parameters[0][1].device
            found = self._set_weights.agree([name for name, _ in self.parameters], self.wire, device)
            self._set = {name: weight.detach() for name, weight in self.parameters if name in found}
            # One that is not finite stays in the exchange, which refuses it on all ranks.
            left_out = {name: weight for name, weight in self._set.items() if bool(weight.isfinite().all())}
            if left_out and self.wire.rank == 0:
                self._set_weights.warn(left_out)
            changes = scaled(self._starts.changes(self.parameters, left_out), self.weight)
            self.channel.prepare(changes, self._context(turn, "weight update"), self.wire.under(UPDATES))

    def exchange(self) -> None:
        if not self.parameters:
            return
        super().exchange()
        with self.wire.ledger.exchanging():
            if self._set:
                self._set = dict(zip(self._set, averaged(list(self._set.values()), self.wire)))
            if not self._last:
                self._moments.exchange(self.optimizer, self.parameters, self.wire)

    def commit(self) -> None:
        self._moments.commit(self.optimizer, self.parameters)
        if not self.parameters:
            self._reset_weights()
            return
        with self.wire.ledger.exchanging():
            exchanged = self.channel.commit()
            self.anchored.move(exchanged.shared, self.parameters, self.layout, self._set)
            for name, mean in self._set.items():
                self.anchored.of(name).copy_(mean)
                self._starts.enter(name)
            self._reset_weights()
            if self.sync.mask_momentum:
                mask_momentum_(self.optimizer, self.parameters, exchanged.sent, self.layout)
        self._count_sent(exchanged)

    def abort(self) -> None:
        """Sets the weights back to the anchors: what was trained since the last exchange is lost."""
        self.channel.abort()
        self._moments.abort()
        self._reset_weights()

    def take_back(self) -> None:
        """Sets the weights back to what was trained: start + change, which rounds where the change had rounded."""
        self.channel.abort()
        self._moments.abort()
        self._starts.take_back(self.parameters)
        self._set = {}

    def to_hand_out(self) -> list[tuple[Parameter, Tensor]]:
        weights = [weight for _, weight in (*self.parameters, *self.others.parameters)]
        kinds = [*(MOMENTA if self.sync.mask_momentum else ()), *self._moments.just_averaged]
        states = [(weight, self.optimizer.state.get(weight, {}).get(kind)) for kind in kinds for weight in weights]
        return self.in_common() + [(weight, state) for weight, state in states if state is not None]

    def in_common(self) -> list[tuple[Parameter, Tensor]]:
        return self.anchored.in_common(self.parameters) + self.others.in_common()

    def shared_weights(self) -> list[tuple[Tensor, Tensor]]:
        return self.anchored.pairs(self.parameters) + self.others.pairs() if self._differs else []

    def state_dict(self) -> Saved:
        known = (*self.anchors, *self.others.values)
        if not known:
            return {}
        saved = self.channel.state_dict() | self.anchored.state_dict() if self.anchors else {}
        if self._set_weights.found:
            saved[_SET] = self._set_weights.state_dict()
        if self._set_weights.noted:
            # By this, what is set between now and the next step is found in a run that resumes too.
            saved[NOTED] = dict(self._set_weights.noted)
        saved[_STEPS] = dict.fromkeys(known, self.steps)
        saved |= self._starts.state_dict(list(known))
        if self.sync.moments:
            saved[_EXCHANGES] = dict.fromkeys(known, self._moments.exchanges)
        return add_prefix(type(self.sync).__name__, saved)

    def load_state_dict(self, saved: Saved) -> None:
        names = [name for name, _ in self.parameters]
        saved = _landed(strip_prefix(type(self.sync).__name__, saved), self.all_names)
        steps = pop_named(saved, _STEPS, self.all_names)
        self.steps = max(steps.values(), default=0)
        self._starts.load_state_dict(saved, self.all_names)
        # Their values come from the ranks that have them.
        self.others.make_room(steps)
        self._moments.exchanges = max(pop_named(saved, _EXCHANGES, self.all_names).values(), default=0)
        self._set_weights.load_state_dict(pop_named(saved, _SET, names))
        self._set_weights.load_noted(pop_named(saved, NOTED, names), self.parameters)
        self.channel.load_state_dict(saved, names)
        self.anchored.load_state_dict(saved, self.parameters)

    @property
    def _differs(self) -> bool:
        """Whether this rank's weights may be others than those that ranks share."""
        return self.steps > 0 or bool(self._starts.ahead)

    def _look(self) -> None:
        self._set_weights.look(self.parameters, trained=self._differs)

    def _reset_weights(self) -> None:
        """Sets the weights to where training goes on from."""
        self.steps = 0
        self.others.reset_weights()
        self._starts.reset(self.parameters, self._last)
        self._set_weights.note([(name, weight) for name, weight in self.parameters if name in self.anchors])
        self._set_weights.forget()
        self._set = {}

    def _bind(self) -> bool:
        self.others.note_new()
        new = super()._bind()
        if new:
            added = [(name, weight) for name, weight in self.parameters if name not in self.anchors]
            self.anchored.add(dict(added), self.parameters)
            # From now on, so also in the first step.
            self._set_weights.note(added)
        return new


def scaled(changes: Sequence[Tensor | None], weight: float) -> Sequence[Tensor | None]:
    """The changes times a factor. Not in place: `take_back` needs them as they were."""
    return changes if weight == 1 else [None if change is None else change * weight for change in changes]


def _landed(saved: Saved, names: Iterable[str]) -> Saved:
    """What was saved. Raises `ValueError` where an exchange of these parameters was in flight.

    What that has sent is in no residual any more, and not in the anchor yet.
    """
    if saved.get(IN_FLIGHT, {}).keys() & set(names):
        raise ValueError(
            "delay must be at least 1 to resume from a checkpoint that was saved with an exchange in flight; got"
            " delay=0. Resume with the delay that it had, or from a checkpoint that was saved when training ended."
        )
    return saved
