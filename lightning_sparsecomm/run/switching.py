"""A run that goes on with another method: nothing that the old one holds is lost."""

import torch

from lightning_sparsecomm.basis.ledger import GRADIENTS
from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.run import following
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.optimizers import TrackedOptimizer
from lightning_sparsecomm.sharing.averaging import average_
from lightning_sparsecomm.sharing.bucket import BucketSync
from lightning_sparsecomm.sharing.method import Method


def switch(engine: Engine, method: Method, stepped: TrackedOptimizer | None = None) -> None:
    """Goes on with another method. A collective, to be called between two steps, while no gradients are shared.

    `stepped` is the optimizer that has just stepped: its gradients are used up, those of others may wait for a step.

    What residuals hold is averaged over ranks and delivered: to the weights where it is in units of the learning rate,
    else with the next gradient. Momentum and moments go to the optimizer, as ddp would have them there; the next method
    takes them over as it does from a checkpoint of ddp. Where DDP's buckets take over, waiting gradients are averaged.
    """
    registry, at_step = engine.registry, not engine.registry.in_buckets
    with engine.wire.in_step(), torch.no_grad():
        for tracked in registry.optimizers:
            _deliver(engine, tracked)
        if engine.state.drifts:
            # What no optimizer trains.
            engine.replicas.bystanders.average()
            engine.state.have_drifted = True
        adopt(engine, method)
        if at_step and registry.in_buckets:
            # No later step of theirs would share them.
            for tracked in registry.optimizers:
                if tracked is not stepped:
                    registry.admit(tracked)
                    _average_gradients(tracked, engine.wire)


def _deliver(engine: Engine, tracked: TrackedOptimizer) -> None:
    engine.exchange_weights(tracked, "end", max(tracked.steps - 1, 0))
    for share in tracked.shares.values():
        for key, part in share.hand_back().items():
            tracked.owed[key] = tracked.owed[key] + part if key in tracked.owed else part


def _average_gradients(tracked: TrackedOptimizer, wire: Wire) -> None:
    """Averages an optimizer's gradients, as ddp would have in the backward pass. A collective.

    A rank without a gradient counts as zero. Where no rank has one, none gets one.
    """
    weights = [weight for _, weight in tracked.parameters]
    if not weights:
        return
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad.detach() for each in weights]
    present = torch.tensor([float(each.grad is not None) for each in weights], device=weights[0].device)
    average_([*gradients, present], wire, GRADIENTS)
    for weight, gradient, somewhere in zip(weights, gradients, present.tolist()):
        if weight.grad is None and somewhere:
            weight.grad = gradient


def adopt(engine: Engine, method: Method) -> None:
    """As `following.adopt`, also between methods of which one works in DDP's buckets."""
    following.adopt(engine.registry, method)
    if engine.hook is not None:
        engine.hook.sync = next(parts_in(method, BucketSync), engine.hook.sync)
    engine.guards.watch_steps(not engine.registry.in_buckets)
    if engine.state.drifts:
        engine.begin()
