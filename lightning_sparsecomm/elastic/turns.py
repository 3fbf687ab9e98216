"""Exchanges between replicas that come and go."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from lightning_sparsecomm.elastic.introduction import offer_of
from lightning_sparsecomm.elastic.meetings import Meetings
from lightning_sparsecomm.elastic.members import NOTHING, Offer
from lightning_sparsecomm.elastic.units import trained_since, under_way_in, units_of
from lightning_sparsecomm.run.optimizers import TrackedOptimizer
from lightning_sparsecomm.sharing.share import Share, Turn
from lightning_sparsecomm.sharing.streamed import StreamedShare


class ElasticTurns(Meetings):
    """Turns among the replicas that are there: each begins with a quorum, and is repeated if a replica is lost in it.

        meet       a quorum forms; each member says what it shares, and what it has to exchange (`members`)
        exchange   those that share the same state exchange; nothing changes yet
        confirm    one byte from each: all have the result
        commit     memories forget what was sent, and weights move
        send       the one that leads sends the state to those that join, in the background; once it has made the step,
                   where gradients were exchanged

    Units with a delay exchange and confirm in flight, in a thread, while training goes on (`flight`). They commit, or
    take it back, some steps later: in the replica's own time, but before its next meeting, and before the end.

    If confirming fails, a replica cannot know whether others have committed. It keeps the result, and the next meeting
    tells: if any member shares the state that this leads to, it commits too; otherwise all take it back, and repeat it.
    """

    def begin(self) -> None:
        """Meets other replicas before the first step: gets the state from them, or begins one with them.

        What was in flight when the run was saved has arrived since: it is used first.
        """
        with self._within():
            with torch.no_grad():
                for unit in [unit for tracked in self._registry.optimizers for unit in under_way_in(tracked)]:
                    unit.land()
            while self.state == NOTHING:
                self._meet(None)
        self._pace.begin()

    def take_gradients(self, tracked: TrackedOptimizer, due: Sequence[Share], turn: Turn) -> None:
        """Repeated until the optimizer has the mean of those that are there.

        A replica that was behind gets the state of others first. Its gradients are of other weights then, and count
        for nothing.
        """
        stale = False
        while wanted := [number for number, unit in enumerate(units_of(tracked)) if unit.due(turn)]:
            with self._within(tracked, turn):
                joined, done = self._meet(self._offer(tracked, turn, wanted, stale=stale))
            if any((each.kind, each.optimizer) == (turn.kind, tracked.number) for each in done):
                return
            if joined and self._over:  # This step is part of the state.
                return tracked.drop_gradients()
            if joined:
                stale, turn = True, replace(turn, step=tracked.steps)

    def take(self, tracked: TrackedOptimizer, due: Sequence[Share], turn: Turn) -> None:
        """Lands what is in flight if it is time, and meets others until all that is due is exchanged or in flight."""
        units = units_of(tracked)
        if turn.kind == "weights":
            tracked.samples.step(keep=trained_since(units))
        with self._within(tracked, turn):
            if self._lands(tracked, turn):
                self._land()
            self._send_waiting(1)
        # After landing: what was taken back is due again. What others may have committed, the next meeting tells.
        doubtful = self._rounds.made.offer if self._rounds.made is not None and self._rounds.flight is None else None
        again = doubtful.units if doubtful is not None and doubtful.optimizer == tracked.number else ()
        wanted = [number for number, unit in enumerate(units) if number in again or unit.due(turn)]
        if not wanted or self._rounds.flight is not None:
            return
        self._pace.end(max(units[number].steps for number in wanted))
        with self._within(tracked, turn):
            while wanted:
                joined, done = self._meet(self._offer(tracked, turn, wanted, self._pace.seconds))
                if joined:
                    break
                for each in done:
                    if each.optimizer == tracked.number:
                        wanted = [number for number in wanted if number not in each.units]
        self._pace.begin()

    def _offer(
        self, tracked: TrackedOptimizer, turn: Turn, wanted: list[int], step_seconds: float = 0.0, stale: bool = False
    ) -> Offer:
        return offer_of(tracked, turn, wanted, self._engine.length, step_seconds, stale)

    def _lands(self, tracked: TrackedOptimizer, turn: Turn) -> bool:
        """Whether what is in flight is to be used now: it is time, another exchange is due, or one waits to join."""
        flight = self._rounds.flight
        if flight is None:
            return False
        flying = under_way_in(tracked)
        if turn.kind == "end" or self._lands_early(flying):
            return True
        return any(unit.steps >= unit.delay for unit in flying) or any(
            unit.due(turn) for unit in units_of(tracked) if unit not in flying
        )

    def _lands_early(self, flying: Sequence[StreamedShare]) -> bool:
        """Whether what is in flight is used before its time: a replica waits for its outcome."""
        return bool(self._joining.waiting) and self._rounds.flight is not None and self._rounds.flight.ended

    def settle_buffers(self, tracked: TrackedOptimizer, turn: Turn) -> None:
        """Averages buffers that have changed since the last exchange; an offer without units.

        It is a last meeting in any case: a replica that does not know whether the last exchange counts learns it.
        """
        with self._within(tracked, turn):
            joined, done = False, list[Offer]()
            while not joined and all(each.units for each in done):
                joined, done = self._meet(self._offer(tracked, turn, [], self._pace.seconds))

    def average_buffers(self, tracked: TrackedOptimizer, due: Sequence[Share], turn: Turn) -> None:
        """Does nothing: `take` has averaged them, before it committed."""
