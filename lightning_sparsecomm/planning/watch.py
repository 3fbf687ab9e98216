"""Times of a run's steps, and whether they drift."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable

import torch

from lightning_sparsecomm.basis.ledger import PROBING
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.planning.exchanges import every_late
from lightning_sparsecomm.run.choice import method_for
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.length import likely_length
from lightning_sparsecomm.sharing.method import Method

# Medians are of steps for so long, as whatever else the machine does disturbs short ones more.
_SECONDS = 0.2

# After a switch: steps that touch new memory, and the fewest and most steps that count.
_SKIPPED, _FEWEST, _MOST = 2, 5, 50

# A step's time has drifted if the median of 4 to 16 steps differs by such a factor from the former one.
_WINDOW, _WIDEST, _DRIFT = 4, 16, 1.5

# Waiting has drifted if it differs by such a factor, and by such a part of a step.
_WAIT_DRIFT, _MUCH = 2.0, 0.15

# Medians of means over several steps are of at least so many.
_FEWEST_MEANS = 3

# Steps between a choice and the next look; twice as many after each, so that looks stay rare where a network changes
# all the time.
_PATIENCE = 20


class StepTimes:
    """How long steps take, and how much of that is computing.

    Attributes:
        every: Where ranks exchange in every so-many-th step only, these steps; their means are what counts.
        last: Seconds of the last step, or the mean of so many.
        waited: What of it was waiting for the network.
    """

    def __init__(self, engine: Engine) -> None:
        self.last = self.waited = 0.0
        self.every = 1
        self._engine = engine
        self._since: float | None = None
        self._ended = time.perf_counter()
        self._communicated = self._waiting = 0.0
        self._made, self._needed = 0, _FEWEST
        # Of the last steps, fewer than `every`: seconds, what is computed, that of the overlap, what was waiting.
        self._recent: list[tuple[float, float, float, float]] = []
        self._steps: deque[tuple[float, ...]] = deque(maxlen=_MOST)
        self._latest: tuple[float, ...] = ()

    def restart(self) -> None:
        """Forgets what was measured, as the run goes on with another method."""
        methods = [each.method for each in self._engine.registry.optimizers if each.method is not None]
        self.every = every_late(methods, self._length)
        self._made, self._needed = 0, means_of(_FEWEST, self.every)
        self._recent.clear()
        self._steps.clear()

    def trial_steps(self, method: Method, seconds: float) -> int:
        """How many steps a trial of a method takes, if one takes so long."""
        registry, chain = self._engine.registry, method.chain
        optimizers = [tracked.optimizer for tracked in registry.optimizers]
        every = every_late([method_for(each, chain, registry.held_by(each)) for each in optimizers], self._length)
        return every * (math.ceil(_SKIPPED / every) + means_of(steps_for(seconds, _FEWEST, _MOST), every))

    def are_short(self, seconds: float) -> bool:
        """Whether steps of about so long, equal on all ranks, need more than the fewest; then it takes more."""
        self._needed = means_of(steps_for(seconds, _FEWEST, _MOST), self.every)
        return self._needed > means_of(_FEWEST, self.every)

    def begin(self) -> None:
        """Marks the begin of a step, unless it has begun: validation and saving in between do not count."""
        if self._since is None:
            self._since = time.perf_counter()
            self._communicated, self._waiting = self._exchanging(), self._clock["wait"]

    def end(self) -> bool:
        """Marks the end of a step. Without `begin`, a step begins where the last one has ended.

        Returns:
            Whether `last` is new: with this step, `every` of them have been made.
        """
        now = time.perf_counter()
        took = now - (self._ended if self._since is None else self._since)
        exchanged = max(0.0, self._exchanging() - self._communicated)
        waited, self._waiting = self._clock["wait"] - self._waiting, self._clock["wait"]
        hook = self._engine.hook
        overlapped = hook.last - hook.first if hook is not None and self._engine.registry.in_buckets else 0.0
        self._since, self._ended, self._communicated = None, now, self._exchanging()
        return self.enter(took, max(0.0, took - exchanged), -overlapped, waited)

    def enter(self, seconds: float, computed: float, negative_overlap: float, waited: float) -> bool:
        """Enters a step, in seconds: the whole, and what of it was computing, and waiting; returns as `end`."""
        self._made += 1
        self._recent.append((seconds, computed, negative_overlap, waited))
        if len(self._recent) < self.every:
            return False
        self.last, *others, self.waited = (statistics.fmean(column) for column in zip(*self._recent))
        self._latest = self.last, *others
        if self._made - self.every >= _SKIPPED:
            self._steps.append(self._latest)
        self._recent.clear()
        return True

    @property
    def are_first(self) -> bool:
        """Whether `last` is of the first steps since the last switch."""
        return self._made == self.every

    @property
    def counted(self) -> int:
        """Steps that were measured since the last switch."""
        return len(self._steps)

    @property
    def enough(self) -> bool:
        """Whether enough steps were."""
        return self.counted >= self._needed

    def summary(self) -> list[float]:
        """Lower medians of the last steps: the whole, what is computed besides the exchange, and the negative of the
        time between DDP's first and last bucket (0 without buckets); so the largest over ranks is what counts.

        Before any step counts, of the latest one.
        """
        steps = list(self._steps)[-self._needed :] or [self._latest]
        return [statistics.median_low(column) for column in zip(*steps)]

    @property
    def _length(self) -> float:
        """The run's, which intervals may follow."""
        return likely_length(self._engine.length, self._engine.may_end_sooner)

    @property
    def _clock(self) -> dict[str, float]:
        return self._engine.wire.ledger.clock.seconds

    def _exchanging(self) -> float:
        return sum(self._clock.values())


class DriftWatch:
    """Whether any rank finds that steps, or their waiting for the network, take longer or shorter than they did.

    A method that sends little hardly shows in its step that the network recovers, but in what it waits. It costs 4
    bytes every few steps.

    Args:
        wire: Between all ranks.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._step = self._waited = math.nan
        self._window = _WINDOW
        self._recent: deque[tuple[float, float]] = deque(maxlen=_WIDEST)
        self._flags = torch.zeros(1)
        self._wait: Callable[[], None] | None = None
        self._steps, self._patience = 0, _PATIENCE / 2

    def begin(self, seconds: float) -> None:
        """Begins to watch, after a choice: a step takes so many seconds, equally on all ranks."""
        self._step, self._waited, self._steps = seconds, math.nan, 0
        self._window = steps_for(seconds, _WINDOW, _WIDEST)
        self._recent.clear()
        self._patience *= 2

    def drifted(self, seconds: float, waited: float, device: torch.device | None = None, steps: int = 1) -> bool:
        """Enters a step, and what of it was waiting; whether it is time to look again, equally on all ranks.

        They may be means over so many `steps`, as many in each call until `begin`. A collective, whose tensor is on
        `device`.
        """
        self._recent.append((seconds, waited))
        self._steps += steps
        window = means_of(self._window, steps)
        if self._steps // steps % window:
            return False
        if self._found():
            self._steps = 0
            return True
        step, wait = (statistics.median(column) for column in zip(*list(self._recent)[-window:]))
        if math.isnan(self._step):
            # Of a resumed run.
            self._step = step
        if math.isnan(self._waited):
            self._waited = wait
        away = self._steps >= self._patience and self._is_away(step, wait)
        self._flags = torch.tensor([float(away)], device=device)
        self._wait = self._wire.all_reduce_later_(self._flags, PROBING)
        return False

    def _is_away(self, step: float, wait: float) -> bool:
        if not 1 / _DRIFT < step / self._step < _DRIFT:
            return True
        much = abs(wait - self._waited) > _MUCH * self._step
        return much and not 1 / _WAIT_DRIFT < wait / max(self._waited, 1e-9) < _WAIT_DRIFT

    def _found(self) -> bool:
        """What the last window's sum says; it has arrived by now."""
        if self._wait is None:
            return False
        self._wait()
        self._wait = None
        return bool(self._flags.item() > 0)


def means_of(steps: int, every: int) -> int:
    """How many means over `every` steps each tell as much as so many steps, but at least three.

    >>> means_of(5, 1), means_of(20, 2), means_of(5, 4)
    (5, 10, 3)
    """
    return steps if every == 1 else max(_FEWEST_MEANS, math.ceil(steps / every))


def steps_for(seconds: float, least: int, most: int) -> int:
    """How many steps of so many seconds tell their time.

    >>> steps_for(0.3, 5, 50), steps_for(0.01, 5, 50)
    (5, 20)
    """
    return most if most * seconds <= _SECONDS else max(least, math.ceil(_SECONDS / seconds))
