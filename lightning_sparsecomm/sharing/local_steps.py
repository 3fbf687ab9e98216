"""Gradients that ranks exchange every few steps; in between, each steps along its own."""

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparsecomm.basis import Vector, Wire
from lightning_sparsecomm.basis.schedules import Every, exchanges_in
from lightning_sparsecomm.channel.saved import Saved, add_prefix, pop_named, strip_prefix
from lightning_sparsecomm.exchange import NonFiniteGradientError
from lightning_sparsecomm.sharing.adam import show_moments
from lightning_sparsecomm.sharing.ahead import Ahead
from lightning_sparsecomm.sharing.gradient_share import LAST_EXCHANGE, GradientShare, SharesGradients
from lightning_sparsecomm.sharing.gradients import NamedParameters
from lightning_sparsecomm.sharing.own_step import OwnStep
from lightning_sparsecomm.sharing.share import Turn

# Kinds of state besides those of the channel and of the weights.
_PRESENT, _ALONE = "present", "alone"

_NEVER = -(2**40)


class SharesSometimes(SharesGradients, Protocol):
    """What a share reads besides of its `GradientSync`."""

    every: Every
    residual_in_weights: bool


class LocalStepsShare(GradientShare):
    """A `GradientShare` that exchanges in every H-th step, with H = `every`, and in the last one of each epoch.

    An exchange that would follow that by no more than H/2 steps is left out.

        each step:       E ← E + η·u;   w ← anchor;   a step of the optimizer without gradient, such as weight decay
        every H steps:   S, what is sent of E, is exchanged;   E ← E − S;   w ← w − mean of S;   anchor ← w;   A ← 0
        in between:      anchor ← w;   A ← A + θ·η·u;   w ← w − A

    With `residual_in_weights`, an exchange leaves A ← θ·E, of what a rank has trained and not sent, and w ← w − A; not
    at the end of an epoch, where w is what all share.

    η is the learning rate. u is what enters the residual E: with momentum a velocity, with `LocalAdam` a direction. θ
    is 1, or for directions `Coherence.ahead`. Other code finds u, without θ, in `.grad`; what it changes there enters E
    too. The anchors are equal on all ranks, and are the model that is validated and saved. At the end of training, E is
    averaged and applied to them. The first step exchanges, also where local steps begin amid a run.

    Where other code changes weights that are ahead, the next exchange takes over the mean of its changes. A rank that
    has such changes refuses that exchange, as if a gradient were not finite: so all know, and repeat it.

    Source: Basu et al. 2019, Qsparse-local-SGD, algorithm 1, with momentum and moments before the residual, and
    residuals in units of the learning rate.
    """

    sync: SharesSometimes

    def __init__(self, sync: SharesSometimes, optimizer: Optimizer, parameters: NamedParameters, wire: Wire) -> None:
        self._weights, self._own = Ahead(), OwnStep(optimizer)
        # Which parameters some rank had a gradient for in the last exchange, by name; equal on all ranks.
        self._present: dict[str, bool] = {}
        self._turn, self._exchanges, self._rejoins = Turn("end", 0), True, True
        # The step of the last exchange, in steps finished before; equal on all ranks.
        self._last = _NEVER
        # Whether the optimizer's next step is this rank's own.
        self._alone = False
        # What was not finite since the last exchange.
        self._nonfinite: str | None = None
        super().__init__(sync, optimizer, parameters, wire)

    def extend(self, parameters: NamedParameters) -> None:
        if self._weights.anchors.lack(names := {name for name, _ in parameters}):
            self._weights.keep(self.parameters, names)
        super().extend(parameters)

    @property
    def _ending(self) -> bool:
        return self._turn.kind == "end"

    def due(self, turn: Turn) -> bool:
        if turn.kind == "end":
            return self.unfinished or self._weights.anchors.apart
        return super().due(turn)

    def prepare(self, turn: Turn) -> None:
        self._turn = turn
        self._own.forget()
        self._bind()
        if self._ending:
            self._weights.look(self.parameters, self._signs)
            # A run that resumes with no step left has none yet.
            if self._finishes:
                super().prepare(turn)
                assert self._waiting is not None
                if self.channel.missing.refused_segment(self.layout) is not None:
                    # It spreads to all ranks by the sum.
                    self._waiting.fill_(math.nan)
            return
        every = turn.every(self.sync.every)
        # Whether this step's exchange leaves no rank ahead.
        self._rejoins = often = turn.ends_epoch or self._weights.set.again_and_again or self._beside_rows()
        # After steps were set back, as if there had been none.
        since = turn.step - self._last if turn.step > self._last else every
        self._exchanges = self._last == _NEVER or exchanges_in(turn.step, every, since, often)
        if self._exchanges:  # otherwise `before_update` looks, before it sets weights to the anchors
            self._weights.look(self.parameters, self._signs)
        self._gradients = self._read()
        missing = self.channel.missing
        self._nonfinite = missing.refuses
        if self._exchanges and self._weights.set.changes and missing.refuses is None:
            missing.refuses = next(iter(self._weights.set.changes))
        self._enter()

    def _enter(self) -> None:
        with self.wire.ledger.exchanging():
            context, settings = self._context(self._turn, _quantity(self._last, self._turn)), self._settings(self._turn)
            self.channel.prepare(self._gradients, context, self.wire, settings, sends=self._exchanges)

    def exchange(self) -> None:
        if self._ending:
            self._finish()
            return
        try:
            super().exchange()
        except NonFiniteGradientError:
            if not self._agree():
                raise
            self.channel.abort()
            self.channel.missing.refuses = self._nonfinite
            self._enter()
            super().exchange()

    def _agree(self) -> bool:
        """Averages what other code has changed in weights that are ahead, if any rank has such changes."""
        with self.wire.ledger.exchanging():
            return self._weights.agree(self.parameters, self.wire)

    def _finish(self) -> None:
        """Averages what other code has changed, and what waits, if anything does."""
        self._agree()
        if self._waiting is None:
            return
        super().exchange()
        if self._waiting.numel() and bool(self._waiting.isnan().all()):
            found = Vector(self._waiting, nonfinite_segment=self.channel.missing.refused_segment(self.layout))
            raise NonFiniteGradientError.somewhere(found, self._context(self._turn), self.wire)

    def commit(self) -> None:
        if self._ending:
            self._weights.rejoin(self.parameters, warns=self.wire.rank == 0)
            if self._waiting is not None:
                super().commit()
            return
        names = [name for name, _ in self.parameters]
        # Before memories commit, which read the gradients that this is written over.
        entering = [] if self._exchanges else self.channel.residuals[-1].entering()
        with self.wire.ledger.exchanging():
            exchanged = self.channel.commit()
        if self._adam is not None:
            show_moments(self.optimizer, self.parameters, self._adam)
        self.unfinished = self._finishes
        self._count_ddp()
        if self._exchanges:
            self._last = self._turn.step
            self._present = dict(zip(names, exchanged.present))
            self._count_sent(exchanged)
            self._write(exchanged)
            self._weights.rejoin(self.parameters, warns=self.wire.rank == 0)
            if self.sync.residual_in_weights and not self._rejoins:
                self._weights.by = self._ahead_by_residual()
        else:
            moves = [self._present.get(name, True) and weight.requires_grad for name, weight in self.parameters]
            self._own.write(entering or [None] * len(names), self.parameters, moves)
        self._alone = not self._exchanges

    def before_update(self) -> None:
        self._weights.look(self.parameters, self._signs)
        self._weights.anchors.restore(self.parameters)
        if self._alone:
            self._own.amend(self.channel.residuals[-1], self.parameters, warns=self.wire.rank == 0)
            for (name, weight), rate in zip(self.parameters, self._rates_ahead()):
                if weight.grad is not None:
                    self._weights.add(name, weight.grad, rate, self.channel.dtype)
            self._own.hide(weight for _, weight in self.parameters)

    def after_update(self) -> None:
        self._own.show()
        self._alone = False
        with self.wire.ledger.exchanging(), torch.no_grad():
            self._weights.leave(self.parameters, self._signs)

    def abort(self) -> None:
        """Sets the weights to the anchors; residuals hold what ranks have trained since the last exchange."""
        super().abort()
        self._own.forget()
        self._alone = False
        self._weights.drop(self.parameters)

    def before_view(self) -> None:
        with self.wire.in_step(), torch.no_grad():
            self._weights.look(self.parameters, self._signs)
            self._agree()

    def shared_weights(self) -> list[tuple[Tensor, Tensor]]:
        return self._weights.pairs(self.parameters)

    def state_dict(self) -> Saved:
        names = [name for name, _ in self.parameters]
        ours = self._weights.state_dict(names)
        if not all(self._present.values()):
            ours[_PRESENT] = {name: torch.tensor(here) for name, here in self._present.items()}
        if self._last != _NEVER:
            ours[LAST_EXCHANGE] = {name: torch.tensor(self._last) for name in names[:1]}
        if self._alone:
            # A save between the gradients and the optimizer's step.
            ours[_ALONE] = {name: torch.tensor(True) for name in names[:1]}
        kinds = {f"local steps, {kind}": parts for kind, parts in ours.items() if parts}
        return super().state_dict() | add_prefix(type(self.sync).__name__, kinds)

    def load_state_dict(self, saved: Saved) -> None:
        ours, weights = strip_prefix(type(self.sync).__name__, saved), dict(self.parameters)

        def taken(kind: str) -> dict[str, Tensor]:
            parts = pop_named(ours, f"local steps, {kind}", list(weights))
            return {name: part.to(weights[name].device, copy=True) for name, part in parts.items()}

        self._weights.load_state_dict(taken, self.parameters)
        self._present = {name: bool(here) for name, here in taken(_PRESENT).items()}
        self._alone = bool(taken(_ALONE))
        self._last = max((int(step) for step in taken(LAST_EXCHANGE).values()), default=_NEVER)
        super().load_state_dict(saved)


def _quantity(last: int, turn: Turn) -> str:
    """What ranks share, in messages: gradients since the last exchange."""
    return f"gradient of steps {last + 1} to {turn.step}" if 0 <= last < turn.step - 1 else "gradient"
