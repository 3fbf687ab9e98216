"""What takes part in exchanges by itself: shares, and the fragments of those that have some."""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.basis.schedules import every_at, every_for
from lightning_sparsecomm.channel.saved import Saved
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.optimizers import TrackedOptimizer
from lightning_sparsecomm.sharing.delta import DeltaSync
from lightning_sparsecomm.sharing.delta_share import DeltaShare
from lightning_sparsecomm.sharing.fragments import FragmentedShare
from lightning_sparsecomm.sharing.gradient_share import GradientShare
from lightning_sparsecomm.sharing.share import Share
from lightning_sparsecomm.sharing.streamed import StreamedShare

Unit = DeltaShare | GradientShare


class Closing(NamedTuple):
    """The last unit of a share, after which its round is closed.

    Attributes:
        unit: The number of the unit.
        averages: Whether buffers are averaged then.
    """

    unit: int
    averages: bool


def units_of(tracked: TrackedOptimizer, of: Sequence[Share] | None = None) -> list[Unit]:
    """The units of an optimizer, in an order that is equal on all replicas; only those `of` some shares, if given."""
    units: list[Unit] = []
    for share in tracked.shares.values() if of is None else of:
        parts = share.fragments if isinstance(share, FragmentedShare) else [share]
        for part in parts:
            assert isinstance(part, Unit)
            units.append(part)
    return units


def is_own(kind: str, unit: Unit) -> bool:
    """Whether a kind of what a unit saves is in a memory of its channel that is a replica's own, such as a residual."""
    memories = {type(each).__name__ for each in unit.channel.memories if not each.in_common}
    return kind.partition(".")[2].partition(".")[0].partition(" ")[0] in memories


def own_memories(tracked: TrackedOptimizer) -> Saved:
    """What an optimizer's units have in memories that are a replica's own; tensors share storage with them."""
    held: Saved = {}
    for unit in units_of(tracked):
        for kind, parts in unit.state_dict().items():
            if is_own(kind, unit):
                held.setdefault(kind, {}).update(parts)
    return held


def under_way_in(tracked: TrackedOptimizer) -> list[StreamedShare]:
    """Those units of an optimizer whose exchange is in flight."""
    return [unit for unit in units_of(tracked) if isinstance(unit, StreamedShare) and unit.under_way]


def steps_in_flight(units: Sequence[Unit]) -> int:
    """Optimizer steps since the units' exchange was started, or since the last landing within it."""
    return max((unit.steps for unit in units), default=0)


def trained_since(units: Sequence[Unit]) -> int:
    """Optimizer steps since the last exchange that counts for certain, the most of all units; 0 for gradients."""
    return max((unit.trained for unit in units if isinstance(unit, DeltaShare)), default=0)


def set_pace(units: Sequence[Unit], pace: float) -> None:
    """Lets shares of weights exchange after that part of their steps."""
    for unit in units:
        assert isinstance(unit, DeltaShare)
        unit.pace = pace


def steps_until_exchange(engine: Engine) -> int:
    """Steps from one exchange to the end of the next, the longest of all, if each optimizer steps in each batch.

    One in flight may be lost once, and begin anew where it would have landed.
    """
    steps = engine.registry.steps
    syncs = parts_in(engine.registry.methods[0], DeltaSync)
    every = [every_at(every_for(sync.every, engine.length), steps, engine.epoch) + 2 * sync.delay for sync in syncs]
    units = [unit for tracked in engine.registry.optimizers for unit in units_of(tracked)]
    pace = max((unit.pace for unit in units if isinstance(unit, DeltaShare)), default=1.0)
    return max(1, round(max(every, default=1) * pace))


def closings_of(tracked: TrackedOptimizer) -> list[Closing]:
    """For each share of an optimizer, the unit that closes its round."""
    closings, count = [], 0
    for sync, share in tracked.shares.items():
        count += len(units_of(tracked, [share]))
        closings.append(Closing(count - 1, sync.buffers != "own"))
    return closings
