"""What ranks hold that exchange the changes of their weights: anchors, and the outer optimizer that moves them."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sparsecomm.basis import UPDATES, SparseVector, Wire
from lightning_sparsecomm.basis.schedules import Every, every_at
from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.channel.saved import Saved, add_prefix, pop_named, strip_prefix
from lightning_sparsecomm.exchange import Exchanged
from lightning_sparsecomm.sharing.averaging import averaged
from lightning_sparsecomm.sharing.fragments import is_due
from lightning_sparsecomm.sharing.gradients import NamedParameters, add_, wide_dtype
from lightning_sparsecomm.sharing.moments import Moments, kept_by
from lightning_sparsecomm.sharing.outer import OuterOptimizer, load_outer, make_outer
from lightning_sparsecomm.sharing.set_weights import NOTED, SetWeights
from lightning_sparsecomm.sharing.share import Share, Turn
from lightning_sparsecomm.sharing.takeover import mask_momentum_

# Kinds of state besides that of the channel.
_ANCHORS, _STEPS, _OUTER, _SET = "anchor", "steps", "outer optimizer", "set by the user"
_EXCHANGES = "exchanges"


class Delayed(Protocol):
    """What a share reads of its `DeltaSync`, which says what each means."""

    channel: Channel
    every: Every
    outer: OuterOptimizer | None
    mask_momentum: bool
    fragments: int
    moments: Mapping[str, int]


class DeltaShare(Share):
    """Runs a `DeltaSync`, or a fragment of it, for one optimizer.

    Attributes:
        anchors: By parameter name, the weights that all ranks share, in float32 or wider; noted before the first step.
        steps: Optimizer steps since the last exchange.
        outer: Moves the anchors; None where the mean of the changes is added to them.
        weight, pace: Of an elastic replica: its change's factor in the mean, and the part of `every` steps it makes.
    """

    weight = pace = 1.0

    def __init__(
        self, sync: Delayed, optimizer: Optimizer, parameters: NamedParameters, wire: Wire, fragment: int = 0
    ) -> None:
        self.sync = sync
        self._fragment = fragment
        self.channel = sync.channel.fresh()
        self.anchors: dict[str, Parameter] = {}
        self.steps = 0
        self.outer: Optimizer | None = None
        self._set_weights = SetWeights()
        self._moments = Moments(kept_by(optimizer, sync.moments))
        # Whether this turn's exchange is the last one, after which no moments are used.
        self._last = False
        self._noted = False
        # In a turn: anchors of weights that were set, by name; before the exchange, this rank's own weights.
        self._set: dict[str, Tensor] = {}
        self._changed: list[tuple[Tensor, Tensor]] = []  # weights that hold their changes in a turn, with anchors
        super().__init__(optimizer, parameters, wire)

    def due(self, turn: Turn) -> bool:
        if turn.moment == "weights":
            every, count = every_at(self.sync.every, turn.step, turn.epoch), self.sync.fragments
            if count == 1:
                return self.steps >= max(1, round(every * self.pace))
            return self.steps > 0 and is_due(turn.step, every, self._fragment, count)
        return turn.moment == "end" and self.steps > 0

    def before_step(self) -> None:
        self._bind()
        self._look()
        self._count_ddp()

    def before_update(self) -> None:
        # What hooks have set within the step is no training either.
        self._look()

    def after_update(self) -> None:
        self._set_weights.note(self.parameters)
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
        self._last = turn.moment == "end"
        with self.wire.ledger.exchanging():
            names = [name for name, _ in self.parameters]
            if self._last:
                self._look()
            found = self._set_weights.agree(names, self.wire, self.parameters[0][1].device)
            self._set = {name: weight.detach() for name, weight in self.parameters if name in found}
            # One that is not finite stays in the exchange, which refuses it on all ranks.
            left_out = {name: weight for name, weight in self._set.items() if bool(weight.isfinite().all())}
            if left_out and self.wire.rank == 0:
                self._set_weights.warn(left_out)
            anchored = self._anchored()
            changes = [None if name in left_out else change_in(*pair) for name, pair in zip(names, anchored)]
            self._changed = [pair for pair, change in zip(anchored, changes) if change is pair[0]]
            changes = _times(changes, self.weight)
            self.channel.prepare(changes, self._context(turn, "weight update"), self.wire.under(UPDATES))

    def exchange(self) -> None:
        super().exchange()
        with self.wire.ledger.exchanging():
            if self._set:
                self._set = dict(zip(self._set, averaged(list(self._set.values()), self.wire)))
            if not self._last:
                self._moments.exchange(self.optimizer, self.parameters, self.wire)

    def commit(self) -> None:
        with self.wire.ledger.exchanging():
            exchanged = self.channel.commit()
            self._move(exchanged)
            for name, mean in self._set.items():
                self.anchors[name].detach().copy_(mean)
            self._reset_weights()
            self._moments.commit()
            if self.sync.mask_momentum:
                mask_momentum_(self.optimizer, self.parameters, exchanged.sent, self.layout)
        self._count_sent(exchanged)

    def abort(self) -> None:
        """Sets the weights back to the anchors: what was trained since the last exchange is lost."""
        self.channel.abort()
        self._moments.abort()
        self._reset_weights()

    def take_back(self) -> None:
        """Sets the weights back to what was trained: anchor + change, which rounds where the change had rounded."""
        self.channel.abort()
        self._moments.abort()
        for weight, anchor in self._changed:
            weight.add_(anchor)
        self._changed, self._set = [], {}

    def shared_weights(self) -> list[tuple[Tensor, Tensor]]:
        return self._anchored() if self.steps else []

    def state_dict(self) -> Saved:
        if not self.anchors:
            return {}
        saved = self.channel.state_dict()
        saved[_ANCHORS] = {name: anchor.detach() for name, anchor in self.anchors.items()}
        if self._set_weights.found:
            saved[_SET] = self._set_weights.state_dict()
        if self._set_weights.noted:
            # By this, what is set between now and the next step is found in a run that resumes too.
            saved[NOTED] = dict(self._set_weights.noted)
        saved[_STEPS] = dict.fromkeys(self.anchors, self.steps)
        if self.sync.moments:
            saved[_EXCHANGES] = dict.fromkeys(self.anchors, self._moments.exchanges)
        if self.outer is not None:
            moving = {name: self.outer.state.get(anchor) for name, anchor in self.anchors.items()}
            saved[_OUTER] = {name: dict(state) for name, state in moving.items() if state}
        return add_prefix(type(self.sync).__name__, saved)

    def load_state_dict(self, saved: Saved) -> None:
        names = [name for name, _ in self.parameters]
        saved = strip_prefix(type(self.sync).__name__, saved)
        anchors = pop_named(saved, _ANCHORS, names)
        self.steps = max(pop_named(saved, _STEPS, names).values(), default=0)
        self._moments.exchanges = max(pop_named(saved, _EXCHANGES, names).values(), default=0)
        self._set_weights.load_state_dict(pop_named(saved, _SET, names))
        self._set_weights.load_noted(pop_named(saved, NOTED, names), self.parameters)
        outer = pop_named(saved, _OUTER, names) if self.sync.outer is not None else {}
        self.channel.load_state_dict(saved, names)
        self._add_anchors(anchors)
        if self.outer is not None:
            load_outer(self.outer, {self.anchors[name]: moving for name, moving in outer.items()})

    def _anchored(self) -> list[tuple[Tensor, Tensor]]:
        """Each weight with its anchor. A parameter that has just been unfrozen has none before its first step."""
        known = [(name, weight) for name, weight in self.parameters if name in self.anchors]
        return [(weight.detach(), self.anchors[name].detach()) for name, weight in known]

    def _look(self) -> None:
        self._set_weights.look(self.parameters, trained=self.steps > 0)

    def _reset_weights(self) -> None:
        """Sets the weights to the anchors."""
        if pairs := self._anchored():
            torch._foreach_copy_([weight for weight, _ in pairs], [anchor for _, anchor in pairs])
            self.steps = 0
            self._set_weights.note(self.parameters)
        self._set_weights.forget()
        self._set, self._changed = {}, []

    def _bind(self) -> bool:
        new = super()._bind()
        if new:
            added = [(name, weight) for name, weight in self.parameters if name not in self.anchors]
            self._add_anchors(dict(added))
            # From now on, so also in the first step.
            self._set_weights.note(added)
        return new

    def _add_anchors(self, weights: Mapping[str, Tensor]) -> None:
        """Adds copies of these weights, by name, as anchors."""
        dtype, devices = wide_dtype(self.parameters), {name: weight.device for name, weight in self.parameters}
        new = {name: Parameter(each.detach().to(devices[name], dtype, copy=True)) for name, each in weights.items()}
        self.anchors.update(new)
        if self.outer is not None and new:
            self.outer.add_param_group({"params": list(new.values())})
        elif self.sync.outer is not None and new:
            self.outer = make_outer(self.sync.outer, list(new.values()))

    def _move(self, exchanged: Exchanged) -> None:
        shared = exchanged.shared
        if self.outer is None:
            add_([anchor for _, anchor in self._anchored()], shared, self.layout)
            return
        mean = shared.dense() if isinstance(shared, SparseVector) else shared
        names = [segment.name for segment in self.layout.segments]
        changes = zip(names, self.layout.views(mean), strict=True)
        self._move_by({name: change for name, change in changes if name not in self._set})

    def _move_by(self, changes: Mapping[str, Tensor]) -> None:
        move_by(self.anchors, self.outer, changes)


def move_by(anchors: Mapping[str, Parameter], outer: Optimizer | None, changes: Mapping[str, Tensor]) -> None:
    """Moves anchors by mean changes, given by name; with the outer optimizer, if there is one."""
    for name, change in changes.items():
        if outer is None:
            anchors[name].detach().add_(change)
        else:
            anchors[name].grad = change.neg().to(anchors[name].dtype)
    if outer is not None:
        outer.step()
        outer.zero_grad()


def change_in(weight: Tensor, anchor: Tensor) -> Tensor:
    """What a weight has changed since it was set to its anchor.

    Where dtypes are equal, the change overwrites the weight, which spares the memory of another model: weights are
    about to be set anew, by `abort` where the exchange fails.
    """
    if weight.dtype == anchor.dtype:
        return weight.sub_(anchor)
    return weight.to(anchor.dtype) - anchor.to(weight.dtype).to(anchor.dtype)


def _times(changes: list[Tensor | None], weight: float) -> list[Tensor | None]:
    """The changes times a factor. Not in place: `take_back` needs them as they were."""
    return changes if weight == 1 else [None if change is None else change * weight for change in changes]
