"""The method that measures, and chooses."""

from collections.abc import Sequence
from typing import Literal, get_args

from lightning_sparsecomm.basis.arguments import check_one_of
from lightning_sparsecomm.channel import LocalAdam, MomentumCorrection
from lightning_sparsecomm.methods.defaults import default
from lightning_sparsecomm.methods.sums import dense
from lightning_sparsecomm.sharing import BucketSync, GradientSync, Method
from lightning_sparsecomm.sharing.sync import Sync

Quality = Literal["exact", "rounded", "trained"]
"""What may be chosen: "exact" ddp alone; "rounded" also ddp in bfloat16; "trained" also "sparsecomm", which trains as
well as ddp (docs/results/defaults.md)."""

BASELINE, ROUNDED, DEFAULT = "ddp", "ddp-bf16", "sparsecomm"


def allowed(quality: Quality) -> dict[str, Method]:
    """The methods that may be chosen, by name.

    Raises:
        ValueError: Unknown quality.
    """
    known = get_args(Quality)
    check_one_of(
        "quality", quality, known, "Leave it out for trained, which allows all that trains nearly as well as ddp."
    )
    chosen = {BASELINE: dense(), ROUNDED: dense("bfloat16"), DEFAULT: default()}
    return {name: chosen[name] for name in list(chosen)[: 1 + known.index(quality)]}


class auto(Method):
    """Measures the network and the step, predicts a step with each method, tries the best, and keeps the fastest.

    It begins as ddp, or as the method that the network's speed leaves no doubt about. All ranks switch in the same
    step, and nothing that a method holds is lost. When a step's time drifts it looks again. With ddp chosen, training
    is ddp's, to the bit from then on. A run of one process is ddp's from the start.

    >>> list(auto(quality="rounded").choices)
    ['ddp', 'ddp-bf16']

    Args:
        quality: What may be chosen: "exact", ddp alone; "rounded", also ddp in bfloat16; "trained", also
            `"sparsecomm"`, which trains nearly as well as ddp, in its form for the run's length.
        candidates: Further methods that may be chosen. They must share gradients, in each step or with `every`, so
            methods that exchange weights are refused.

    Raises:
        ValueError: An unknown quality, or a candidate that a run cannot switch to.
        TypeError: A candidate is no method, or `candidates` is one and not a list.
    """

    def __init__(self, quality: Quality = "trained", candidates: Sequence[Method] = ()) -> None:
        self.choices = allowed(quality)
        if isinstance(candidates, Method) or not isinstance(candidates, Sequence):
            raise TypeError(
                f"candidates must be a list of methods, such as [methods.dgc(0.01)]; got {candidates!r}. Put it in [ ]."
            )
        for candidate in candidates:
            if not isinstance(candidate, Method) or isinstance(candidate, auto):
                raise TypeError(
                    f"candidates must be methods, such as [methods.dgc(0.01)]; got {candidate!r}. Call the recipe."
                )
            check_switchable(candidate)
            self.choices[repr(candidate)] = candidate
        self.quality = quality
        super().__init__([BucketSync()])


def check_switchable(method: Method) -> None:
    """Refuses methods that a run cannot leave, or take up, between two steps.

    Raises:
        ValueError: Replicas drift with the method, or it averages them.
    """
    kept = all(_keeps_together(sync) for each in method.chain for sync in each.syncs)
    if not kept or any(each.averaging is not None for each in method.chain):
        raise ValueError(
            "candidates must share gradients, in each step or with `every`: without a delay, a local mode, or exchanges"
            f" of weights. Use a method with these by itself, as SparseCommStrategy(method=...); got {method!r}."
        )
    if not all(_delivers(sync) for each in method.chain for sync in each.syncs):
        raise ValueError(
            "candidates whose residual holds what momentum or moments have made of gradients must deliver it to the"
            f" weights when a run goes on with another method: follow_rate=True and finish=True; got {method!r}."
        )


def _delivers(sync: Sync) -> bool:
    """Whether what residuals hold can be delivered: gradients to the next gradient, updates to the weights only."""
    if not isinstance(sync, GradientSync) or not sync.channel.residuals:
        return True
    updates = any(isinstance(each, (MomentumCorrection, LocalAdam)) for each in sync.channel.memories)
    return not updates or (sync.finish and any(each.follow_rate for each in sync.channel.residuals))


def _keeps_together(sync: Sync) -> bool:
    """Whether replicas are equal after each step, or once what they hold is delivered, as after local steps."""
    local_steps = isinstance(sync, GradientSync) and sync.anchored and not sync.delay
    return sync.buffers == "broadcast" and (local_steps or not sync.drifts)
