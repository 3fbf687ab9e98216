"""Gradients whose exchange takes place while the next ones are computed."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparsecomm.basis import GRADIENTS, Wire
from lightning_sparsecomm.basis.stream import Stream
from lightning_sparsecomm.channel import MomentumCorrection
from lightning_sparsecomm.channel.saved import Saved, add_prefix, pop_named, strip_prefix
from lightning_sparsecomm.sharing.adam import show_moments
from lightning_sparsecomm.sharing.anchors import Anchors
from lightning_sparsecomm.sharing.arrived import ArrivedGradients, Leftovers, number
from lightning_sparsecomm.sharing.gradient_share import GradientShare, SharesGradients
from lightning_sparsecomm.sharing.gradients import NamedParameters, write_gradients
from lightning_sparsecomm.sharing.in_flight import InFlightShare
from lightning_sparsecomm.sharing.local_mode import LOCAL_MODES
from lightning_sparsecomm.sharing.share import Turn
from lightning_sparsecomm.sharing.takeover import learning_rates


class LateShare(InFlightShare[None], GradientShare):
    """A `GradientShare` whose exchange starts in one step, and which the next step uses.

        step t:   the exchange of the gradient of t starts;   w ← anchor − η · what that of t − 1 has shared
                  anchor ← w;   w ← w − θ · η · this rank's own gradient of t

    So the next forward and backward pass, during which the exchange takes place, find weights to which this rank's own
    gradient stands in for the mean. Without that, training at a rate that suits ddp may diverge, since all weights lag
    a step behind. Gradients here are what enters the residual: with momentum a velocity, with `LocalAdam` a direction;
    θ is 1, or for directions `Coherence.ahead`.

    The anchors are equal on all ranks, and are the model that is validated and saved. Selection, coding and collectives
    run in the stream's thread; who needs the memories meanwhile, such as a save, waits for it. What was shared counts
    at the learning rate of the step that computed it. A step whose rate is below a thousandth of that leaves it to
    later ones, and what none has used moves the weights when training ends.

    Source: Kale et al. 2025, Eager Updates for Overlapped Communication and Computation in DiLoCo, there for changes of
    weights. For gradients, with a residual, it is ours.
    """

    def __init__(self, sync: SharesGradients, optimizer: Optimizer, parameters: NamedParameters, wire: Wire) -> None:
        self._stream = Stream(wire)
        self._prepared: Wire | None = None
        self._arrived: ArrivedGradients | None = None
        self._left = Leftovers()
        self._rates: tuple[float, ...] = ()
        self._anchors = Anchors()
        # By name, the gradients that an exchange reads, and those that the one before it has read: memory for `.grad`.
        self._spent: dict[str, Tensor] = {}
        self._read_now: dict[str, Tensor] = {}
        # What weights will be ahead of the anchors by when the next step has been made, by name, and at which rates.
        self._own: dict[str, Tensor] = {}
        self._own_rates: dict[str, float] = {}
        self._ending = False
        super().__init__(sync, optimizer, parameters, wire)

    def extend(self, parameters: NamedParameters) -> None:
        self._finish_between_turns()
        names = {name for name, _ in parameters}
        if self._anchors.lack(names):
            # They leave with the shared weights, and without what has arrived for them.
            self._anchors.restore(self.parameters)
            self._arrived = self._arrived and self._arrived.of(names)
            self._left.keep(names)
            self._anchors.keep(names)
        super().extend(parameters)

    def due(self, turn: Turn) -> bool:
        if turn.kind == "end":
            return self.unfinished or self._anchors.apart or self._arrived is not None or bool(self._left)
        return super().due(turn)

    def prepare(self, turn: Turn) -> None:
        self._finish()
        self._ending = turn.kind == "end"
        if self._ending:
            # A run that resumes with no step left has none yet.
            self._bind()
            if self._finishes:
                super().prepare(turn)
            return
        self._anchors.check(self.parameters)
        self._bind()
        gradients, wire = self._read(), self._stream.wire(GRADIENTS)
        names = [name for name, _ in self.parameters]
        self._spent = self._read_now
        self._read_now = {name: gradient for name, gradient in zip(names, gradients) if gradient is not None}
        self._rates = tuple(learning_rates(self.optimizer, self.parameters))
        # Now, as no exchange is in flight, which measures what they follow.
        self._own_rates = dict(zip(names, self._rates_ahead()))
        with self.wire.ledger.exchanging():
            self.channel.prepare(gradients, self._context(turn), wire, self._settings(turn))
            entering = zip(names, self.channel.residuals[-1].entering())
            # What masks its velocity does so in place, and before the step where a save waits for the exchange.
            masks = any(isinstance(each, MomentumCorrection) and each.mask for each in self.channel.memories)
            self._own = {name: part.clone() if masks else part for name, part in entering if part is not None}
        self._prepared = wire

    def exchange(self) -> None:
        if self._waiting is not None:
            super().exchange()
        elif self._prepared is not None:
            wire, self._prepared = self._prepared, None
            self._flight = self._stream.start(lambda _: self.channel.run(), wire)

    def commit(self) -> None:
        if self._ending:
            self._settle()
            return
        self.unfinished = self._finishes
        self._count_ddp()
        self._use()

    def before_update(self) -> None:
        self._anchors.restore(self.parameters)

    def after_update(self) -> None:
        with self.wire.ledger.exchanging(), torch.no_grad():
            signs = self._signs()
            self._anchors.take(self.parameters)
            for name, weight in self.parameters:
                if name in self._own:
                    own = self._own[name].to(weight.dtype)
                    weight.detach().sub_(own, alpha=self._own_rates[name] * signs[name])
            self._own = {}
            self._anchors.note(self.parameters)

    def abort(self) -> None:
        """Sets the weights to the anchors. What is in flight is waited for, and void.

        What has arrived before is left to the next step.
        """
        self.torn = self.torn or self._flight is not None
        self._void()
        self._prepared, self._own = None, {}
        super().abort()
        self._anchors.restore(self.parameters)

    def shared_weights(self) -> list[tuple[Tensor, Tensor]]:
        return self._anchors.pairs(self.parameters)

    def state_dict(self) -> Saved:
        self._finish_between_turns()
        ours = {**self._left.state_dict(), **self._anchors.state_dict()}
        if self._arrived is not None:
            ours |= self._arrived.state_dict()
        if self._own:
            # A save between the exchange and the optimizer's step.
            ours |= {"own": self._own, "own rate": {name: number(rate) for name, rate in self._own_rates.items()}}
        kinds = {f"late, {kind}": parts for kind, parts in ours.items() if parts}
        return super().state_dict() | add_prefix(type(self.sync).__name__, kinds)

    def load_state_dict(self, saved: Saved) -> None:
        ours, weights = strip_prefix(type(self.sync).__name__, saved), dict(self.parameters)

        def taken(kind: str) -> dict[str, Tensor]:
            parts = pop_named(ours, f"late, {kind}", list(weights))
            return {name: part.to(weights[name].device, copy=True) for name, part in parts.items()}

        self._arrived = ArrivedGradients.loaded(taken("shared"), taken("present"), taken("rate"))
        self._left.load_state_dict(taken("left"), taken("rate of what is left"))
        self._anchors.load_state_dict(taken, self.parameters)
        self._own = taken("own")
        self._own_rates = {name: float(rate) for name, rate in taken("own rate").items()}
        super().load_state_dict(saved)

    def _finish(self) -> None:
        """Waits for what is in flight, and lets memories forget what was sent. Nothing is used yet."""
        with self.wire.ledger.exchanging():
            try:
                landed = self._land()
            except BaseException:
                # The step that computed this gradient counts.
                self.torn = True
                raise
            if landed is None:
                return
            if self._adam is not None:
                show_moments(self.optimizer, self.parameters, self._adam)
            exchanged = landed[1]
            if isinstance(exchanged.shared, Tensor):
                # The next exchange, which starts before this one is used, may write to the same memory.
                exchanged = exchanged._replace(shared=exchanged.shared.clone())
            self._arrived = ArrivedGradients(exchanged, self.layout, self._rates)

    def _use(self) -> None:
        """Writes what has arrived to `.grad`, in other memory than the gradients that are in flight."""
        arrived, self._arrived = self._arrived, None
        here, spent, self._spent = dict(self.parameters), self._spent, {}
        if arrived is None:
            for parameter in here.values():
                parameter.grad = None
            return
        with self.wire.ledger.exchanging():
            exchanged = arrived.at(dict(zip(here, self._rates)), self._left)
            present = dict(zip(arrived.names, exchanged.present))
            for name, parameter in here.items():
                parameter.grad = spent.get(name) if present.get(name) else None
            known = [(name, here[name]) for name in arrived.names]
            write_gradients(known, exchanged, arrived.layout, LOCAL_MODES["none"], self.wire.world_size)

    def _settle(self) -> None:
        """Moves the weights by what no step has used, and by the mean of what waits in residuals."""
        waiting, self._ending = self._waiting, False
        self._read_now = {}
        if waiting is not None:
            self._forget_waiting()
        self._anchors.restore(self.parameters)
        arrived, self._arrived = self._arrived, None
        if waiting is None:
            waiting = torch.zeros(self.layout.size, dtype=self.channel.dtype, device=self.channel.device)
        parts = dict(zip((name for name, _ in self.parameters), self.layout.views(waiting)))
        for changes in (arrived.changes() if arrived is not None else {}, self._left.changes()):
            for name, change in changes.items():
                parts[name].add_(change)
        self._move(waiting)
