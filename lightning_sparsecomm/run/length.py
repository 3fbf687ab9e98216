"""The length of a run: what densities follow, and warnings of runs that end before a warm-up or the first exchange."""

import warnings

from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.basis.schedules import LIKELY_STEPS, Schedule, Warmup, least_every
from lightning_sparsecomm.run.registry import Registry
from lightning_sparsecomm.sharing.delta import DeltaSync


def likely_length(steps: float, may_end_sooner: bool) -> float:
    """The length that densities follow in a run of so many optimizer steps, which may be infinite."""
    return min(steps, LIKELY_STEPS) if may_end_sooner else steps


def warn_of_short_run(registry: Registry, warmup: Warmup | None, steps: float, epochs: float) -> None:
    """Warns about a run that ends before a warm-up or before the first exchange of weights.

    `warmup` replaces the methods' warm-ups, unless None. An unknown length, in steps or epochs, is infinite.
    """
    for tracked in registry.optimizers:
        if tracked.method is None:
            continue
        for sync, _ in tracked.method.parts(registry.held_by(tracked.optimizer)):
            if isinstance(sync, DeltaSync) and (every := least_every(sync.every)) // sync.fragments > steps:
                warnings.warn(
                    f"every={every:,} is more than the run's {steps:,.0f} optimizer steps: ranks exchange only once, at"
                    " the end of training. Until then the initial weights are validated and saved. Shorten `every`.",
                    stacklevel=3,
                )
                break
    in_use = [tracked.method for tracked in registry.optimizers]
    warmups = {schedule.warmup for schedule in parts_in(in_use, Schedule)}  # type: ignore[type-abstract]
    for each in warmups if warmup is None else {warmup}:
        words = each.unfinished(steps, epochs) if each is not None else None
        if words is not None:
            warnings.warn(
                f"the warm-up does not end before the training: {words}. The method's own density is never reached."
                " Shorten warmup_steps or warmup_epochs.",
                stacklevel=3,
            )
