"""What an optimizer evaluates in its step: the user's closure, and then the exchange of its gradients."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from lightning_sparsecomm.run.guards import unchanged, versions_of
from lightning_sparsecomm.run.optimizers import TrackedOptimizer
from lightning_sparsecomm.sharing.gradient_share import GradientShare
from lightning_sparsecomm.sharing.takeover import evaluated_again


class Sharing(Protocol):
    """What a closure needs of the `Engine`."""

    scaling: Any

    def register(self, optimizer: Optimizer) -> TrackedOptimizer: ...

    def synchronize(self, optimizer: Optimizer) -> None: ...


def sharing_closure(engine: Sharing, optimizer: Optimizer, closure: Callable[[], object]) -> Callable[[], object]:
    """See `Engine.closure`."""
    exchanged = False

    def evaluate() -> object:
        nonlocal exchanged
        tracked = engine.register(optimizer)
        before = versions_of(tracked) if tracked.shared else []
        result = closure()
        if not unchanged(before, versions_of(tracked)):
            tracked.unshare()
        if exchanged and not tracked.shared:
            _refuse_second(tracked)
        engine.synchronize(optimizer)
        exchanged = True
        # A user's closure may return None: with a loss scaler, Lightning would skip the step on this rank alone.
        return torch.zeros(()) if result is None and engine.scaling is not None else result

    return evaluate


def _refuse_second(tracked: TrackedOptimizer) -> None:
    """Raises `RuntimeError` if memories would take in the gradients of two evaluations in one step, as of SAM."""
    if any(isinstance(share, GradientShare) and share.channel.memories for share in tracked.shares.values()):
        raise evaluated_again(tracked.optimizer)
