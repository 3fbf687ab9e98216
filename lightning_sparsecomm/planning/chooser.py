"""Chooses a run's method while it trains: measures, predicts, tries the best, and keeps the fastest."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict

from lightning_sparsecomm.methods.auto import BASELINE
from lightning_sparsecomm.planning.measured_link import MeasuredLink
from lightning_sparsecomm.planning.model import Work
from lightning_sparsecomm.planning.outlook import Outlook
from lightning_sparsecomm.planning.probe import agreed
from lightning_sparsecomm.planning.quantities import as_time
from lightning_sparsecomm.planning.record import Record, reason
from lightning_sparsecomm.planning.usable import usable, without_buckets
from lightning_sparsecomm.planning.watch import DriftWatch, StepTimes
from lightning_sparsecomm.run.contents import State
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.following import form_for
from lightning_sparsecomm.run.optimizers import TrackedOptimizer
from lightning_sparsecomm.run.switching import adopt, switch
from lightning_sparsecomm.sharing.method import Method, RunSize

# ddp's first steps are not worth their time where its sums alone take so many times the best exchange, and longer.
_HOPELESS, _HOPELESS_SECONDS = 3.0, 0.05

_WAITS = (
    "sparsecomm: ddp is no choice here, since a backward pass reaches only some of the parameters. With"
    " SparseCommStrategy(methods.auto(), find_unused_parameters=True) it is one."
)


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
    """

    def __init__(
        self,
        engine: Engine,
        choices: Mapping[str, Method],
        seconds: float = 1.0,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._given = dict(choices)
        self.choices = dict(choices)
        self.record = Record()
        self.say = say
        self._engine = engine
        self._outlook = Outlook(engine, seconds)
        self._times = StepTimes(engine)
        self._watch = DriftWatch(engine.wire)
        self._begun = self._round_over = False
        # Whether DDP's buckets would wait forever for some gradient.
        self._waits = False
        # What to begin with instead of ddp, and why, until that is done.
        self._first: tuple[str, str] | None = None

    @property
    def link(self) -> MeasuredLink | None:
        """The network as it was last measured; None before."""
        return self._outlook.link

    @property
    def measuring_seconds(self) -> float:
        """Spent on measuring the network and rehearsing methods."""
        return self._outlook.seconds_spent

    def follow(self, run: RunSize) -> None:
        """Takes the methods in their forms for the run, before the first step; equal on all ranks."""
        forms = {name: form_for(self._engine.registry, each, run) for name, each in self._given.items()}
        if forms != self._given:
            self.choices, self.record.followed = {name: forms[name] for name in self.choices}, run

    def begin(self, in_backward: bool = False) -> None:
        """Measures the network, rehearses the methods, and chooses how to begin. A collective, before the first step.

        A resumed run goes on with the method that it had. Where a forward pass has told DDP's reducer to sum already,
        `in_backward`, the first step stays with ddp.
        """
        if self._begun:
            return
        self._begun, self.choices = True, usable(self.choices, self._engine)
        self._times.restart()  # A resumed run knows its length only now.
        self.record.ranks = self._engine.wire.world_size
        if not self._has_choice:
            self.record.settled = True
            if self.record.current != BASELINE:
                self._use(BASELINE, "nothing else can be chosen")
        if self.record.settled:
            return
        self._outlook.look(self.choices)
        assert self.link is not None
        if not self.record.history and self.link.rate_is_known:
            self._first = _without_doubt(self._outlook.predicted(self.choices, Work(0.0)))
            if self._first is not None and not in_backward:
                self._use(*self._first, deliver=False)

    @property
    def number(self) -> int:
        """The place of the method in use among all that were given; those that the run cannot use count, too."""
        return list(self._given).index(self.record.current)

    def before_batch(self) -> None:
        self._times.begin()

    def after_step(self, tracked: TrackedOptimizer) -> None:
        engine, times, optimizers = self._engine, self._times, self._engine.registry.optimizers
        # A trial run, such as a search for a learning rate, stays with ddp.
        if not (self._begun and self._has_choice) or tracked.steps == engine.length:
            return
        hook = engine.hook
        self._waits = self._waits or (not engine.registry.in_buckets and hook is not None and hook.would_wait)
        # Several optimizers take turns; the last one ends a round. Gradients that are shared, as where they were
        # clipped, belong to a step with the method that has shared them.
        self._round_over = self._round_over or tracked is optimizers[-1]
        if not self._round_over or any(each.shared for each in optimizers):
            return
        self._round_over = False
        if not times.end():
            return
        with engine.wire.in_step():
            if self._first is not None:
                self._use(*self._first, tracked)
            elif self.record.settled:
                if self._watch.drifted(times.last, times.waited, self._outlook.device, times.every):
                    self._look_again(tracked)
            elif times.enough or ((times.are_first or times.counted == 2) and self._is_hopeless()):
                self._decide(tracked)

    def state_dict(self) -> State:
        return asdict(self.record)

    def load_state_dict(self, state: State) -> None:
        record = Record(**state)
        self.choices = dict(self._given)
        if record.followed is not None:
            # The forms that its run had, also where this one has another length, or other ranks.
            self.follow(record.followed)
        choices = usable(self.choices, self._engine)
        if record.current not in choices:
            warnings.warn(
                f"the checkpoint was saved while methods.auto used {record.current}, which is not among its methods"
                f" now: {', '.join(choices)}. It begins anew, and what that method held is left out.",
                stacklevel=2,
            )
            return
        self.record = record.resumed(self._engine.wire.world_size, choices)
        adopt(self._engine, self.choices[record.current])
        self._times.restart()

    @property
    def _has_choice(self) -> bool:
        return self._engine.wire.world_size > 1 and len(self.choices) > 1

    def _agreed_step(self) -> tuple[float, Work]:
        """Seconds of a step with the method in use, and what of them is computed. A collective."""
        mine = [*self._times.summary(), float(self._waits)]
        step, computing, negative_overlap, waits = agreed(self._engine.wire, mine, self._outlook.device)
        if waits and BASELINE in self.choices:
            self._leave_out_buckets()
        return step, Work(computing, -negative_overlap if negative_overlap < 0 else None)

    def _is_hopeless(self) -> bool:
        """Whether its first step, or the first two that count, say enough of the method in use. A collective."""
        step, work = self._agreed_step()
        if self._times.are_short(step):
            return False
        known = self.record.measured or self._outlook.predicted(self.choices, work)
        return self.record.is_far_behind(step, known, self._times.are_first)

    def _decide(self, tracked: TrackedOptimizer) -> None:
        """What to do when the method in use has been measured: try another one, or settle."""
        record, left = self.record, self._engine.length - tracked.steps
        step, work = self._agreed_step()
        record.enter(step, cut_short=not self._times.enough)
        if len(record.measured) == 1:
            known, outlook = self.link is not None and self.link.rate_is_known, self._outlook
            predicted = outlook.predicted(self.choices, work)
            if record.current == BASELINE and outlook.learn_rate(step, work):
                # What the rate is learned from was predicted before, if at all.
                before = predicted[BASELINE] if known else math.inf
                predicted = outlook.predicted(self.choices, work) | {BASELINE: before}
            record.predicted |= {name: seconds for name, seconds in predicted.items() if seconds < math.inf}
            record.queue = record.worth_trying if record.trials_pay(step, left) else []
        fitting = [name for name, each in self.choices.items() if self._times.trial_steps(each, step) < left]
        record.queue = record.to_try_next(fitting, left)
        if record.queue:
            self._use(record.queue.pop(0), "to try it", tracked)
            return
        chosen, record.settled = record.fastest_of(self.choices), True
        if chosen != record.current:
            self._use(chosen, "", tracked)
        self._watch.begin(record.measured[chosen])
        line = f"sparsecomm: step {tracked.steps}: {reason(record, self.link, chosen, self._times.every)}"
        record.history.append({"step": tracked.steps, "method": chosen, "why": line})
        self.say(line)

    def _leave_out_buckets(self) -> None:
        self.choices = without_buckets(self.choices)
        self.record.keep(self.choices)
        self.say(_WAITS)

    def _look_again(self, tracked: TrackedOptimizer) -> None:
        """A step's time has drifted: measures the network anew, and decides with the steps just made."""
        record = self.record
        self._outlook.look(self.choices)
        record.history.append({"step": tracked.steps, "method": record.current, "why": "the step's time has drifted"})
        record.forget()
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


def _without_doubt(nets: Mapping[str, float]) -> tuple[str, str] | None:
    """The method to begin with, and why, given each one's seconds of a step without computing; None for ddp."""
    best = min(nets, key=lambda name: nets[name])
    if nets[BASELINE] <= max(_HOPELESS * nets[best], nets[best] + _HOPELESS_SECONDS):
        return None
    return best, f"ddp's sums alone would take {as_time(nets[BASELINE])}"


def forget_run(chooser: AutoChooser) -> None:
    """The run is over: the chooser keeps what it knows, and lets go of the model and of what the method holds."""
    for name in ("_engine", "_times", "_watch"):
        vars(chooser).pop(name, None)
    chooser._outlook.forget_run()
