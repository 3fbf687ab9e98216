"""What runs an exchange of gradients for one optimizer."""

import warnings
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.channel import AdamMoments, Channel, LocalAdam, StepSettings
from lightning_sparsecomm.channel.momentum import Velocity
from lightning_sparsecomm.channel.saved import Saved, add_prefix, pop_named, strip_prefix
from lightning_sparsecomm.exchange import Exchanged
from lightning_sparsecomm.sharing.adam import adam_rules, show_moments
from lightning_sparsecomm.sharing.averaging import average_
from lightning_sparsecomm.sharing.gradients import (
    NamedParameters,
    gradient_of,
    has_few_rows,
    write_gradients,
    write_sparse_gradients,
)
from lightning_sparsecomm.sharing.hand_back import averaged_residuals, hand_back
from lightning_sparsecomm.sharing.local_mode import LOCAL_MODES, SharedName
from lightning_sparsecomm.sharing.share import Share, Turn
from lightning_sparsecomm.sharing.takeover import has_momentum, learning_rates, mask_momentum_, momentum_rules

# What momentum after the exchange was given at a small rate counts at later, larger ones.
_LEAST_RATE_BEFORE_MOMENTUM = 0.1

LAST_EXCHANGE = "last exchange"
"""In state of local steps, the step of the last exchange."""


class SharesGradients(Protocol):
    """What a share reads of its `GradientSync`, which says what each means."""

    channel: Channel
    local: SharedName
    mask_momentum: bool
    takes_sparse: bool | None
    drifts: bool

    def follows_rate(self, optimizer: Optimizer) -> bool: ...

    def finishes(self, optimizer: Optimizer) -> bool: ...


class GradientShare(Share):
    """Runs a `GradientSync` for one optimizer.

    Attributes:
        weight: Factor on this rank's gradients in the mean; 0 leaves them out. For replicas that come and go.
        steps: Always 0: nothing is trained between exchanges.
        unfinished: Whether something may wait that is to be applied when training ends.
    """

    weight = 1.0
    steps = 0
    unfinished = False

    def __init__(self, sync: SharesGradients, optimizer: Optimizer, parameters: NamedParameters, wire: Wire) -> None:
        self.sync = sync
        self.channel = sync.channel.fresh()
        self.channel.exchange.check_ranks(wire.world_size)
        self._applies_momentum = any(isinstance(memory, Velocity) for memory in self.channel.memories)
        self._adam = next(parts_in(self.channel, AdamMoments), None)  # type: ignore[type-abstract]
        self._follows_rate = sync.follows_rate(optimizer)
        self._gradients: list[Tensor | None] = []
        # What waits at the end, then its mean over ranks; None in all other turns.
        self._waiting: Tensor | None = None
        # Whether each parameter was trained in the optimizer's last step: in another one's turn it may be frozen.
        self._trained: dict[str, bool] = {}
        self._finishes = sync.finishes(optimizer)
        super().__init__(optimizer, parameters, wire)

    def due(self, turn: Turn) -> bool:
        return turn.kind == "gradients" or (turn.kind == "end" and self.unfinished)

    def skip(self) -> None:
        # ddp sends gradients before it finds that they are not finite.
        self._gradients = self._read()
        self._count_ddp()

    def prepare(self, turn: Turn) -> None:
        self._bind()
        if turn.kind == "end":
            self._waiting = self._waits()
            return
        settings = self._settings(turn)
        self._gradients = self._read()
        sparse = bool(self.sync.takes_sparse)
        with self.wire.ledger.exchanging():
            gradients = _times(self._gradients, self.weight)
            self.channel.prepare(gradients, self._context(turn), self.wire, settings, sparse)

    def _settings(self, turn: Turn) -> StepSettings:
        """What the optimizer prescribes for this step."""
        self._trained = {name: weight.requires_grad for name, weight in self.parameters}
        rules = momentum_rules(self.optimizer, self.parameters) if self._applies_momentum else ()
        rates = learning_rates(self.optimizer, self.parameters) if self._follows_rate else ()
        adam = adam_rules(self.optimizer, self.parameters) if self._adam is not None else ()
        settings = StepSettings(rules, turn.gradient_norm, turn.max_norm, rates, adam, self.weight)
        if self._applies_momentum or self._adam is not None or not has_momentum(self.optimizer):
            return settings
        return settings._replace(least_rate=_LEAST_RATE_BEFORE_MOMENTUM)

    def exchange(self) -> None:
        if self._waiting is None:
            super().exchange()
            return
        with self.wire.ledger.exchanging():
            average_([self._waiting], self.wire)

    def commit(self) -> None:
        if self._waiting is not None:
            self._move(self._waiting)
            self._forget_waiting()
            return
        with self.wire.ledger.exchanging():
            exchanged = self.channel.commit()
        if self._adam is not None:
            show_moments(self.optimizer, self.parameters, self._adam)
        self.unfinished = self._finishes
        self._count_ddp()
        self._count_sent(exchanged)
        self._write(exchanged)

    def abort(self) -> None:
        self.channel.abort()
        self._gradients = []
        self._waiting = None

    def hand_back(self) -> dict[int, Tensor]:
        if self._bound is None:
            return {}
        hand_back(self.optimizer, self.parameters, self.channel, self.wire)
        # What follows the learning rate was delivered in the turn at the end.
        return {} if self._finishes else averaged_residuals(self.parameters, self.channel, self.wire)

    def _waits(self) -> Tensor:
        """What this rank has not sent, as a change of weights over the layout.

        Unknown learning rates, before the first step after resuming from an old checkpoint, count as 0.
        """
        waiting = [each.waiting(self.layout) for each in self.channel.residuals]
        if not waiting:
            return torch.zeros(())
        for other in waiting[1:]:
            waiting[0] += other
        return waiting[0]

    def _ahead_by_residual(self) -> dict[str, Tensor]:
        """By name of a trained parameter, the part of its residual that a rank trains ahead by."""
        parts = zip(self.parameters, self.layout.views(self._waits()), self._ahead())
        trained = [(name, part, ahead) for (name, weight), part, ahead in parts if weight.requires_grad]
        return {name: part if ahead == 1 else part.mul_(ahead) for name, part, ahead in trained}

    def _rates_ahead(self) -> list[float]:
        """For each parameter, how far a rank trains ahead along what enters its residual."""
        rates = learning_rates(self.optimizer, self.parameters)
        return [rate * ahead for rate, ahead in zip(rates, self._ahead())]

    def _ahead(self) -> list[float]:
        adam, ranks = self._adam, self.wire.world_size
        return [adam.ahead(name, ranks) if isinstance(adam, LocalAdam) else 1.0 for name, _ in self.parameters]

    def _beside_rows(self) -> bool:
        """Whether the optimizer also trains tables of few rows, by SGD.

        These move in each step. Layers that are ahead of them meanwhile, each rank's by its own steps, diverged at a
        rate that suits ddp.
        """
        weights = (weight for group in self.optimizer.param_groups for weight in group["params"])
        return self._adam is None and any(has_few_rows(weight) for weight in weights)

    def _forget_waiting(self) -> None:
        for residual in self.channel.residuals:
            residual.forget()
        self._waiting = None
        self.unfinished = False

    def _move(self, change: Tensor) -> None:
        """Moves the weights by a change over the layout that is equal on all ranks, as SGD would by its step."""
        signs, dropped = self._signs(), []
        for (name, weight), part in zip(self.parameters, self.layout.views(change)):
            if self._trained.get(name, weight.requires_grad):
                weight.detach().sub_(part, alpha=signs[name])
            elif bool(part.any()):
                dropped.append(name)
        if dropped and self.wire.rank == 0:
            warnings.warn(
                f"{dropped[0]!r} and {len(dropped) - 1} other parameter(s) were frozen in training, and what still"
                " waited for them is dropped: with ddp they would have moved by it before. Freeze parameters from the"
                " start, or give them to a sync that sends them whole (exclude=[...]).",
                stacklevel=2,
            )

    def _signs(self) -> dict[str, int]:
        """By name, -1 where the optimizer maximizes, else 1."""
        rising = {
            id(weight)
            for group in self.optimizer.param_groups
            # Local moments have the sign in them already.
            if group.get("maximize") and self._adam is None
            for weight in group["params"]
        }
        return {name: -1 if id(weight) in rising else 1 for name, weight in self.parameters}

    def _write(self, exchanged: Exchanged) -> None:
        sync = self.sync
        if self.weight == 0:
            # Those of this rank count for nothing, so where no other has one there is none.
            for here, (_, parameter) in zip(exchanged.present, self.parameters):
                parameter.grad = parameter.grad if here else None
        if sync.mask_momentum:
            # Replicas that stay equal mask where any rank has sent; those that drift, where this one has.
            sent = exchanged.sent if sync.drifts else exchanged.shared
            mask_momentum_(self.optimizer, self.parameters, sent, self.layout)
        if sync.takes_sparse:
            write_sparse_gradients(self.parameters, exchanged, self.layout)
        else:
            local = LOCAL_MODES[sync.local]
            write_gradients(self.parameters, exchanged, self.layout, local, self.wire.world_size)

    def _count_ddp(self) -> None:
        if self.sync.takes_sparse:
            ledger, gradients = self.wire.ledger, [each for each in self._gradients if each is not None]
            # DDP hands indices and values to an all-gather.
            ledger.ddp_gathered_bytes += sum(t.nbytes for each in gradients for t in (each.indices(), each.values()))
            ledger.elements += self.layout.size
        else:
            super()._count_ddp()
        self._gradients = []

    def _read(self) -> list[Tensor | None]:
        return [gradient_of(name, parameter) for name, parameter in self.parameters]

    def state_dict(self) -> Saved:
        return add_prefix(type(self.sync).__name__, self.channel.state_dict())

    def load_state_dict(self, saved: Saved) -> None:
        saved = strip_prefix(type(self.sync).__name__, saved)
        names = [name for name, _ in self.parameters]
        # Of a run that made local steps: of no use where this one makes none, and nothing to speak of.
        pop_named(saved, f"local steps, {LAST_EXCHANGE}", names)
        self.channel.load_state_dict(saved, names)
        self.unfinished = self._finishes


def _times(gradients: list[Tensor | None], weight: float) -> list[Tensor | None]:
    """The gradients times a factor; not in place. None at all where it is 0."""
    if weight == 1:
        return gradients
    return [None if gradient is None or weight == 0 else gradient * weight for gradient in gradients]
