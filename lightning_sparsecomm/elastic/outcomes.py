"""What comes of a replica's exchanges with others: they count, are taken back, or are in flight or in doubt."""

from collections.abc import Callable, Sequence

from lightning_sparsecomm.elastic.connections import Connections
from lightning_sparsecomm.elastic.ending import Ending
from lightning_sparsecomm.elastic.joining import Joining
from lightning_sparsecomm.elastic.members import NOTHING, Member, Offer, Plan
from lightning_sparsecomm.elastic.membership import Membership
from lightning_sparsecomm.elastic.record import Ended, Landed, Outcome, Record
from lightning_sparsecomm.elastic.rounds import Made, Rounds
from lightning_sparsecomm.elastic.units import steps_in_flight
from lightning_sparsecomm.elastic.wire import ElasticWire, LostPeerError
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.turn import Turns


class Outcomes(Turns):
    """Keeps the name of what this replica shares, which changes with each exchange that counts.

    Args:
        engine: The run, whose wire is `wire`.
        wire: Of this replica.
        quorum: Meets other replicas.
        joining: Packs and takes over what a replica that joins needs.
        stop: Called after the last exchange of a replica's run, with which all end.
        record: Where meetings are noted; None for nowhere.

    Attributes:
        state: The name of what this replica shares with others; `NOTHING` before it has met any.
        round: Rounds that led to it.
        membership: Who takes part.
    """

    def __init__(
        self,
        engine: Engine,
        wire: ElasticWire,
        quorum: Connections,
        joining: Joining,
        stop: Callable[[], None],
        record: Record | None,
    ) -> None:
        super().__init__(engine.registry, engine.replicas)
        self.state, self.round = NOTHING, 0
        self.membership, self.record = Membership(), record or Record(None)
        self._engine, self._wire, self._quorum, self._joining = engine, wire, quorum, joining
        self._stop, self._ending = stop, Ending(quorum)
        self._rounds = Rounds(engine.registry, engine.replicas, wire, quorum)

    def _count(self, made: Made, round_: int) -> None:
        """Commits to an exchange that all have confirmed."""
        self._rounds.commit()
        self.state, self.round = made.state, round_
        self._joining.samples.settle(self.state)
        self._joining.own.keep(self._ending.run, self.state)

    def _land(self) -> None:
        """Waits for what is in flight, if anything is, and commits to it, or takes it back if a replica was lost."""
        rounds = self._rounds
        if rounds.flight is None:
            return
        assert rounds.made is not None
        landed = Landed(self._quorum.name, rounds.made.state, steps_in_flight(rounds.made.units), "counts")
        try:
            made = rounds.land()
        except LostPeerError as error:
            outcome: Outcome = "lost" if rounds.made is None else "in doubt"
            self.record.landing(landed._replace(outcome=outcome, prepared=rounds.prepared))
            # Those that wait for the state come again.
            self._joining.waiting = ()
            self.membership.fail()
            self._quorum.fail(error)
        else:
            self.record.landing(landed)
            self.state, self.round = made.state, self.round + 1
            self._joining.samples.settle(self.state)
            # Only now: what the log does not have, a replay does not keep.
            self._joining.own.keep(self._ending.run, self.state)

    def _ended_with(self, plan: Plan) -> bool:
        """Whether the exchange that this replica is in doubt about was the last one of all others, which have left."""
        pending = self._rounds.pending
        return pending not in (NOTHING, plan.state) and self._ending.is_with(pending)

    def _end_late(self, members: Sequence[Member]) -> list[Offer]:
        """Commits to that exchange. Returns it."""
        state, quorum = self._rounds.pending, self._quorum
        self.record.late_end(quorum.name, quorum.number, members, state, self.round + 1)
        done = self._rounds.settle(state)
        self._joining.samples.settle(state)
        self.state, self.round = state, self.round + 1
        self._ending.reached = True
        self._stop()
        return done

    def _end_if(self, plan: Plan) -> None:
        if plan.ends:
            self._ending.reached = True
            self._stop()

    def end(self, weights: str) -> None:
        """Training is over; `weights` is a digest of what it has ended with."""
        self._ending.tell(self.state, self._registry.steps)
        self.record.end(Ended(self._quorum.name, self.round, weights))
