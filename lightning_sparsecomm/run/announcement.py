"""What a run says at its start: which method each optimizer has, and the density that follows from the run's length."""

import math
from collections.abc import Iterator, Sequence

from lightning_sparsecomm.basis import Layout, Round
from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.basis.schedules import LIKELY_STEPS, ByLength, Schedule, every_for
from lightning_sparsecomm.run.choice import advice_on_clipping, advice_on_signs
from lightning_sparsecomm.run.registry import Registry
from lightning_sparsecomm.sharing.gradient import GradientSync
from lightning_sparsecomm.sharing.method import Method


def announcement(
    registry: Registry,
    length: float,
    world_size: int,
    estimated: bool = False,
    fewer: Sequence[float] = (),
    come_and_go: bool = False,
    may_end_sooner: bool = False,
    usual: Method | None = None,
    warms_up: bool = False,
) -> list[str]:
    """A line for each optimizer, and one more where it does not suit its method.

    Args:
        registry: The run's optimizers and their methods.
        length: Optimizer steps of the run; infinite where unknown.
        world_size: Number of ranks.
        estimated: Whether the length supposes one step for each batch.
        fewer: How many times fewer bytes each optimizer sends than with ddp; NaN where unknown.
        come_and_go: Whether ranks are replicas, of which more may join.
        may_end_sooner: Whether the run may end at any time before its length.
        usual: The method that a new run of this length on these ranks would have.
        warms_up: Whether a callback warms up the densities.
    """
    lines: list[str] = []
    for number, tracked in enumerate(registry.optimizers):
        if tracked.method is not None:
            run = _run(tracked.method, length, estimated)
            following = dict.fromkeys(parts_in(list(tracked.method.syncs), ByLength))
            densities = "".join(f"; {_density(each, length, may_end_sooner)} {run}" for each in following)
            warmups = list(dict.fromkeys(filter(None, map(_warmup, _schedules(tracked.method)))))
            densities += "".join(f"; {words}" for words in warmups) + _kept(registry, world_size, usual)
            trained = [each for each in registry.held_by(tracked.optimizer) if each[1].requires_grad]
            or_more = registry.few_rows.may_find(trained, tracked.method.syncs)
            bytes_sent = _words(fewer[number], warms_up or bool(warmups), or_more) if fewer else ""
            call = repr(tracked.method)
            for each in following:
                numbers = " to ".join(f"{number:.3g}" for number in _numbers(each, length, may_end_sooner))
                call = call.replace(repr(each), numbers)
            by = f"{tracked.name} by {call}"
            ranks = f"{world_size} ranks" if world_size > 1 else "1 rank, so nothing crosses a network"
            if come_and_go:
                ranks = f"{world_size} replica{'s' * (world_size > 1)} so far"
            ranks += f" on {len(registry.nodes.groups)} nodes" if registry.nodes is not None else ""
            lines.append(f"sparsecomm: {ranks}, {by}{densities}{bytes_sent}")
            lines += advice_on_signs(tracked.optimizer, tracked.method)
            if registry.clips_by_value:
                lines += advice_on_clipping(tracked.optimizer, registry.methods, registry.held_by(tracked.optimizer))
    return lines


def _numbers(density: ByLength, length: float, may_end_sooner: bool) -> list[float]:
    """The density of a run; the first and the last one if it is not known when the run ends."""
    contexts = [Round(Layout([]), step, length=length, may_end_sooner=may_end_sooner) for step in (0, LIKELY_STEPS)]
    return list(dict.fromkeys(context.density(density) for context in contexts))


def _density(density: ByLength, length: float, may_end_sooner: bool) -> str:
    first, *later = _numbers(density, length, may_end_sooner)
    return f"{first:.2%} of the elements" + "".join(f" at first, {each:.2%} later," for each in later)


def _run(method: Method, length: float, estimated: bool) -> str:
    """In which steps it sends so much, in words."""
    found = [every_for(sync.every, length) for sync in parts_in(list(method.syncs), GradientSync)]
    if any(isinstance(each, Schedule) for each in found):
        return "in each exchange"
    every = max((each for each in found if isinstance(each, int)), default=1)
    if length == math.inf:
        return f"in {'each step' if every == 1 else f'one of {every} steps'} of a run of unknown length"
    steps = f"in {'each' if every == 1 else f'at least {math.ceil(length / every):,}'} of {length:,.0f} steps"
    return steps + " (if each batch makes one)" * estimated


def _kept(registry: Registry, world_size: int, usual: Method | None) -> str:
    """Says that a run of another length, or on other ranks, goes on with the method that it began with."""
    if registry.followed is None or usual is None or repr(usual) == repr(registry.methods[0]):
        return ""
    steps, ranks = registry.followed
    words = "unknown length" if steps == math.inf else f"{steps:,.0f} steps"
    if ranks != world_size:
        words += f" on {ranks} rank{'s' * (ranks > 1)}" if ranks else " by an earlier version"
    return f"; with the method of a run of {words}"


def _schedules(method: Method) -> Iterator[Schedule]:
    return parts_in(list(method.syncs), Schedule)  # type: ignore[type-abstract]


def _warmup(schedule: Schedule) -> str:
    """Its warm-up in words; empty if there is none."""
    warmup = schedule.warmup
    if warmup is None or not (warmup.steps or warmup.epochs):
        return ""
    return f"warm-up of {warmup.steps:,} steps" if warmup.steps else f"warm-up of {warmup.epochs} epochs"


def _words(times: float, warms_up: bool, or_more: bool) -> str:
    """Nothing where the number is unknown, or too close to 1 to speak of."""
    if not times > 1.1:
        return ""
    number = f"{times:,.0f}" if times >= 10 else f"{times:.2g}"
    words = f"; about {number} times fewer bytes than ddp{', after the warm-up' if warms_up else ''}"
    return words + ", and fewer still if steps use few rows of the embeddings" * or_more
