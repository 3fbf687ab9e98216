"""What steps are going to take in a run: the network as it was measured, and what each method computes and sends."""

import math
import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from lightning_sparsecomm.methods.auto import BASELINE
from lightning_sparsecomm.planning.measured_link import MeasuredLink
from lightning_sparsecomm.planning.model import Work, predict
from lightning_sparsecomm.planning.probe import agreed, measure_link
from lightning_sparsecomm.planning.rehearsed import Rehearsed
from lightning_sparsecomm.planning.usable import rehearsals, trained_by
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.length import likely_length
from lightning_sparsecomm.sharing.gradients import has_few_rows
from lightning_sparsecomm.sharing.method import Method


class Outlook:
    """Predicts steps of a run.

    Args:
        engine: The run.
        seconds: About how long measuring the network may take.

    Attributes:
        link: The network as it was last measured; None before.
        seconds_spent: On measuring the network and rehearsing methods.
    """

    def __init__(self, engine: Engine, seconds: float) -> None:
        self.link: MeasuredLink | None = None
        self.seconds_spent = 0.0
        self._engine, self._seconds = engine, seconds
        # Before the first step, which alone tells, for methods that are chosen later.
        engine.registry.few_rows.wanted = True
        self._costs: dict[str, Rehearsed] = {}
        self._rehearsed_for: object = None

    def look(self, choices: Mapping[str, Method]) -> None:
        """Measures the network, and rehearses the methods where that was not done yet for these parameters. A
        collective."""
        begin = time.perf_counter()
        self.link = measure_link(self._engine.wire, self._seconds, self.device)
        self.seconds_spent += time.perf_counter() - begin
        self._rehearse(choices)

    def predicted(self, choices: Mapping[str, Method], work: Work) -> dict[str, float]:
        """Seconds of a step with each method, agreed on by all ranks; infinite where one could not rehearse it. A
        collective."""
        assert self.link is not None
        self._rehearse(choices)
        costs = [self._costs.get(name) for name in choices]
        mine = [math.inf if each is None else predict(each, self.link, work).seconds for each in costs]
        return dict(zip(choices, agreed(self._engine.wire, mine, self.device)))

    def _rehearse(self, choices: Mapping[str, Method]) -> None:
        """Rehearses the methods, and again where parameters have been unfrozen since, or the first step has told that
        gradients have few rows."""
        engine, begin = self._engine, time.perf_counter()
        kinds = trained_by(engine)
        trained = [(id(parameter), has_few_rows(parameter)) for _, named in kinds for _, parameter in named]
        if trained != self._rehearsed_for:
            self._rehearsed_for = trained
            length = likely_length(engine.length, engine.may_end_sooner)
            self._costs = rehearsals(choices, kinds, engine.wire.world_size, length)
            self.seconds_spent += time.perf_counter() - begin

    def learn_rate(self, step: float, work: Work) -> bool:
        """Learns a far link's rate from ddp's step, which has far more bytes than could be measured before it; whether
        it did. A collective."""
        link, cost = self.link, self._costs.get(BASELINE)
        if link is None or not link.is_far:
            return False
        # A rank may have failed to rehearse ddp.
        found = None if cost is None else link.fitted(lambda each: predict(cost, each, work).seconds, step).rate
        rate = agreed(self._engine.wire, [found or 0.0], self.device)[0]
        self.link = replace(link, rate=rate or None)
        return rate > 0

    def forget_run(self) -> None:
        """The run is over: keeps what is known, and lets go of the model."""
        vars(self).pop("_engine", None)

    @property
    def device(self) -> torch.device:
        """The model's, on which ranks agree."""
        return self._engine.registry.named[0][1].device
