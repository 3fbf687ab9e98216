"""Clipping by the user's threshold: of each rank's own gradient, or of the shared one."""

import math
import warnings
from collections.abc import Iterable

from torch import nn

from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.channel.clipping import ClipLocalNorm
from lightning_sparsecomm.channel.inspection import norm_of
from lightning_sparsecomm.run.optimizers import TrackedOptimizer
from lightning_sparsecomm.sharing.gradients import gradient_of
from lightning_sparsecomm.sharing.method import Method
from lightning_sparsecomm.sharing.sync import Sync


def clips_locally(tracked: TrackedOptimizer) -> bool:
    """Whether the method clips each rank's own gradient instead of the shared one."""
    return bool(_memories(tracked))


def clips_by_norm(tracked: TrackedOptimizer) -> bool:
    """Whether the method clips each rank's own gradient in this step: it has a threshold, or the user has one."""
    return any((memory.max_norm or tracked.max_norm) is not None for memory in _memories(tracked))


def norm_to_clip(tracked: TrackedOptimizer) -> float:
    """Euclidean norm of this rank's whole gradient; NaN if nothing is clipped by it."""
    if not clips_by_norm(tracked):
        return math.nan
    gradients = (gradient_of(name, parameter) for name, parameter in tracked.parameters)
    return norm_of([gradient for gradient in gradients if gradient is not None])


def check_trainers_clipping(methods: Iterable[Method | None], max_norm: float, by_value: bool) -> None:
    """Refuses a Trainer's threshold that a method cannot apply.

    Raises:
        ValueError: It is NaN; a method clips each rank's own gradient by another one, or would have to by value; or
            ranks step along their own gradients, unclipped.
    """
    if math.isnan(max_norm):
        raise ValueError(
            "gradient_clip_val must be a number, the largest norm of a gradient; got nan. Use None for no clipping."
        )
    for method in methods:
        memories = list(parts_in(method, ClipLocalNorm))
        if method is not None and not memories:
            _check_own_steps(method.syncs)
        _check_local(memories, max_norm, by_value)


def check_clipping(tracked: TrackedOptimizer, max_norm: float, by_value: bool) -> bool:
    """Refuses a threshold of a clipping call that the method cannot apply.

    Returns:
        Whether the method clips each rank's own gradient. If not, the caller clips the shared one.

    Raises:
        ValueError: The method clips by norm only, or has shared the gradients with another threshold; ranks step along
            their own gradients, unclipped; or some of the optimizer's gradients are not shared, so that their norm
            differs between ranks.
    """
    if not clips_locally(tracked):
        _check_own_steps([sync for sync, _ in tracked.parts])
        if not by_value and len({sync.shares_gradients for sync, _ in tracked.parts}) > 1:
            raise ValueError(
                "gradients cannot be clipped by norm where a method shares some of an optimizer's gradients and leaves"
                " the others to each rank: the norm would differ between ranks, and so would the replicas. Use one"
                " optimizer for the shared gradients and another for the rest, or clip by value."
            )
        return False
    _check_local(_memories(tracked), max_norm, by_value)
    if tracked.shared and tracked.max_norm != max_norm:
        raise ValueError(
            f"gradients were shared with gradient_clip_val={tracked.max_norm}, and are now to be clipped by"
            f" {max_norm}: the method clips each rank's own gradient before it is shared. Set the Trainer's"
            " gradient_clip_val; in manual optimization, clip before other code needs the shared gradient."
        )
    return True


def warn_of_late_clipping(optimizers: Iterable[TrackedOptimizer], module: type[nn.Module], warns: bool) -> None:
    """Warns of a LightningModule that clips in its own way: too late where each rank's own gradient is clipped."""
    clipping = getattr(module, "configure_gradient_clipping")  # noqa: B009
    if clipping.__module__.startswith(("pytorch_lightning.", "lightning.")):
        return
    if warns and any(True for tracked in optimizers for _ in parts_in(tracked.method, ClipLocalNorm)):
        warnings.warn(
            f"{clipping.__qualname__} runs after gradients were shared, when .grad holds what the optimizer steps"
            " along: momentum with dgc, Adam's direction with local_adam. Clipped there by a norm, training hardly"
            " moves. Set the Trainer's gradient_clip_val instead, by which each rank's own gradient is clipped before"
            " it is shared, or use methods.gradient_dropping(). If it does not clip, ignore this.",
            stacklevel=2,
        )


def _check_own_steps(syncs: Iterable[Sync]) -> None:
    if any(sync.anchored and sync.shares_gradients for sync in syncs):
        raise ValueError(
            "gradients cannot be clipped where ranks step along their own (delay=1, or every above 1), unless their"
            " channel clips these: what is shared holds those of several steps. Put ClipLocalNorm() before its other"
            " memories, as methods.dgc() and methods.local_adam() do."
        )


def _memories(tracked: TrackedOptimizer) -> list[ClipLocalNorm]:
    return list(parts_in([sync for sync, _ in tracked.parts], ClipLocalNorm))


def _check_local(memories: Iterable[ClipLocalNorm], max_norm: float, by_value: bool) -> None:
    for memory in memories:
        if by_value:
            raise ValueError(
                "gradient_clip_algorithm must be 'norm' with a method that clips each rank's own gradient, by its norm;"
                " got 'value'. Use 'norm' (max_norm in Fabric), or methods.quantized(), with which the mean gradient is"
                " clipped as with ddp."
            )
        if memory.max_norm is not None and memory.max_norm != max_norm:
            raise ValueError(
                f"clip={memory.max_norm} of the method and {max_norm} of the Trainer's gradient_clip_val, or of a"
                " clipping call, are two thresholds for one clipping. Leave out clip: the method uses the other one."
            )
