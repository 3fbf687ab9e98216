"""Exchanges of weights between replicas that come and go."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_sparsecomm.basis.digests import digest_of
from lightning_sparsecomm.basis.ledger import JOINING, MEMBERSHIP
from lightning_sparsecomm.elastic.joining import Joining
from lightning_sparsecomm.elastic.members import NOTHING, Member, Offer, Plan, pace_of, plan_of, weights_of
from lightning_sparsecomm.elastic.membership import Change, Membership
from lightning_sparsecomm.elastic.pace import Pace
from lightning_sparsecomm.elastic.quorum import Quorum
from lightning_sparsecomm.elastic.rounds import Rounds
from lightning_sparsecomm.elastic.units import units_of
from lightning_sparsecomm.elastic.wire import ElasticWire, LostPeerError
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.gathered import gather_texts
from lightning_sparsecomm.run.optimizers import TrackedOptimizer
from lightning_sparsecomm.run.turn import Turns
from lightning_sparsecomm.sharing.share import Share, Turn

_CPU = torch.device("cpu")


class ElasticTurns(Turns):
    """Turns among the replicas that are there: each begins with a quorum, and is repeated if a replica is lost in it.

        meet       a quorum forms; each member says what it shares, and what it has to exchange (`members`)
        exchange   those that share the same state exchange; nothing changes yet
        confirm    one byte from each: all have the result
        commit     memories forget what was sent, and weights move
        send       the one that leads sends the state to those that join, in the background

    If confirming fails, a replica cannot know whether others have committed. It keeps the result, and the next meeting
    tells: if any member shares the state that this leads to, it commits too; otherwise all take it back, and repeat it.

    Args:
        engine: The run, whose wire is `wire`.
        wire: Of this replica.
        quorum: Meets other replicas.
        joining: Packs and takes over what a replica that joins needs.
        setup: By topic, a digest of what must be equal on all replicas.
        tell: Called with each change of members on the replica that leads.
        stop: Called after the last exchange of a replica's run, with which all end.
        adapts: Whether a slow replica makes fewer steps between exchanges than the fastest one.

    Attributes:
        state: The name of what this replica shares with others; `NOTHING` before it has met any.
        round: Rounds that led to it.
        leads: Whether this replica has led the last round.
        membership: Who takes part.
    """

    def __init__(
        self,
        engine: Engine,
        wire: ElasticWire,
        quorum: Quorum,
        joining: Joining,
        setup: dict[str, str],
        tell: Callable[[Change], None],
        stop: Callable[[], None],
        adapts: bool = False,
    ) -> None:
        super().__init__(engine.registry, engine.replicas)
        self.state, self.round, self.leads = NOTHING, 0, False
        self.membership = Membership()
        self._wire = wire
        self._quorum = quorum
        self._joining = joining
        self._setup = setup
        self._tell = tell
        self._stop = stop
        self._adapts, self._pace = adapts, Pace()
        self._rounds = Rounds(engine.registry, engine.replicas, wire, quorum)
        # The optimizer that is in a step, and whether that step is still to be counted.
        self._current: tuple[TrackedOptimizer, Turn] | None = None

    def begin(self) -> None:
        """Meets other replicas before the first step: gets the state from them, or begins one with them."""
        with self._leaving_on_error():
            while self.state == NOTHING:
                self._meet(None)
        self._pace.begin()

    def take(self, tracked: TrackedOptimizer, due: Sequence[Share], turn: Turn) -> None:
        units, of_due = units_of(tracked), units_of(tracked, due)
        wanted = [number for number, unit in enumerate(units) if unit in of_due and unit.due(turn)]
        if not wanted:
            return
        self._current = tracked, turn
        self._pace.end(max(units[number].steps for number in wanted))
        try:
            with self._leaving_on_error():
                while wanted:
                    joined, done = self._meet(_offer(tracked, wanted, turn, self._pace.seconds))
                    if joined:
                        return
                    for each in done:
                        if each.optimizer == tracked.number:
                            wanted = [number for number in wanted if number not in each.units]
        finally:
            self._current = None
            self._pace.begin()

    def settle_buffers(self, tracked: TrackedOptimizer, turn: Turn) -> None:
        """Averages buffers if forward passes have changed them since the last exchange; an offer without units."""
        if not self._replicas.untrained.shared():
            return
        self._current = tracked, turn
        try:
            with self._leaving_on_error():
                joined, done = False, list[Offer]()
                while not joined and all(each.units for each in done):
                    joined, done = self._meet(_offer(tracked, [], turn, self._pace.seconds))
        finally:
            self._current = None

    def average_buffers(self, tracked: TrackedOptimizer, due: Sequence[Share], turn: Turn) -> None:
        """Does nothing: `take` has averaged them, before it committed."""

    def _meet(self, offer: Offer | None) -> tuple[bool, list[Offer]]:
        """One meeting: whether this replica has got the state from another, and what it has exchanged.

        Nothing of either where a replica was lost, after which another meeting is due.
        """
        quorum = self._quorum
        try:
            quorum.form()
            members = self._introduce(offer)
            plan = plan_of(members, quorum.number)
            done = self._settle(plan)
            self._note(plan, members)
            if quorum.rank in plan.joining:
                self._receive(plan)
                return True, done
            self.state, self.round = plan.state, plan.round
            if plan.offer is not None:
                self._exchange(plan, plan.offer, members)
                done.append(plan.offer)
            if self.leads and plan.joining:
                self._send(plan)
            return False, done
        except LostPeerError as error:
            self.membership.fail()
            quorum.fail(error)
            return False, []

    def _introduce(self, offer: Offer | None) -> list[Member]:
        """What all members of the quorum say, by rank. A collective."""
        quorum, optimizers = self._quorum, self._registry.optimizers
        names = [[name for name, _ in tracked.parameters] for tracked in optimizers]
        trained = {"the parameters that train": digest_of(_bytes(repr(names)))} if any(names) else {}
        mine = Member(
            quorum.name,
            self.state,
            self.round,
            self._rounds.pending,
            max((tracked.steps for tracked in optimizers), default=0),
            self._setup | trained,
            offer,
        )
        ranks = range(quorum.size)
        with self._wire.among(quorum.group_of(ranks), ranks, quorum.rank):
            return [Member.from_json(text) for text in gather_texts(mine.to_json(), self._wire, _CPU, MEMBERSHIP)]

    def _settle(self, plan: Plan) -> list[Offer]:
        """Commits to an exchange that was made before this meeting if others have, or takes it back."""
        if self._rounds.pending == plan.state:
            made = self._rounds.commit()
            return [made.offer] if made is not None else []
        self._rounds.take_back()
        return []

    def _note(self, plan: Plan, members: Sequence[Member]) -> None:
        rank = self._quorum.rank
        if rank in plan.refused:
            raise ValueError(
                f"{plan.refused[rank]} must be equal on all replicas; that of {members[plan.leader].name} differs."
                " Start this replica with the same versions, model, method and arguments."
            )
        self.leads = rank == plan.leader
        names = [members[each].name for each in sorted((*plan.healthy, *plan.joining))]
        change = self.membership.meet(names, plan.round)
        if change is not None and self.leads:
            self._tell(change)

    def _exchange(self, plan: Plan, offer: Offer, members: Sequence[Member]) -> None:
        """Makes an exchange with all that share the same state, and commits to it. A collective of these."""
        assert self._current is not None
        rank, names = self._quorum.rank, [members[each].name for each in plan.healthy]
        made = self._rounds.make(plan, offer, names, self._current[1], weights_of(members, plan)[rank])
        self._rounds.commit()
        if self._adapts:
            for unit in made.units:
                unit.pace = pace_of(rank, members, plan)
        self.state, self.round = made.state, plan.round + 1
        if plan.ends:
            self._stop()

    def _send(self, plan: Plan) -> None:
        """Starts to send the state to those that join; training goes on meanwhile."""
        steps = {self._current[0].number: self._current[1].step + 1} if self._current is not None else {}
        sent = self._joining.send({"state": self.state, "round": self.round}, steps, self._quorum, plan.joining)
        self._wire.ledger.record(JOINING, "send", sent)

    def _receive(self, plan: Plan) -> None:
        """Gets the state from the replica that leads, once that has exchanged."""
        counted = self._current is None or self._current[1].moment == "end"
        number = None if self._current is None or counted else self._current[0].number
        state = self._joining.receive(self._quorum, plan.leader, number)
        self.state, self.round = state["state"], state["round"]

    @contextmanager
    def _leaving_on_error(self) -> Iterator[None]:
        """Whatever ends a turn here must let others go on."""
        try:
            yield
        except BaseException as error:
            self._rounds.made = None
            self._quorum.fail(error)
            raise


def _offer(tracked: TrackedOptimizer, units: Sequence[int], turn: Turn, step_seconds: float) -> Offer:
    of_model = units_of(tracked)
    trained = max((of_model[number].steps for number in units), default=0)
    return Offer(tracked.number, units, turn.moment, turn.step, turn.epoch, turn.length, trained, step_seconds)


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
