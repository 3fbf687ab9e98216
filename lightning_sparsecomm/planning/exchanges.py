"""In how many of a run's steps a method exchanges something."""

import math
import statistics
from collections.abc import Sequence

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.schedules import Every, Schedule, every_at, every_for, exchanges_in, least_every
from lightning_sparsecomm.exchange import Staged
from lightning_sparsecomm.sharing.delta import DeltaSync
from lightning_sparsecomm.sharing.gradient import GradientSync
from lightning_sparsecomm.sharing.method import Method
from lightning_sparsecomm.sharing.sync import Sync

Chosen = Method | Sequence[Method]
"""A method, or those that a run's optimizers have. A method's fallbacks count, too."""

LATE = 10**7
"""Finished steps and epochs at which methods are rehearsed: no warm-up takes so long."""

# Steps of a run at which a schedule is asked.
_SAMPLES = 1000


def _scheduled(method: Chosen, length: float) -> list[Every]:
    """The steps between two exchanges, of each sync."""
    return [
        *(every_for(sync.every, length) for sync in parts_in(method, DeltaSync)),
        *(every_for(sync.every, length) for sync in parts_in(method, GradientSync)),
    ]


def every_late(method: Chosen, length: float) -> int:
    """Steps between two exchanges, late in a run."""
    return max((every_at(every, LATE, LATE) for every in _scheduled(method, length)), default=1)


def share_of_exchanges(method: Chosen, every: int, length: float) -> float:
    """The part of a run's steps with an exchange."""
    if not 0 < length < math.inf:
        return 1 / every
    # A run whose last step is no exchange's ends with one more.
    share = math.ceil(length / every) / length
    for scheduled in _scheduled(method, length):
        if isinstance(scheduled, Schedule):
            steps = (int(length * part / _SAMPLES) for part in range(_SAMPLES))
            # Schedules by epochs count as in the first one.
            share = max(share, statistics.fmean(1 / every_at(scheduled, step, 0.0) for step in steps))
    return share


def more_by_epochs(syncs: Sequence[Sync], length: float, epoch_steps: float) -> float:
    """How many times as many exchanges there are in a run as if only every H-th step exchanged, not ends of epochs too.

    1 where the last step of an epoch exchanges in any case, or where not all of these make local steps of gradients.

    Args:
        syncs: Those that have parameters.
        length: Optimizer steps of the run; infinite where unknown.
        epoch_steps: Those of an epoch; infinite where unknown.
    """
    every = min((least_every(s.every) if isinstance(s, GradientSync) else 1 for s in syncs), default=1)
    if every == 1 or not 0 < length < math.inf or not 1 <= epoch_steps <= length:
        return 1.0
    steps = min(math.ceil(length), _SAMPLES * every)
    ends = {round(epoch_steps * number) - 1 for number in range(1, math.floor(steps / epoch_steps) + 1)}
    exchanges, last = 0, -every
    for step in range(steps):
        if exchanges_in(step, every, step - last, step in ends):
            exchanges, last = exchanges + 1, step
    return exchanges / math.ceil(steps / every)


def first_steps(method: Chosen, length: float) -> int:
    """How many steps of a run are exchanged in another way than all later ones; 0 where its length is not known."""
    context = Round(Layout([]), length=length)
    return (
        max((context.steps(staged.steps) for staged in parts_in(method, Staged)), default=0) if length < math.inf else 0
    )
