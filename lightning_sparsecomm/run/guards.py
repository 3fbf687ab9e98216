"""Detects misuse that lets replicas drift: steps that bypass the strategy, and late changes of gradients."""

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.channel.inspection import elements_of
from lightning_sparsecomm.run.optimizers import Left, TrackedOptimizer, parameters_of
from lightning_sparsecomm.run.registry import Registry
from lightning_sparsecomm.sharing.bucket import BucketHook

Versions = list[tuple[Tensor | None, int]]

# torch fails a step if its table of hooks changes while hooks are called. The garbage collector may drop a run at any
# moment, so one hook serves all runs, and a dropped run leaves this set instead of that table.
_WATCHING: weakref.WeakSet["Guards"] = weakref.WeakSet()
_HOOKS: list[RemovableHandle] = []


class Guards:
    """Watches one run's backward passes and, unless DDP's buckets average gradients, its optimizer steps."""

    def __init__(self, registry: Registry, wire: Wire, hook: BucketHook | None, scales_loss: bool) -> None:
        # How many optimizer steps are in progress through the strategy.
        self.depth = 0
        # Whether gradients or weights are being exchanged.
        self.exchanging = False
        # Whether all is settled, and no backward pass has come since.
        self.resting = False
        self._registry = registry
        self._wire = wire
        self._hook = hook
        self._uses_buckets = False
        self._scales_loss = scales_loss
        self.watch_steps(hook is None)

    def watch_steps(self, watch: bool) -> None:
        """Begins or stops to refuse optimizer steps past the strategy; DDP's buckets make them harmless."""
        self.close()
        self._uses_buckets = not watch
        if watch:
            _WATCHING.add(self)
            if not _HOOKS:
                # A global hook also sees optimizers that are created later or stepped without Lightning.
                _HOOKS.append(register_optimizer_step_pre_hook(_before_any_step))

    def close(self) -> None:
        """Stops watching optimizer steps."""
        _WATCHING.discard(self)
        if _HOOKS and not _WATCHING:
            _HOOKS.pop().remove()

    @property
    def in_step(self) -> bool:
        """Whether an optimizer step is in progress, or its gradients are shared already."""
        return self.depth > 0 or any(tracked.shared for tracked in self._registry.optimizers)

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Wraps an exchange of gradients or weights, which belongs to an optimizer step."""
        self.exchanging = True
        try:
            with self._wire.in_step():
                yield
        finally:
            self.exchanging = False

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Wraps a backward pass, which must not add local gradients to shared ones.

        Two passes before clipping are fine, and so is one after `zero_grad`.
        """
        self.resting = False
        scaled, at_step, optimizers = self._scales_loss, not self._uses_buckets, self._registry.optimizers
        for tracked in optimizers:
            tracked.note_trained()
            tracked.left = [each for each in tracked.left if not _is_cleared(each)]
        shared = [each for each in optimizers if each.shared and (scaled or (at_step and each.shares_gradients))]
        before = [(tracked, versions_of(tracked)) for tracked in shared]
        cleared = [all(g is None or not elements_of(g).any() for g, _ in versions) for _, versions in before]
        with self._peer_errors():
            yield
        for (tracked, versions), empty in zip(before, cleared):
            if unchanged(versions, versions_of(tracked)):
                continue
            if not empty:
                done = "divided by the loss scale" if scaled else "shared between ranks"
                sum_would = "mix scaled and unscaled ones" if scaled else "differ from rank to rank"
                raise RuntimeError(
                    f"a backward pass added to gradients of {tracked.name} that clipping had already {done}: the sum"
                    f" would {sum_would}. Call clip_gradients after the last backward pass before step(), or"
                    " zero_grad() first."
                )
            tracked.unshare()
        for tracked in optimizers if at_step else []:
            tracked.versions_after_backward = [version for _, version in versions_of(tracked)]

    def check_gradients(self, tracked: TrackedOptimizer) -> None:
        """Refuses gradients with what the step before has left in them, and warns if they were changed since backward.

        Call it before they are shared.
        """
        members = {id(parameter) for parameter in parameters_of(tracked.optimizer)}
        known = [each for other in self._registry.optimizers for each in other.left if id(each[1]) in members]
        if left := [each for each in known if not _is_cleared(each)]:
            raise RuntimeError(
                f"the gradient of {left[0][0]!r} was not cleared since the last optimizer step, which has left"
                " momentum or a direction in it, and not the mean gradient, as ddp has. Call zero_grad() before each"
                " backward pass that follows a step, or use methods.gradient_dropping()."
            )
        before = tracked.versions_after_backward
        changed = before and before != [version for _, version in versions_of(tracked)]
        if changed and tracked.shares_gradients:
            warnings.warn(
                f"the gradients of {tracked.name} were changed between backward and step, before they were shared: each"
                " rank changed its own. With ddp, gradients are averaged by then. Clip with clip_gradients, or call"
                " strategy.synchronize(optimizer) before you change them.",
                stacklevel=3,
            )

    @contextmanager
    def _peer_errors(self) -> Iterator[None]:
        """Raises the wire's own error instead of DDP's, which only quotes it and does not name the step."""
        if self._hook is None or not self._uses_buckets:
            with self._wire.in_step():
                yield
            return
        self._wire.step = self._registry.steps
        self._hook.begin()
        try:
            with self._wire.in_step():
                yield
            self._hook.finish()
        except RuntimeError:
            self._hook.raise_failure()
            if not self._wire.failures:
                raise
            raise self._wire.failures[0] from self._wire.failures[0].__cause__

    def _refuse_bypass(self, optimizer: Optimizer) -> None:
        if self.resting or not self._registry.held_by(optimizer):
            return
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() was called past the strategy, so its gradients were never shared and"
            " the replicas would drift apart. Step the optimizer that self.optimizers() or fabric.setup() returns"
            " (without use_pl_optimizer=False)."
        )


def _before_any_step(optimizer: Optimizer, *_: object) -> None:
    """Asks each run before any optimizer's step; a Fabric run, which nothing closes, until it is collected.

    A step through the strategy of one run is none of the business of another, whose model it may be too.
    """
    watching = list(_WATCHING)
    if not any(guards.depth for guards in watching):
        for guards in watching:
            guards._refuse_bypass(optimizer)


def not_shared(name: str) -> RuntimeError:
    """What to raise after a step of an optimizer in which gradients were not shared."""
    return RuntimeError(
        f"{name}.step() did not call the closure that it was given, so its gradients were not shared"
        " and the replicas have drifted apart. Let its step() call the closure first, as torch's optimizers do,"
        " or call strategy.synchronize(optimizer) before it."
    )


def _is_cleared(left: Left) -> bool:
    """Whether a gradient that a step has left is another one by now, or zero."""
    _, parameter, reference = left
    gradient = reference()
    return gradient is None or parameter.grad is not gradient or not any(each.item() for each in gradient.aminmax())


def versions_of(tracked: TrackedOptimizer) -> Versions:
    """An optimizer's gradients with their version counters."""
    return [(p.grad, -1 if p.grad is None else p.grad._version) for _, p in tracked.parameters]


def unchanged(before: Versions, after: Versions) -> bool:
    """Whether no gradient was written to in between."""
    return all(a[0] is b[0] and a[1] == b[1] for a, b in zip(before, after))
