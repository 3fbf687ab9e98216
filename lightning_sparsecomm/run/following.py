"""Takes another method for a run: before the first step, the one for its length; or any other between two steps."""

from lightning_sparsecomm.run.choice import method_for
from lightning_sparsecomm.run.chooser import Chooser
from lightning_sparsecomm.run.contents import State
from lightning_sparsecomm.run.optimizers import parameters_of
from lightning_sparsecomm.run.registry import Registry
from lightning_sparsecomm.sharing.method import Method
from lightning_sparsecomm.sharing.own_step import steps_as_torch


def follow(registry: Registry, length: float) -> None:
    """Takes the method in its form for a run's length, see `form_for`."""
    method = form_for(registry, registry.methods[0], length)
    if method is not registry.methods[0]:
        adopt(registry, method)
        registry.followed = length


def follow_saved(registry: Registry, chooser: Chooser | None, choice: State | None, length: float | None) -> None:
    """Takes the method that a saved run had, in its form, also where this run has another length.

    Args:
        registry: Of this run.
        chooser: Chooses among methods, if one does.
        choice: What the saved run's chooser has saved, if it had one. It says which length was followed, too.
        length: Without a choice, the length that the saved run's method has followed; None for none.
    """
    if chooser is not None and choice is not None:
        chooser.load_state_dict(choice)
        return
    length = length if choice is None else choice.get("followed")
    if length is not None and chooser is not None:
        chooser.follow(length)
    elif length is not None:
        follow(registry, length)


def form_for(registry: Registry, method: Method, length: float) -> Method:
    """The method's form for a run's length, see `Method.for_length`; itself if the run has begun.

    It also stays as it is where it is `Registry.fixed`, and where ranks cannot step by themselves.
    """
    begun = any(tracked.steps for tracked in registry.optimizers)
    return method if registry.fixed or begun or not can_step_alone(registry) else method.for_length(length)


def can_step_alone(registry: Registry) -> bool:
    """Whether ranks can step along their own gradients.

    They cannot where two optimizers hold the same parameter, nor where an optimizer has a step of its own, which may
    change gradients.
    """
    held = [id(parameter) for tracked in registry.optimizers for parameter in parameters_of(tracked.optimizer)]
    as_torch = all(steps_as_torch(tracked.optimizer) for tracked in registry.optimizers)
    return as_torch and len(set(held)) == len(held)


def adopt(registry: Registry, method: Method) -> None:
    """Goes on with another method, and without what the old one holds: all optimizers choose anew.

    Raises:
        TypeError, ValueError: The method is not defined for an optimizer; then nothing has changed.
    """
    methods = method.chain
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
