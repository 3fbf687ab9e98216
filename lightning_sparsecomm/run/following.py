"""Takes another method for a run: before the first step, the one for its length; or any other between two steps."""

from lightning_sparsecomm.run.choice import method_for
from lightning_sparsecomm.run.optimizers import parameters_of
from lightning_sparsecomm.run.registry import Registry, chain_of
from lightning_sparsecomm.sharing.method import Method
from lightning_sparsecomm.sharing.own_step import steps_as_torch


def follow(registry: Registry, length: float) -> None:
    """Takes the method in its form for a run's length, see `form_for`."""
    method = form_for(registry, registry.methods[0], length)
    if method is not registry.methods[0]:
        adopt(registry, method)
        registry.followed = length


def form_for(registry: Registry, method: Method, length: float) -> Method:
    """The method's form for a run's length, see `Method.for_length`; itself if the run has begun.

    It also stays as it is where ranks cannot step by themselves: where it is `Registry.fixed`, where two optimizers
    hold the same parameter, and where an optimizer has a step of its own, which may change gradients.
    """
    held = [id(parameter) for tracked in registry.optimizers for parameter in parameters_of(tracked.optimizer)]
    begun = any(tracked.steps for tracked in registry.optimizers)
    if registry.fixed or begun or len(set(held)) < len(held):
        return method
    if not all(steps_as_torch(tracked.optimizer) for tracked in registry.optimizers):
        return method
    return method.for_length(length)


def adopt(registry: Registry, method: Method) -> None:
    """Goes on with another method, and without what the old one holds: all optimizers choose anew.

    Raises:
        TypeError, ValueError: The method is not defined for an optimizer; then nothing has changed.
    """
    methods = chain_of(method)
    for tracked in registry.optimizers:
        # What cannot be used is refused before anything changes.
        method_for(tracked.optimizer, methods, registry.held_by(tracked.optimizer))
    registry.methods = methods
    for tracked in registry.optimizers:
        tracked.end_takeover()
        tracked.method, tracked.takeover, tracked.shares, tracked.parts = None, None, {}, []
        if tracked.members:
            registry.add_members(tracked, set())
        else:
            registry.choose(tracked)
