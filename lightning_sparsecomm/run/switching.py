"""A run that goes on with another method: nothing that the old one holds is lost."""

import torch

from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.run.choice import method_for
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.optimizers import TrackedOptimizer
from lightning_sparsecomm.run.registry import chain_of
from lightning_sparsecomm.sharing.bucket import BucketSync
from lightning_sparsecomm.sharing.method import Method


def switch(engine: Engine, method: Method) -> None:
    """Goes on with another method. A collective, to be called between two steps.

    What residuals hold is averaged over ranks and delivered: to the weights where it is in units of the learning rate,
    else with the next gradient. Momentum and moments go to the optimizer, as ddp would have them there; the next method
    takes them over as it does from a checkpoint of ddp.
    """
    with engine.wire.in_step(), torch.no_grad():
        for tracked in engine.registry.optimizers:
            _deliver(engine, tracked)
    adopt(engine, method)


def _deliver(engine: Engine, tracked: TrackedOptimizer) -> None:
    engine.exchange_weights(tracked, "end", max(tracked.steps - 1, 0))
    for share in tracked.shares.values():
        for key, part in share.hand_back().items():
            tracked.owed[key] = tracked.owed[key] + part if key in tracked.owed else part


def adopt(engine: Engine, method: Method) -> None:
    """Goes on with another method, and without what the old one holds: all optimizers choose anew.

    Raises:
        TypeError, ValueError: The method is not defined for an optimizer; then nothing has changed.
    """
    registry, methods = engine.registry, chain_of(method)
    for tracked in registry.optimizers:
        # What cannot be used is refused before anything changes.
        method_for(tracked.optimizer, methods, registry.held_by(tracked.optimizer))
    registry.methods = methods
    for tracked in registry.optimizers:
        if tracked.takeover is not None:
            tracked.takeover.close()
        tracked.method, tracked.takeover, tracked.shares, tracked.parts = None, None, {}, []
        if tracked.members:
            registry.add_members(tracked, set())
        else:
            registry.choose(tracked)
    if engine.hook is not None:
        engine.hook.sync = next(parts_in(method, BucketSync), engine.hook.sync)
    engine.guards.watch_steps(not engine.registry.in_buckets)
