"""Chooses a run's method while it trains: measures, predicts, tries the best, and keeps the fastest."""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace

import torch

from lightning_sparsecomm.methods.auto import BASELINE
from lightning_sparsecomm.planning.links import MeasuredLink
from lightning_sparsecomm.planning.model import Work, predict
from lightning_sparsecomm.planning.probe import agreed, measure_link
from lightning_sparsecomm.planning.quantities import as_rate, as_time
from lightning_sparsecomm.planning.rehearsed import Rehearsed
from lightning_sparsecomm.planning.usable import rehearsals, trained_by, usable
from lightning_sparsecomm.planning.watch import DriftWatch, StepTimes
from lightning_sparsecomm.run.contents import State
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.optimizers import TrackedOptimizer
from lightning_sparsecomm.run.switching import adopt, switch
from lightning_sparsecomm.sharing.method import Method

# A method that is predicted to take at most so many times the best is tried, and at most so many are.
_WORTH_TRYING, _MOST_TRIED = 1.3, 2

# Of two methods that differ by less, the one that is closer to ddp is used.
_ALIKE = 1.015

# ddp's first steps are not worth their time where its sums alone take so many times the best exchange, and longer.
_HOPELESS, _HOPELESS_SECONDS = 3.0, 0.05

# Steps that must be left for a trial to pay.
_LEFT = 40


@dataclass
class Record:
    """What is known of each method, by name; seconds per step.

    Attributes:
        current: The method in use.
        settled: Whether it is chosen, and not only tried.
        queue: Methods still to be tried.
        measured, predicted: Seconds of a step; `predicted` as it was before the method was first measured.
        ranks: How many measured; 0 where unknown.
        history: Each switch and choice: the steps done, the method, why, and what was known then.
    """

    current: str = BASELINE
    settled: bool = False
    queue: list[str] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)
    ranks: int = 0
    history: list[dict[str, object]] = field(default_factory=list)

    @property
    def worth_trying(self) -> list[str]:
        """Methods whose predictions are near the best of them and of what was measured, the best first."""
        rest = {name: seconds for name, seconds in self.predicted.items() if name != self.current}
        bound = _WORTH_TRYING * min([*self.measured.values(), *rest.values()])
        return sorted((name for name in rest if rest[name] <= bound), key=lambda name: rest[name])[:_MOST_TRIED]

    def fastest_of(self, names: Iterable[str]) -> str:
        """Of the methods that were measured, the first of `names` that is about as fast as the fastest."""
        bound = _ALIKE * min(self.measured.values())
        return next(name for name in names if self.measured.get(name, math.inf) <= bound)


class AutoChooser:
    """Runs `methods.auto`. All ranks decide alike, from numbers that they have agreed on.

    Args:
        engine: The run. It begins as ddp.
        choices: The methods, by name; ddp first.
        seconds: About how long measuring the network may take.
        say: Prints a line, on the rank that prints.

    Attributes:
        choices: The methods that can be used in this run.
        record: What is known, and what was chosen.
        link: The network as it was last measured; None before.
        measuring_seconds: Spent on measuring the network and rehearsing methods.
    """

    def __init__(
        self,
        engine: Engine,
        choices: Mapping[str, Method],
        seconds: float = 1.0,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.choices = dict(choices)
        self._names = list(choices)
        self.record = Record()
        self.say = say
        self.link: MeasuredLink | None = None
        self._engine = engine
        self._seconds = seconds
        self._costs: dict[str, Rehearsed] = {}
        self._trained = 0
        self._times = StepTimes(engine)
        self._watch = DriftWatch(engine.wire)
        self._begun = self._round_over = False
        # What to begin with instead of ddp, and why, until that is done.
        self._first: tuple[str, str] | None = None
        self.measuring_seconds = 0.0

    def begin(self, in_backward: bool = False) -> None:
        """Measures the network, rehearses the methods, and chooses how to begin. A collective, before the first step.

        A resumed run goes on with the method that it had. Where a forward pass has told DDP's reducer to sum already,
        `in_backward`, the first step stays with ddp.
        """
        if self._begun:
            return
        self._begun = True
        self.choices = usable(self.choices, self._engine)
        self.record.ranks = self._engine.wire.world_size
        if not self._has_choice:
            self.record.settled = True
            if self.record.current != BASELINE:
                self._use(BASELINE, "nothing else can be chosen")
        if self.record.settled:
            return
        self._look()
        if not self.record.history:
            nets = self._predicted(Work(0.0))
            best = min(nets, key=lambda name: nets[name])
            assert self.link is not None
            if self.link.rate_is_known and nets[BASELINE] > max(_HOPELESS * nets[best], nets[best] + _HOPELESS_SECONDS):
                self._first = best, f"ddp's sums alone would take {as_time(nets[BASELINE])}"
                if not in_backward:
                    self._use(*self._first, deliver=False)

    @property
    def number(self) -> int:
        """The place of the method in use among all that were given; those that the run cannot use count, too."""
        return self._names.index(self.record.current)

    def before_batch(self) -> None:
        self._times.begin()

    def after_step(self, tracked: TrackedOptimizer) -> None:
        engine, optimizers = self._engine, self._engine.registry.optimizers
        # A trial run, such as a search for a learning rate, stays with ddp.
        if not (self._begun and self._has_choice) or tracked.steps == engine.length:
            return
        # Several optimizers take turns; the last one ends a round. Gradients that are shared, as where they were
        # clipped, belong to a step with the method that has shared them.
        self._round_over = self._round_over or tracked is optimizers[-1]
        if not self._round_over or any(each.shared for each in optimizers):
            return
        self._round_over = False
        self._times.end()
        with engine.wire.in_step():
            if self._first is not None:
                self._use(*self._first, tracked)
            elif self.record.settled:
                if self._watch.drifted(self._times.last, self._times.waited, self._device):
                    self._look_again(tracked)
            elif self._times.enough:
                self._decide(tracked)

    def state_dict(self) -> State:
        return asdict(self.record)

    def load_state_dict(self, state: State) -> None:
        record, ranks = Record(**state), self._engine.wire.world_size
        choices = usable(self.choices, self._engine)
        if record.current not in choices:
            warnings.warn(
                f"the checkpoint was saved while methods.auto used {record.current}, which is not among its methods"
                f" now: {', '.join(choices)}. It begins anew, and what that method held is left out.",
                stacklevel=2,
            )
            return
        if record.ranks not in (0, ranks):
            # What was measured holds for as many ranks. The method stays until others have been tried.
            record = Record(record.current, history=record.history)
        record.ranks = ranks
        known = set(record.measured) | set(record.predicted) | set(record.queue)
        if not record.settled and not known <= choices.keys():
            # A trial goes on with the methods that it still may use.
            record.queue, record.measured, record.predicted = [], {}, {}
        self.record = record
        adopt(self._engine, self.choices[record.current])
        self._times.restart()

    @property
    def _device(self) -> torch.device:
        return self._engine.registry.named[0][1].device

    @property
    def _has_choice(self) -> bool:
        return self._engine.wire.world_size > 1 and len(self.choices) > 1

    def _look(self) -> None:
        """Measures the network, and rehearses the methods where that was not done yet for these parameters."""
        engine, begin = self._engine, time.perf_counter()
        self.link = measure_link(engine.wire, self._seconds, self._device)
        kinds = trained_by(engine)
        trained = sum(parameter.numel() for _, parameters in kinds for _, parameter in parameters)
        if trained != self._trained:
            # The first time, or parameters have been unfrozen since.
            self._trained = trained
            self._costs = rehearsals(self.choices, kinds, engine.wire.world_size, engine.length)
        self.measuring_seconds += time.perf_counter() - begin

    def _predicted(self, work: Work) -> dict[str, float]:
        """Seconds of a step with each method, agreed on by all ranks; infinite where one could not rehearse it."""
        assert self.link is not None
        costs = [self._costs.get(name) for name in self.choices]
        mine = [math.inf if each is None else predict(each, self.link, work).seconds for each in costs]
        return dict(zip(self.choices, agreed(self._engine.wire, mine, self._device)))

    def _fit(self, step: float, work: Work) -> bool:
        """Learns a far link's rate from ddp's step, which has far more bytes than could be measured before it."""
        link, cost = self.link, self._costs.get(BASELINE)
        if link is None or cost is None or self.record.current != BASELINE or not link.far:
            return False
        found = link.fitted(lambda each: predict(cost, each, work).seconds, step).bandwidth
        self.link = replace(link, rate=agreed(self._engine.wire, [found], self._device)[0])
        return True

    def _decide(self, tracked: TrackedOptimizer) -> None:
        """What to do when the method in use has been measured: try another one, or settle."""
        record = self.record
        step, computing, negative_overlap = agreed(self._engine.wire, self._times.summary(), self._device)
        record.measured[record.current] = step
        if len(record.measured) == 1:
            work = Work(computing, -negative_overlap if negative_overlap < 0 else None)
            known, predicted = self.link is not None and self.link.rate_is_known, self._predicted(work)
            if self._fit(step, work):
                # What the rate is learned from was predicted before, if at all.
                predicted = self._predicted(work) | {record.current: predicted[record.current] if known else math.inf}
            record.predicted |= {name: seconds for name, seconds in predicted.items() if seconds < math.inf}
            record.queue = record.worth_trying if self._engine.length - tracked.steps > _LEFT else []
        if record.queue:
            self._use(record.queue.pop(0), "to try it", tracked)
            return
        chosen, record.settled = record.fastest_of(self.choices), True
        if chosen != record.current:
            self._use(chosen, "", tracked)
        self._watch.begin(record.measured[chosen])
        line = f"sparsecomm: step {tracked.steps}: {_reason(record, self.link, chosen)}"
        record.history.append({"step": tracked.steps, "method": chosen, "why": line})
        self.say(line)

    def _look_again(self, tracked: TrackedOptimizer) -> None:
        """A step's time has drifted: measures the network anew, and decides with the steps just made."""
        record = self.record
        self._look()
        record.history.append({"step": tracked.steps, "method": record.current, "why": "the step's time has drifted"})
        record.measured, record.predicted, record.settled, record.queue = {}, {}, False, []
        self._decide(tracked)

    def _use(self, name: str, why: str, stepped: TrackedOptimizer | None = None, deliver: bool = True) -> None:
        """Goes on with another method, after a step of `stepped`, or before the first one."""
        record, method = self.record, self.choices[name]
        if deliver:
            switch(self._engine, method, stepped)
        else:
            adopt(self._engine, method)
        record.current, self._first = name, None
        steps = self._engine.registry.steps
        if why:
            record.history.append({"step": steps, "method": name, "why": why})
        self._times.restart()


def forget_run(chooser: AutoChooser) -> None:
    """The run is over: the chooser keeps what it knows, and lets go of the model and of what the method holds."""
    for name in ("_engine", "_times", "_watch"):
        vars(chooser).pop(name, None)


def _reason(record: Record, link: MeasuredLink | None, chosen: str) -> str:
    """The choice in words, with what was known."""
    measured, predicted = record.measured, record.predicted
    tried = [
        f"{name} {as_time(seconds)}" + (f" (predicted {as_time(predicted[name])})" if name in predicted else "")
        for name, seconds in measured.items()
    ]
    rest = [f"{name} {as_time(seconds)}" for name, seconds in predicted.items() if name not in measured]
    words = f"chose {chosen}. A step takes: {', '.join(tried)}"
    if rest:
        words += f"; predicted: {', '.join(rest)}"
    if link is not None:
        words += f". Link: {as_rate(link.bandwidth)}, {as_time(link.latency)} a hop"
    return f"{words}."
