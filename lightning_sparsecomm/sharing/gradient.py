"""Gradients exchanged once per optimizer step, and written back to `.grad`."""

import copy
import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer

from lightning_sparsecomm.basis import Layout, Wire
from lightning_sparsecomm.basis.arguments import check_booleans, check_one_of
from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.channel import Channel, ClipLocalNorm, LocalAdam, Momentum, StepSettings
from lightning_sparsecomm.channel.momentum import Velocity
from lightning_sparsecomm.channel.saved import Saved, add_prefix, strip_prefix
from lightning_sparsecomm.exchange import Exchanged, SparseExchange
from lightning_sparsecomm.sharing.adam import adam_rules, show_moments
from lightning_sparsecomm.sharing.averaging import average_
from lightning_sparsecomm.sharing.gradients import NamedParameters, gradient_of, write_gradients, write_sparse_gradients
from lightning_sparsecomm.sharing.hand_back import averaged_residuals, hand_back
from lightning_sparsecomm.sharing.local_mode import LOCAL_MODES
from lightning_sparsecomm.sharing.share import Share, Turn
from lightning_sparsecomm.sharing.sync import Sync
from lightning_sparsecomm.sharing.takeover import learning_rates, mask_momentum_, momentum_rules


class GradientSync(Sync):
    """Exchanges gradients through a channel once per optimizer step, when the shared gradient is first needed.

    Until then, every rank's gradients stay its own: several backward passes, accumulation and unused parameters need no
    special care, and a memory takes in exactly what the optimizer consumes.

    >>> GradientSync(Channel(DenseAllReduce("bfloat16")), exclude=["*.bias"]).shares_gradients
    True

    Args:
        channel: Memories and exchange.
        parameters: Patterns of the parameters that go through it.
        exclude: Patterns of those that do not.
        min_dimensions: Parameters of fewer dimensions do not go through it.
        rest: Whether all that no other sync takes goes through it, whatever the patterns.
        local: What the optimizer sees of a rank's own gradient; see `LocalMode`. All but "none" let replicas drift.
        mask_momentum: Whether the optimizer's own momentum (SGD's `momentum_buffer`, Adam's `exp_avg`) is set to zero
            wherever the shared gradient holds something that was sent.
        sparse: Whether it takes exactly the matching parameters whose gradients are sparse tensors (layers with
            `sparse=True`), which stay sparse for the optimizer. Otherwise it takes exactly the others.
        finish: Whether what residuals still hold after the last step is exchanged whole, once, and moves the weights as
            SGD would. Without effect where the residual does not follow the learning rate, or where replicas drift.

    Raises:
        ValueError: Unknown `local`; or `sparse` with memories, a local mode, or an exchange of dense vectors only.
    """

    def __init__(
        self,
        channel: Channel,
        parameters: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        min_dimensions: int = 0,
        rest: bool = False,
        local: Literal["none", "sum", "partial"] = "none",
        mask_momentum: bool = False,
        sparse: bool = False,
        finish: bool = True,
    ) -> None:
        super().__init__(parameters, exclude, min_dimensions, rest)
        check_booleans(mask_momentum=mask_momentum, sparse=sparse, finish=finish)
        if not isinstance(channel, Channel):
            raise TypeError(f"channel must be a Channel; got {channel!r}. Use Channel(DenseAllReduce()), for example.")
        check_one_of(
            "local", local, LOCAL_MODES, "The paper's 'error' is 'partial' in a channel without ErrorFeedback."
        )
        if sparse and (channel.memories or not isinstance(channel.exchange, SparseExchange) or local != "none"):
            raise ValueError(
                "sparse=True needs a channel without memories, which are dense, an exchange that takes sparse vectors,"
                f" such as BlockReduce(), and local='none'; got {channel!r} and local={local!r}."
            )
        if (local != "none" or mask_momentum) and any(isinstance(memory, LocalAdam) for memory in channel.memories):
            raise ValueError(
                "local must be 'none' and mask_momentum False with LocalAdam, after which ranks share directions, not"
                f" gradients; got local={local!r} and mask_momentum={mask_momentum!r}. Use a channel without LocalAdam."
            )
        self.takes_sparse = sparse
        self.channel = channel
        self.local = local
        self.mask_momentum = mask_momentum
        self.finish = finish
        self.drifts = LOCAL_MODES[local].drifts

    def objection(self, optimizer: Optimizer) -> str | None:
        if isinstance(optimizer, LBFGS):
            return (
                "it evaluates the gradient several times per step, so a residual would count it more than once. Use"
                " methods.dense() or methods.federated_averaging(), or a first-order optimizer."
            )
        return self.channel.objection(optimizer)

    def check(self, parameters: NamedParameters) -> None:
        objection = self.channel.exchange.objection(Layout.of(parameters))
        if objection is not None:
            raise ValueError(objection)

    def joining(self, clip: ClipLocalNorm | None, momentum: Momentum | None) -> Sync:
        if self.takes_sparse or self.local != "none" or self.mask_momentum:
            raise ValueError(
                "a sync of sparse gradients, with a local mode, or that masks the optimizer's momentum leaves both to"
                " the optimizer. Give these parameters an optimizer of their own."
            )
        sync = copy.copy(self)
        memories = [memory for memory in (clip, *self.channel.memories, momentum) if memory is not None]
        sync.channel = Channel(self.channel.exchange, memories)
        return sync

    def start(self, optimizer: Optimizer, parameters: NamedParameters, wire: Wire) -> "GradientShare":
        return GradientShare(self, optimizer, parameters, wire)

    def __repr__(self) -> str:
        options = f", local={self.local!r}" if self.local != "none" else ""
        options += ", mask_momentum=True" if self.mask_momentum else ""
        options += ", sparse=True" if self.takes_sparse else ""
        options += "" if self.finish else ", finish=False"
        return f"GradientSync({self.channel!r}{self._patterns()}{options})"


class GradientShare(Share):
    """Runs a `GradientSync` for one optimizer."""

    def __init__(self, sync: GradientSync, optimizer: Optimizer, parameters: NamedParameters, wire: Wire) -> None:
        self.sync = sync
        self.channel = sync.channel.fresh()
        self._applies_momentum = any(isinstance(memory, Velocity) for memory in self.channel.memories)
        self._adam = next(parts_in(self.channel, LocalAdam), None)
        proportional = isinstance(optimizer, SGD) or self._adam is not None
        self._follows_rate = proportional and any(each.follow_rate for each in self.channel.residuals)
        self._gradients: list[Tensor | None] = []
        # What waits at the end, then its mean over ranks; None in all other turns.
        self._waiting: Tensor | None = None
        self._finishes = sync.finish and self._follows_rate and not sync.drifts
        self._unfinished = False
        super().__init__(optimizer, parameters, wire)

    def due(self, turn: Turn) -> bool:
        return turn.moment == "gradients" or (turn.moment == "end" and self._unfinished)

    def skip(self) -> None:
        # ddp sends gradients before it finds that they are not finite.
        self._gradients = self._read()
        self._count_ddp()

    def prepare(self, turn: Turn) -> None:
        self._bind()
        if turn.moment == "end":
            # Unknown learning rates, before the first step after resuming from an old checkpoint, count as 0.
            self._waiting = sum((each.waiting(self.layout) for each in self.channel.residuals), torch.zeros(()))
            return
        rules = momentum_rules(self.optimizer, self.parameters) if self._applies_momentum else ()
        rates = learning_rates(self.optimizer, self.parameters) if self._follows_rate else ()
        adam = adam_rules(self.optimizer, self.parameters) if self._adam is not None else ()
        settings = StepSettings(rules, turn.gradient_norm, turn.max_norm, rates, adam)
        self._gradients = self._read()
        sparse = bool(self.sync.takes_sparse)
        with self.wire.ledger.exchanging():
            self.channel.prepare(self._gradients, self._context(turn), self.wire, settings, sparse)

    def exchange(self) -> None:
        if self._waiting is None:
            super().exchange()
            return
        with self.wire.ledger.exchanging():
            average_([self._waiting], self.wire)

    def commit(self) -> None:
        if self._waiting is not None:
            self._finish(self._waiting)
            return
        with self.wire.ledger.exchanging():
            exchanged = self.channel.commit()
        if self._adam is not None:
            show_moments(self.optimizer, self.parameters, self._adam)
        self._unfinished = self._finishes
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

    def _finish(self, mean: Tensor) -> None:
        rising = {
            id(weight)
            for group in self.optimizer.param_groups
            # Local moments have the sign in them already.
            if group.get("maximize") and self._adam is None
            for weight in group["params"]
        }
        dropped = []
        for (name, weight), change in zip(self.parameters, self.layout.views(mean)):
            if weight.requires_grad:
                weight.detach().sub_(change, alpha=-1 if id(weight) in rising else 1)
            elif bool(change.any()):
                dropped.append(name)
        for residual in self.channel.residuals:
            residual.forget()
        self._waiting = None
        self._unfinished = False
        if dropped and self.wire.rank == 0:
            warnings.warn(
                f"{dropped[0]!r} and {len(dropped) - 1} other parameter(s) were frozen in training, and what still"
                " waited for them is dropped: with ddp they would have moved by it before. Freeze parameters from the"
                " start, or give them to a sync that sends them whole (exclude=[...]).",
                stacklevel=2,
            )

    def _write(self, exchanged: Exchanged) -> None:
        sync = self.sync
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
        self.channel.load_state_dict(saved, [name for name, _ in self.parameters])
        self._unfinished = self._finishes
