"""Meetings of replicas that come and go, and what follows from each: exchanges, and states for those that join."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_sparsecomm.basis.ledger import JOINING
from lightning_sparsecomm.elastic.connections import Connections
from lightning_sparsecomm.elastic.introduction import check_place, introduced
from lightning_sparsecomm.elastic.joining import Joining
from lightning_sparsecomm.elastic.lead import Lead
from lightning_sparsecomm.elastic.members import NOTHING, Member, Offer, Plan, pace_of, plan_of, weights_of
from lightning_sparsecomm.elastic.membership import Change
from lightning_sparsecomm.elastic.outcomes import Outcomes
from lightning_sparsecomm.elastic.pace import Pace
from lightning_sparsecomm.elastic.record import Record
from lightning_sparsecomm.elastic.units import set_pace
from lightning_sparsecomm.elastic.wire import ElasticWire, LostPeerError
from lightning_sparsecomm.run.contents import State
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.optimizers import TrackedOptimizer
from lightning_sparsecomm.sharing.share import Turn


class Meetings(Outcomes):
    """What turns among replicas have in common: each begins with a meeting, in which what is in flight has landed.

    Args:
        engine, wire, quorum, joining, stop, record: As of `Outcomes`.
        setup: By topic, a digest of what must be equal on all replicas.
        tell: Called with each change of members that this replica is to say: all where it leads, or else its own.
        adapts: Whether a slow replica makes fewer steps between exchanges than the fastest one.
        compare_every: Rounds between two comparisons of weights that are to be equal after each step; None for none. A
            replica that differs from most gets the state anew.

    Attributes:
        leads: Whether this replica has led the last round.
        lead: Notes who leads, and how far this replica is behind others.
    """

    def __init__(
        self,
        engine: Engine,
        wire: ElasticWire,
        quorum: Connections,
        joining: Joining,
        setup: dict[str, str],
        tell: Callable[[Change], None],
        stop: Callable[[], None],
        adapts: bool = False,
        compare_every: int | None = None,
        record: Record | None = None,
    ) -> None:
        super().__init__(engine, wire, quorum, joining, stop, record)
        self.lead, self.leads = Lead(joining), False
        self._setup, self._tell = setup, tell
        self._adapts, self._pace, self._compare_every = adapts, Pace(), compare_every
        engine.state.without_ddp = True
        # The optimizer that is in a step, and whether that step is still to be counted.
        self._current: tuple[TrackedOptimizer, Turn] | None = None
        # Whether the state that it has got is the last one.
        self._over = False

    def _meet(self, offer: Offer | None) -> tuple[bool, list[Offer]]:
        """One meeting: whether this replica has got the state from another, and what it has exchanged.

        Nothing of either where a replica was lost, after which another meeting is due. Of an exchange in flight, this
        starts it.
        """
        self._get_ready()
        try:
            self._quorum.form()
            return self._follow(offer)
        except LostPeerError as error:
            self.membership.fail()
            self._quorum.fail(error)
            return False, []

    def _get_ready(self) -> None:
        """Ends what is in flight, and what cannot be settled any more."""
        self._land()
        self._send_waiting(0)
        if self._rounds.is_lost:
            # It gets the state of others, whatever has become of the exchange.
            self._rounds.take_back()
            self.state, self.round = NOTHING, 0

    def _follow(self, offer: Offer | None) -> tuple[bool, list[Offer]]:
        """What follows from what members of a quorum say. Returns as `_meet`. Raises `LostPeerError`."""
        quorum = self._quorum
        mine = Member(quorum.name, self.state, self.round, self._rounds.pending, 0, self._setup, offer)
        note = self._joining.note(self.round)
        mine = mine._replace(
            samples=self._joining.samples.needs(), behind=self.lead.behind, note=note, leads=self.leads
        )
        members = introduced(mine, self._registry, self._compare_every, quorum, self._wire)
        plan = plan_of(members, quorum.number)
        if self._ended_with(plan):
            return False, self._end_late(members)
        with self.record.meeting(quorum.name, quorum.number, plan, members, quorum.rank, self._rounds):
            done = self._rounds.settle(plan.state)
            self._note(plan, members, 0 if offer is None else offer.trained)
            self._joining.samples.meet(plan, members, quorum.rank, quorum.number)
            if quorum.rank in plan.joining:
                self._joining.own.present = [member.name for member in members]
                self._receive(plan)
                self._over = plan.ends
                self._end_if(plan)
                return True, done
            self.state, self.round = plan.state, plan.round
            self._ending.run = self._ending.run or plan.state
            if plan.offer is not None and quorum.rank in plan.exchanging:
                self._exchange(plan, plan.offer, members)
                done.append(plan.offer)
            if self.leads and plan.joining:
                self._joining.waiting = plan.joining
                if plan.offer is None or plan.offer.kind != "gradients":
                    self._send_waiting(1)
            return False, done

    def _note(self, plan: Plan, members: Sequence[Member], steps: int) -> None:
        rank = self._quorum.rank
        check_place(plan, members, rank)
        names = [members[each].name for each in sorted((*plan.healthy, *plan.joining))]
        own = members[rank].name
        # Those that begin a run all join. That its weights differ, a replica has said.
        joining = [members[each].name for each in plan.joining if each not in plan.differing]
        begun = any(members[each].state != NOTHING for each in plan.healthy)
        change = self.membership.meet(names, plan.round, steps, joining if begun else (), own, members[rank].round)
        if change is not None and change.gone:
            # If this raises, callbacks and loggers that save what is left must not: it leads no more.
            self.leads = False
            exchanges = plan.offer is not None and bool(plan.offer.units)
            self._ending.check(plan.state, self._registry.steps, exchanges)
        self.leads = self.lead.note(plan, members, rank)
        if change is not None:
            self.record.change(change)
            if self.leads or own in change.joined:
                self._tell(change)

    def _exchange(self, plan: Plan, offer: Offer, members: Sequence[Member]) -> None:
        """Makes an exchange with all that share the same state, and commits to it, or starts it in flight.

        A collective of these.
        """
        assert self._current is not None
        rank, names = self._quorum.rank, [members[each].name for each in plan.exchanging]
        made = self._rounds.make(plan, offer, names, self._current[1], weights_of(members, plan)[rank])
        if made.flight is None:
            self._count(made, plan.round + 1)
            if self._adapts:
                set_pace(made.units, pace_of(rank, members, plan))
        self._end_if(plan)

    def _send_waiting(self, ahead: int) -> None:
        """Starts to send the state to those that wait for it; training goes on meanwhile. Not with one in flight.

        `ahead` is 1 where the optimizer in whose turn this is has made a step that is not counted yet.
        """
        if self._joining.waiting and self._rounds.flight is None:
            steps = {} if self._current is None else {self._current[0].number: self._current[1].step + ahead}
            shared: State = {"state": self.state, "round": self.round, "run": self._ending.run}
            shared["exchanged"] = self._rounds.exchanged
            self._wire.ledger.record(JOINING, "send", self._joining.send(shared, steps, self._quorum))

    def _receive(self, plan: Plan) -> None:
        """Gets the state from the replica that leads, once that has exchanged."""
        counted = self._current is None or self._current[1].kind != "weights"
        number = None if self._current is None or counted else self._current[0].number
        state = self._joining.receive(self._quorum, plan.leader, number)
        self.state, self.round, self._ending.run = state["state"], state["round"], state["run"]
        self._rounds.exchanged = state["exchanged"]
        self.record.holder = self._joining.own.taken

    @contextmanager
    def _within(self, *current: Any) -> Iterator[None]:
        """A context of meetings in an optimizer's turn, if given. Whatever ends it by an error lets others go on."""
        self._current = current or None
        try:
            yield
        except BaseException as error:
            self._quorum.fail(error)
            self._rounds.drop()
            raise
        finally:
            self._current = None
