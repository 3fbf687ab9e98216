"""What a run says at its start: which method each optimizer has, and the density that follows from the run's length."""

import math

from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.basis.schedules import ByLength
from lightning_sparsecomm.run.registry import Registry


def announcement(registry: Registry, length: float, world_size: int, estimated: bool = False) -> list[str]:
    """A line for each optimizer; `length` in its steps, infinite where unknown.

    `estimated` is whether the length supposes one step for each batch.
    """
    run = f"in each of {length:,.0f} steps" if length < math.inf else "in each step of a run of unknown length"
    if estimated and length < math.inf:
        run += " (if each batch makes one)"
    lines: list[str] = []
    for tracked in registry.optimizers:
        if tracked.method is not None:
            following = dict.fromkeys(parts_in(list(tracked.method.syncs), ByLength))
            densities = "".join(f"; {each.for_length(length):.2%} of the elements {run}" for each in following)
            lines.append(f"sparsecomm: {world_size} ranks, {tracked.name} by {tracked.method!r}{densities}")
    return lines
