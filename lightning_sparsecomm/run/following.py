"""Takes another method for a run: before the first step, the one that suits it; or any other between two steps."""

from lightning_sparsecomm.run.choice import method_for
from lightning_sparsecomm.run.chooser import Chooser
from lightning_sparsecomm.run.contents import State
from lightning_sparsecomm.run.optimizers import parameters_of
from lightning_sparsecomm.run.registry import Registry
from lightning_sparsecomm.sharing.method import Method, RunSize
from lightning_sparsecomm.sharing.own_step import steps_as_torch


def follow(registry: Registry, run: RunSize) -> None:
    """Takes the method in its form for a run, see `form_for`."""
    method = form_for(registry, registry.methods[0], run)
    if method is not registry.methods[0]:
        adopt(registry, method)
        registry.followed = run


def follow_saved(registry: Registry, chooser: Chooser | None, state: State) -> None:
    """Takes the method that a saved run had, in its form, also where this run has another length, or other ranks.

    Args:
        registry: Of this run.
        chooser: Chooses among methods, if one does.
        state: Of the saved run: "choice" if something chose among methods; otherwise "followed", or what it was before.
    """
    choice: State | None = state.get("choice")
    if chooser is not None and choice is not None:
        chooser.load_state_dict(choice)
        return
    saved = state.get("followed", state.get("for_length")) if choice is None else choice.get("followed")
    run = run_followed(saved)
    if run is not None and chooser is not None:
        chooser.follow(run)
    elif run is not None:
        follow(registry, run)


def run_followed(saved: RunSize | float | None) -> RunSize | None:
    """The run that a saved run's method has followed. It was only a length before ranks counted, too."""
    return (saved, 0) if isinstance(saved, (int, float)) else saved


def form_for(registry: Registry, method: Method, run: RunSize) -> Method:
    """The method's form for a run, see `Method.for_run`; itself if the run has begun.

    It also stays as it is where it is `Registry.fixed`, and where ranks would have to step by themselves and cannot.
    """
    if registry.fixed or any(tracked.steps for tracked in registry.optimizers):
        return method
    form = method.for_run(*run)
    if form is method or can_step_alone(registry):
        return form
    chosen = [
        method_for(each.optimizer, form.chain, registry.held_by(each.optimizer), registry.clips_by_value)
        for each in registry.optimizers
    ]
    return method if any(sync.anchored for each in chosen for sync in each.syncs) else form


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
        method_for(tracked.optimizer, methods, registry.held_by(tracked.optimizer), registry.clips_by_value)
    registry.methods = methods
    for tracked in registry.optimizers:
        tracked.end_takeover()
        tracked.method, tracked.takeover, tracked.shares, tracked.parts = None, None, {}, []
        if tracked.members:
            registry.add_members(tracked, set())
        else:
            registry.choose(tracked)
