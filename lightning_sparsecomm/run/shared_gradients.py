"""Gradients that are shared, and whose step is still to come: saved as they are, and used when the step is repeated."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_sparsecomm.run.contents import State
from lightning_sparsecomm.run.guards import Guards, unchanged, versions_of
from lightning_sparsecomm.run.optimizers import TrackedOptimizer
from lightning_sparsecomm.sharing.gradients import NamedParameters, has_sparse_gradient


def note_shared(tracked: TrackedOptimizer, guards: Guards) -> None:
    """Notes the gradients as they were shared, unless the step has begun, in which nothing can be saved."""
    if not guards.depth:
        tracked.gradients_when_shared = versions_of(tracked)


@contextmanager
def clipping(tracked: TrackedOptimizer) -> Iterator[None]:
    """Wraps the clipping of shared gradients, after which they can still be saved, unless it is the second one."""
    first = is_unchanged(tracked) and tracked.clipped_norm is None
    yield
    if first:
        tracked.gradients_when_shared = versions_of(tracked)


def clipped_before(tracked: TrackedOptimizer) -> Tensor | None:
    """The norm from which the gradients of a repeated step were clipped before they were saved; given out once."""
    norm = tracked.clipped_norm if tracked.clipped_before else None
    tracked.clipped_before = False
    return norm


def is_unchanged(tracked: TrackedOptimizer) -> bool:
    """Whether the gradients are as `note_shared` found them."""
    return bool(tracked.gradients_when_shared) and unchanged(tracked.gradients_when_shared, versions_of(tracked))


def is_ahead(tracked: TrackedOptimizer) -> bool:
    """Whether memories have forgotten what they sent, and the weights have not moved by it."""
    return (tracked.shared or tracked.failed_after_sharing) and tracked.exchanges_gradients and not tracked.skips


def saved_gradients(tracked: TrackedOptimizer) -> State | None:
    """What `repeat` needs; None unless the next step has begun, and shared gradients are as they were shared.

    Memories cannot go back exactly. So a checkpoint that is written now has the weights from before the step, memories
    from after the exchange, and what the exchange gave. Tensors share storage with the gradients.
    """
    if tracked.resumed is not None:
        return tracked.resumed
    if not tracked.shared or tracked.skips or (tracked.shares_gradients and not is_unchanged(tracked)):
        return None
    gradients = {name: _plain(parameter.grad) for name, parameter in _parameters(tracked)}
    return {"gradients": gradients, "clipped_norm": tracked.clipped_norm}


def refuse_amid_step(path: object, optimizers: Sequence[TrackedOptimizer], guards: Guards) -> None:
    """Refuses a checkpoint from which a run could not go on as if it had never stopped.

    Raises:
        RuntimeError: An exchange or a step is under way; or shared gradients were changed.
    """
    if guards.exchanging or (guards.depth and any(tracked.shared for tracked in optimizers)):
        raise RuntimeError(
            f"{path} was to be saved in the middle of an exchange, or of an optimizer's step: what memories hold and"
            " the weights do not belong together there. Save before step() or after it, and not in its hooks. In a"
            " signal handler, note the request, and save after the step."
        )
    for tracked in optimizers:
        if tracked.shared and is_ahead(tracked) and saved_gradients(tracked) is None:
            raise RuntimeError(
                f"{path} was to be saved after the gradients of {tracked.name} had been shared and then changed, and"
                " before the step: a run that is resumed would change them twice. Save before they are changed, or"
                " after optimizer.step()."
            )


def repeat(tracked: TrackedOptimizer) -> None:
    """Writes what a repeated step has exchanged before it was saved, and counted then, instead of another exchange."""
    saved, tracked.resumed = tracked.resumed, None
    assert saved is not None
    for name, parameter in _parameters(tracked):
        gradient = saved["gradients"].get(name)
        if gradient is None:
            parameter.grad = None
        elif has_sparse_gradient(parameter):
            parameter.grad = _sparse(gradient, parameter)
        elif parameter.grad is None:
            parameter.grad = gradient.to(parameter.device, copy=True)
        else:
            parameter.grad.copy_(gradient)
    tracked.clipped_norm = saved["clipped_norm"]
    # Gradients that each rank keeps are computed anew, and clipped anew.
    tracked.clipped_before = tracked.shares_gradients and tracked.clipped_norm is not None


def _parameters(tracked: TrackedOptimizer) -> NamedParameters:
    shared = [piece for sync, piece in tracked.parts if tracked.in_node or sync.shares_gradients]
    return [named for piece in shared for named in piece]


def _plain(gradient: Tensor | None) -> object:
    """Without sparse tensors, of which files hold no checksum."""
    if gradient is None or gradient.layout == torch.strided:
        return gradient
    gradient = gradient.coalesce()
    return {"indices": gradient.indices(), "values": gradient.values()}


def _sparse(parts: dict[str, Tensor], parameter: Tensor) -> Tensor:
    indices, values = (parts[name].to(parameter.device) for name in ("indices", "values"))
    return torch.sparse_coo_tensor(indices, values, parameter.shape, is_coalesced=True, check_invariants=False)
