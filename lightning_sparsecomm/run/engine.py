"""Runs a method in one training run: shares gradients or weights when due. Knows torch, but not Lightning."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from lightning_sparsecomm.basis.schedules import Warmup
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.run.agreement import Agreement
from lightning_sparsecomm.run.chooser import Chooser
from lightning_sparsecomm.run.clipping import check_clipping, check_trainers_clipping, clips_locally
from lightning_sparsecomm.run.closures import sharing_closure
from lightning_sparsecomm.run.following import follow
from lightning_sparsecomm.run.guards import Guards, not_shared
from lightning_sparsecomm.run.length import likely_length
from lightning_sparsecomm.run.optimizers import TrackedOptimizer
from lightning_sparsecomm.run.registry import Registry
from lightning_sparsecomm.run.replicas import Replicas
from lightning_sparsecomm.run.scaling import LossScaling
from lightning_sparsecomm.run.shared_gradients import note_shared, repeat
from lightning_sparsecomm.run.state import RunState
from lightning_sparsecomm.run.turn import Turns
from lightning_sparsecomm.sharing.bucket import BucketHook, BucketSync
from lightning_sparsecomm.sharing.gradients import make_nonfinite_
from lightning_sparsecomm.sharing.method import Method
from lightning_sparsecomm.sharing.share import Turn, TurnKind


class Engine:
    """Shares an optimizer's gradients once per step, when they are first needed, and exchanges weights after steps.

    Args:
        seed: Seed of the method's randomness, equal on all ranks.
        check_replicas_every: Optimizer steps between two comparisons of shared weights; None for `settle` only.
        scaler: The loss scaler, if there is one.

    Attributes:
        scaling: None without a loss scaler.
        hook: Averages DDP's buckets; None if the method does not.
        max_norm: The Trainer's threshold, for methods that clip each rank's own gradient.
        turns: How shares exchange; by default, between all ranks of the run.
        chooser: May choose other methods while the run goes on; None for one method.
        epoch, ends_epoch: Epochs finished, including a fraction; whether one ends with this step, on all ranks.
        warmup: Replaces the method's densities early in training; None for no such warm-up.
        length: Steps of each optimizer in the whole run, equal on all ranks; infinite where unknown.
        may_end_sooner: Whether the run may be far shorter than that, as with early stopping.
    """

    def __init__(
        self,
        method: Method,
        wire: Wire,
        seed: int = 0,
        check_replicas_every: int | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        sync = method.syncs[0]
        self.hook = BucketHook(sync, wire, scaler is not None) if isinstance(sync, BucketSync) else None
        self.wire, self.seed = wire, seed
        self.check_replicas_every = check_replicas_every
        self.max_norm: float | None = None
        self.chooser: Chooser | None = None
        self.epoch, self.ends_epoch, self.length, self.may_end_sooner = 0.0, False, math.inf, False
        self.warmup: Warmup | None = None
        self.scaling = LossScaling(scaler) if scaler is not None else None
        self.registry = Registry(method, wire, self.hook)
        self.agreement = Agreement(self.registry, wire, seed, check_replicas_every, scaler is not None)
        self.replicas = Replicas(self.registry, wire)
        self.turns = Turns(self.registry, self.replicas)
        self.guards = Guards(self.registry, wire, self.hook, scaler is not None)
        self.state = RunState(self.registry, self.replicas, self.scaling, wire, lambda: self.chooser)

    def register(self, optimizer: Optimizer) -> TrackedOptimizer:
        """Adds an optimizer, unless it is registered; see `Registry.register` and `RunState.hand_over`."""
        tracked = self.registry.find(optimizer)
        if tracked is None:
            if self.scaling is not None:
                self.scaling.adopt(optimizer)
            tracked = self.registry.register(optimizer)
            self.state.hand_over(tracked)
        return tracked

    def begin(self) -> None:
        """Call it when a module has become equal on all ranks."""
        if self.state.averages_buffers:
            self.replicas.keep_untrained()
        elif self.hook is None or self.state.drifts:
            self.replicas.bystanders.mark()

    def expect(self, steps: float, may_end_sooner: bool = False) -> None:
        """Says how many steps each optimizer has still to make; infinite where unknown. A collective.

        If ranks expect different numbers, the least one counts; and all may end sooner if one may.
        """
        self.length, self.may_end_sooner = self.agreement.on_length(self.registry.steps + steps, may_end_sooner)

    def follow_length(self) -> float:
        """Takes the method, or the chooser's, in the form for the run, whose length it returns."""
        length = likely_length(self.length, self.may_end_sooner)
        if self.chooser is None:
            follow(self.registry, (length, self.wire.world_size))
        else:
            self.chooser.follow((length, self.wire.world_size))
        return length

    def synchronize(self, optimizer: Optimizer, max_norm: float | None = None) -> None:
        """Shares the gradients of the optimizer's parameters, unless they are shared already.

        With a loss scaler, gradients are unscaled first. If one is not finite, all ranks that would communicate skip
        the step: nothing is exchanged, no memory changes, and `.grad` is not finite on all of them.

        `max_norm` is the threshold for methods that clip each rank's own gradient; None for the Trainer's.
        """
        tracked = self.register(optimizer)
        if tracked.shared:
            if self.scaling is not None:
                self.scaling.remind(optimizer, tracked.skips)
            return
        self.guards.check_gradients(tracked)
        self.registry.admit(tracked)
        tracked.failed_after_sharing = False
        tracked.max_norm = self.max_norm if max_norm is None else max_norm
        self.wire.step = tracked.steps
        with self.guards.exchange():
            self._share_gradients(tracked)
        if tracked.skips:
            make_nonfinite_(tracked.parameters)
        elif tracked.owed:
            tracked.pay()
        tracked.shared = True
        note_shared(tracked, self.guards)
        # Another optimizer may hold the gradients that were just written to.
        for each in self.registry.optimizers:
            each.versions_after_backward = []

    def unscale_(self, optimizer: Optimizer) -> bool:
        """Replaces the loss scaler's `unscale_`. It shares gradients too, since code that unscales them will use them.

        Returns whether the optimizer trains known parameters. If not, the scaler has to unscale them.
        """
        if self.registry.find(optimizer) is None and not self.registry.held_by(optimizer):
            return False
        self.synchronize(optimizer)
        return True

    def take_over_clipping(self, max_norm: float) -> None:
        """Takes the Trainer's threshold, for methods that clip each rank's own gradient; see `clipping`."""
        chosen = [each.method for each in self.registry.optimizers]
        check_trainers_clipping(chosen, max_norm, self.registry.clips_by_value)
        self.max_norm = max_norm

    def clip(self, optimizer: Optimizer, max_norm: float, by_value: bool) -> bool:
        """Shares an optimizer's gradients, after clipping each rank's own if the method does; see `check_clipping`.

        Returns whether the method has clipped. If not, the caller clips the shared gradient.
        """
        local = check_clipping(self._admitted(optimizer), max_norm, by_value)
        self.synchronize(optimizer, max_norm if local else None)
        return local

    def clips(self, optimizer: Optimizer) -> bool:
        """Whether the method clips each rank's own gradient of the optimizer, instead of the shared one."""
        return clips_locally(self._admitted(optimizer))

    def closure(self, optimizer: Optimizer, closure: Callable[[], object]) -> Callable[[], object]:
        """A closure that calls `closure` and then shares the optimizer's gradients.

        If `closure` computes no new gradients (as in manual optimization), those that are shared already are kept.
        """
        return sharing_closure(self, optimizer, closure)

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Wraps the optimizer's step. Afterwards, weights are exchanged if that is due."""
        tracked = self.register(optimizer)
        self.registry.choose(tracked)
        stepped_shared = False
        self.guards.depth += 1
        if tracked.takeover is not None:
            tracked.takeover.armed = True
        try:
            yield
            stepped_shared = tracked.shared
        except BaseException:
            tracked.failed_after_sharing = tracked.shared
            raise
        finally:
            self.guards.depth -= 1
            if tracked.takeover is not None:
                tracked.takeover.armed = False
                tracked.takeover.release()
            tracked.end_step()
        if not stepped_shared and not self.registry.in_buckets:
            raise not_shared(tracked.name)
        with self.guards.exchange():
            self._after_step(tracked)

    def settle(self) -> None:
        """Makes replicas equal after the last step; a `ReplicaError` if they still differ. A collective."""
        optimizers = self.registry.optimizers
        self.replicas.view_own()
        for tracked in optimizers:
            self.exchange_weights(tracked, "end", max(tracked.steps - 1, 0))
        # Forward passes since the last exchange may have changed buffers.
        if any(tracked.steps for tracked in optimizers) and self.state.averages_buffers:
            self.turns.settle_buffers(optimizers[0], self._turn(optimizers[0], "end", max(optimizers[0].steps - 1, 0)))
        elif self.state.drifts and not self.state.averages_buffers:
            self.replicas.bystanders.average()
        self.replicas.settle()
        self.agreement.on_weights([(each.steps, {id(p): p for _, p in each.parameters}) for each in optimizers])
        if self.state.differ:
            self.replicas.whole.mark()
        self.guards.resting = True

    def reunite(self) -> None:
        """Makes replicas equal again after callbacks that may have changed weights since `settle`. A collective."""
        if self.state.differ:
            self.replicas.whole.average()

    def restart(self) -> None:
        """Starts over with weights that were loaded, and discards all state that belongs to the former weights."""
        self.replicas.view_own()
        self.registry.restart()
        self.begin()

    def residual_norm(self) -> float:
        """Euclidean norm of what this rank has not sent yet."""
        shares = (share for tracked in self.registry.optimizers for share in tracked.shares.values())
        return math.hypot(*(share.residual_norm() for share in shares))

    def close(self) -> None:
        """Removes the hooks from the optimizers and the scaler, and closes the wire."""
        self.guards.close()
        if self.scaling is not None:
            self.scaling.close()
        for tracked in self.registry.optimizers:
            tracked.end_takeover()
        self.wire.close()

    def _share_gradients(self, tracked: TrackedOptimizer) -> None:
        if self.scaling is not None:
            tracked.skips = self.scaling.unscale_(tracked.optimizer, self.turns.skipping(tracked, self.wire))
        with torch.no_grad():
            tracked.norm = math.inf if tracked.skips else self.turns.norm_to_clip(tracked)
            if tracked.resumed is not None and not tracked.skips:
                return repeat(tracked)
            for share in tracked.shares.values():
                share.before_step()
                if tracked.skips:
                    share.skip()
            if not tracked.skips:
                turn = self._turn(tracked, "gradients", tracked.steps)
                due = [share for share in tracked.shares.values() if share.due(turn)]
                self.turns.take_gradients(tracked, due, turn)
        self.wire.ledger.steps += 1

    def _admitted(self, optimizer: Optimizer) -> TrackedOptimizer:
        tracked = self.register(optimizer)
        self.registry.admit(tracked)
        return tracked

    def _turn(self, tracked: TrackedOptimizer, kind: TurnKind, step: int) -> Turn:
        length = likely_length(self.length, self.may_end_sooner)
        norms, sooner = (tracked.norm, tracked.max_norm), self.may_end_sooner
        return Turn(kind, step, self.epoch, self.seed, self.warmup, *norms, length, self.ends_epoch, sooner)

    def _after_step(self, tracked: TrackedOptimizer) -> None:
        for share in tracked.shares.values():
            share.after_step()
        self.exchange_weights(tracked, "weights", tracked.steps)
        tracked.steps += 1
        if tracked.steps == self.length:
            # The model that is validated and saved after the last step is then the one that training ends with.
            self.exchange_weights(tracked, "end", tracked.steps - 1)
        self.replicas.after_step(tracked)
        self.wire.step = tracked.steps
        if self.check_replicas_every is not None:
            self.agreement.on_weights([(tracked.steps, self.replicas.in_common(tracked, self.check_replicas_every))])
            self.agreement.on_nodes([(tracked.steps, self.replicas.in_node(tracked, self.check_replicas_every))])
        if self.chooser is not None:
            self.chooser.after_step(tracked)

    def exchange_weights(self, tracked: TrackedOptimizer, kind: TurnKind, step: int) -> None:
        """A turn of those shares of an optimizer that have weights to exchange, or to apply at the end."""
        self.wire.step = step
        turn = self._turn(tracked, kind, step)
        try:
            with torch.no_grad():
                due = [share for share in tracked.shares.values() if share.due(turn)]
                self.turns.take(tracked, due, turn)
        except BaseException:
            # All shares return to the last good model, even those that were not due.
            for share in tracked.shares.values():
                share.abort()
            raise
        self.turns.average_buffers(tracked, due, turn)
