"""Gradients that ranks exchange every few steps; in between, each steps along its own."""

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparsecomm.basis import Layout, Round, Vector, Wire
from lightning_sparsecomm.basis.schedules import Every, every_at, every_for
from lightning_sparsecomm.channel.saved import Saved, add_prefix, pop_named, strip_prefix
from lightning_sparsecomm.exchange import NonFiniteGradientError
from lightning_sparsecomm.sharing.adam import show_moments
from lightning_sparsecomm.sharing.anchors import Anchors
from lightning_sparsecomm.sharing.gradient_share import GradientShare, SharesGradients
from lightning_sparsecomm.sharing.gradients import NamedParameters
from lightning_sparsecomm.sharing.share import Turn
from lightning_sparsecomm.sharing.takeover import learning_rates

# Kinds of state besides those of the channel and of the anchors.
_AHEAD, _PRESENT = "ahead", "present"


class SharesSometimes(SharesGradients, Protocol):
    """What a share reads besides of its `GradientSync`."""

    every: Every


class LocalStepsShare(GradientShare):
    """A `GradientShare` that exchanges in every H-th step, with H = `every`, the run's first step included.

        each step:       E ← E + η·u;   w ← anchor;   a step of the optimizer without gradient, such as weight decay
        every H steps:   S, what is sent of E, is exchanged;   E ← E − S;   w ← w − mean of S;   anchor ← w;   A ← 0
        in between:      anchor ← w;   A ← A + η·u;   w ← w − A

    u is what enters the residual E: with momentum a velocity, with `LocalAdam` a direction; η is the learning rate. So
    in between, a rank trains ahead of the anchor by its own u alone. The anchors are equal on all ranks, and are the
    model that is validated and saved. What residuals hold after the last step moves the weights then.

    Source: Basu et al. 2019, Qsparse-local-SGD, algorithm 1, with momentum and moments before the residual, and
    residuals in units of the learning rate.
    """

    sync: SharesSometimes

    def __init__(self, sync: SharesSometimes, optimizer: Optimizer, parameters: NamedParameters, wire: Wire) -> None:
        self._anchors = Anchors()
        # What weights are ahead of the anchors by, by name.
        self._ahead: dict[str, Tensor] = {}
        # Which parameters some rank had a gradient for in the last exchange, by name; equal on all ranks.
        self._present: dict[str, bool] = {}
        self._exchanges, self._ending = True, False
        self._end = Round(Layout([]))
        super().__init__(sync, optimizer, parameters, wire)
        self._finishes = sync.finish and self._follows_rate

    def extend(self, parameters: NamedParameters) -> None:
        names = {name for name, _ in parameters}
        if self._anchors.lack(names):
            # They leave with the shared weights.
            self._anchors.restore(self.parameters)
            self._anchors.keep(names)
            self._ahead = {name: ahead for name, ahead in self._ahead.items() if name in names}
        super().extend(parameters)

    def due(self, turn: Turn) -> bool:
        if turn.moment == "end":
            return self.unfinished or self._anchors.apart
        return super().due(turn)

    def prepare(self, turn: Turn) -> None:
        self._ending = turn.moment == "end"
        if self._ending:
            # A run that resumes with no step left has none yet.
            self._bind()
            if self._finishes:
                super().prepare(turn)
                assert self._waiting is not None
                if self.channel.missing.found_nonfinite(self.layout) is not None:
                    # It spreads to all ranks by the sum.
                    self._waiting.fill_(math.nan)
                self._end = self._context(turn)
            return
        self._anchors.check(self.parameters)
        self._bind()
        every = every_at(every_for(self.sync.every, turn.length), turn.step, turn.epoch)
        self._exchanges = turn.step % every == 0
        self._gradients = self._read()
        with self.wire.ledger.exchanging():
            context, settings = self._context(turn), self._settings(turn)
            self.channel.prepare(self._gradients, context, self.wire, settings, sends=self._exchanges)

    def exchange(self) -> None:
        if not self._ending:
            super().exchange()
        elif self._waiting is not None:
            super().exchange()
            if self._waiting.numel() and bool(self._waiting.isnan().all()):
                found = Vector(self._waiting, nonfinite_segment=self.channel.missing.found_nonfinite(self.layout))
                raise NonFiniteGradientError.somewhere(found, self._end, self.wire)

    def commit(self) -> None:
        if self._ending:
            self._settle()
            return
        names = [name for name, _ in self.parameters]
        with self.wire.ledger.exchanging():
            if not self._exchanges:
                self._go_ahead(names)
            exchanged = self.channel.commit()
        if self._adam is not None:
            show_moments(self.optimizer, self.parameters, self._adam)
        self.unfinished = self._finishes
        self._count_ddp()
        if self._exchanges:
            self._present = dict(zip(names, exchanged.present))
            self._count_sent(exchanged)
            self._ahead = {}
        here = [self._present.get(name, True) and weight.requires_grad for name, weight in self.parameters]
        for present, (_, weight) in zip(here, self.parameters):
            if not (present or self._exchanges):
                # Or the optimizer would step along this rank's own.
                weight.grad = None
        self._write(exchanged if self._exchanges else exchanged._replace(present=here))

    def _go_ahead(self, names: list[str]) -> None:
        """Counts this step's part of what weights are ahead by."""
        entering = self.channel.residuals[-1].entering()
        rates = learning_rates(self.optimizer, self.parameters)
        for name, part, rate in zip(names, entering, rates):
            if part is None:
                continue
            if name not in self._ahead:
                self._ahead[name] = torch.zeros_like(part, dtype=self.channel.dtype)
            self._ahead[name].add_(part, alpha=rate)

    def before_update(self) -> None:
        self._anchors.restore(self.parameters)

    def after_update(self) -> None:
        if not self._ahead:
            return
        with self.wire.ledger.exchanging(), torch.no_grad():
            signs = self._signs()
            self._anchors.take(self.parameters)
            for name, weight in self.parameters:
                if name in self._ahead:
                    weight.detach().sub_(self._ahead[name].to(weight.dtype), alpha=signs[name])
            self._anchors.note(self.parameters)

    def abort(self) -> None:
        """Sets the weights to the anchors; residuals hold what ranks have trained since the last exchange."""
        super().abort()
        self._ending = False
        self._ahead = {}
        self._anchors.restore(self.parameters)

    def shared_weights(self) -> list[tuple[Tensor, Tensor]]:
        return self._anchors.pairs(self.parameters)

    def state_dict(self) -> Saved:
        ours = {**self._anchors.state_dict(), _AHEAD: self._ahead}
        if not all(self._present.values()):
            ours[_PRESENT] = {name: torch.tensor(here) for name, here in self._present.items()}
        kinds = {f"local steps, {kind}": parts for kind, parts in ours.items() if parts}
        return super().state_dict() | add_prefix(type(self.sync).__name__, kinds)

    def load_state_dict(self, saved: Saved) -> None:
        ours, weights = strip_prefix(type(self.sync).__name__, saved), dict(self.parameters)

        def taken(kind: str) -> dict[str, Tensor]:
            parts = pop_named(ours, f"local steps, {kind}", list(weights))
            return {name: part.to(weights[name].device, copy=True) for name, part in parts.items()}

        self._anchors.load_state_dict(taken, self.parameters)
        self._ahead = taken(_AHEAD)
        self._present = {name: bool(here) for name, here in taken(_PRESENT).items()}
        super().load_state_dict(saved)

    def _settle(self) -> None:
        """Moves the shared weights by the mean of what waits in residuals."""
        waiting, self._ending = self._waiting, False
        self._anchors.restore(self.parameters)
        self._ahead = {}
        if waiting is not None:
            self._forget_waiting()
            self._move(waiting)
