"""What a run that chooses its method knows of each."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from lightning_sparsecomm.methods.auto import BASELINE
from lightning_sparsecomm.planning.measured_link import MeasuredLink
from lightning_sparsecomm.planning.quantities import as_rate, as_time
from lightning_sparsecomm.run.following import run_followed
from lightning_sparsecomm.sharing.method import RunSize

# Methods are tried that should take at most so many times as long as the best one; at most so many of them.
_WORTH_TRYING, _MOST_TRIED = 1.3, 2

# A trial pays if so many steps are left, or if it should save the time of so many steps.
_LEFT, _SAVED = 40, 5

# A trial ends early if its steps take so many times as long as those of the best of the others.
_FAR_BEHIND = 1.5

# After its first step, it ends only if that took so many times as long, and so many seconds more: new memory and a TCP
# window that opens can cost a second or two.
_HOPELESS, _LONG = 3.0, 5.0

# Of two methods that differ by less, the one that is closer to ddp is used.
_ALIKE = 1.015

# If another one is so near the fastest, the fastest is tried a second time.
_CLOSE = 1.2


@dataclass
class Record:
    """What is known of each method, by name; seconds per step.

    Attributes:
        current: The method in use.
        settled: Whether it is chosen, and not only tried.
        queue: Methods still to be tried.
        cut_short: Methods whose trial has ended early, as they seemed to be far behind.
        tried_again: Methods that were measured twice.
        measured, predicted: Seconds of a step; `predicted` as it was before the method was first measured.
        ranks: How many measured; 0 where unknown.
        followed: The run for which methods were taken, see `Method.for_run`; None for none.
        history: Each switch and choice: the steps done, the method, why, and what was known then.
    """

    current: str = BASELINE
    settled: bool = False
    queue: list[str] = field(default_factory=list)
    cut_short: list[str] = field(default_factory=list)
    tried_again: list[str] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)
    ranks: int = 0
    followed: RunSize | None = None
    history: list[dict[str, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.followed = run_followed(self.followed)

    @property
    def worth_trying(self) -> list[str]:
        """Methods whose predictions are near the best of them and of what was measured, the best first."""
        rest = {name: seconds for name, seconds in self.predicted.items() if name != self.current}
        bound = _WORTH_TRYING * min([*self.measured.values(), *rest.values()])
        return sorted((name for name in rest if rest[name] <= bound), key=lambda name: rest[name])[:_MOST_TRIED]

    def trials_pay(self, seconds: float, left: float) -> bool:
        """Whether trials do, with so many steps left, and so many seconds for one now."""
        saved = left * (seconds - min(self.predicted.values(), default=seconds))
        return left > _LEFT or saved > _SAVED * seconds

    def enter(self, seconds: float, cut_short: bool) -> None:
        """Enters a step's time with the method in use, and whether its trial has ended early."""
        if self.current in self.measured:
            self.tried_again.append(self.current)
        self.measured[self.current] = seconds
        self.cut_short = [name for name in self.cut_short if name != self.current] + [self.current] * cut_short

    def is_far_behind(self, seconds: float, known: Mapping[str, float], first: bool) -> bool:
        """Whether a step with the method in use takes far longer than with the best of the others, as known.

        Of a `first` step only where ddp begins the run, and more clearly: others load their kernels in theirs.
        """
        best = min((each for name, each in known.items() if name != self.current), default=math.inf)
        if first:
            # So it must have been expected, too: a rank may have been late.
            least = min(seconds, known.get(BASELINE, 0.0))
            return self.current == BASELINE and not self.measured and least > max(_LONG, _HOPELESS * best)
        return seconds > _FAR_BEHIND * best

    def to_try_next(self, fitting: Collection[str], left: float) -> list[str]:
        """What is to be tried, of those methods whose trial fits into the steps that are left."""
        queue = [name for name in self.queue if name in fitting]
        return queue or [name for name in self.to_try_again if left > _LEFT and name in fitting]

    @property
    def to_try_again(self) -> list[str]:
        """Methods that are not far behind what was measured, though they had seemed to be; else the fastest, once.

        That only where another one is near, and the fastest was not measured last: over a high-latency link, steps are
        faster while TCP's window still is what a method that has sent more left.
        """
        fastest, least = min(self.measured.items(), key=lambda item: item[1])
        again = [name for name in self.cut_short if self.measured[name] <= _FAR_BEHIND * least and name != self.current]
        if again or fastest == self.current or fastest in self.tried_again:
            return again
        near = [name for name, seconds in self.measured.items() if seconds <= _CLOSE * least]
        return [fastest] if len(near) > 1 else []

    def forget(self) -> None:
        """Forgets all times: everything is to be measured anew."""
        self.settled, self.queue, self.cut_short, self.tried_again = False, [], [], []
        self.measured, self.predicted = {}, {}

    def resumed(self, ranks: int, names: Collection[str]) -> "Record":
        """The record with which so many ranks go on that may use these methods."""
        record = self
        if self.ranks not in (0, ranks):
            # What was measured holds for as many ranks. The method stays until others have been tried.
            record = Record(self.current, followed=self.followed, history=self.history)
        record.ranks = ranks
        known = set(record.measured) | set(record.predicted) | set(record.queue)
        if not record.settled and not known <= set(names):
            # A trial goes on with the methods that it still may use.
            record.forget()
        return record

    def keep(self, names: Collection[str]) -> None:
        """Forgets the times of others than these methods, and does not try them any more."""
        self.queue, self.cut_short = ([name for name in each if name in names] for each in (self.queue, self.cut_short))
        self.measured = {name: seconds for name, seconds in self.measured.items() if name in names}
        self.predicted = {name: seconds for name, seconds in self.predicted.items() if name in names}

    def fastest_of(self, names: Iterable[str]) -> str:
        """Of the methods that were measured, the first of `names` that is about as fast as the fastest."""
        bound = _ALIKE * min(self.measured.values())
        return next(name for name in names if self.measured.get(name, math.inf) <= bound)


def reason(record: Record, link: MeasuredLink | None, chosen: str, every: int) -> str:
    """The choice in words, with what was known; it exchanges in every so-many-th step."""
    measured, predicted = record.measured, record.predicted
    tried = [
        f"{name} {as_time(seconds)}" + (f" (predicted {as_time(predicted[name])})" if name in predicted else "")
        for name, seconds in measured.items()
    ]
    rest = [f"{name} {as_time(seconds)}" for name, seconds in predicted.items() if name not in measured]
    often = f", which exchanges once in {every} steps" if every > 1 else ""
    words = f"chose {chosen}{often}. A step takes: {', '.join(tried)}"
    if rest:
        words += f"; predicted: {', '.join(rest)}"
    if link is not None:
        words += f". Link: {as_rate(link.bandwidth)}, {as_time(link.latency)} a hop"
    return f"{words}."
