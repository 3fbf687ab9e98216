"""A run of replicas made again, meeting by meeting, from their logs."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

from lightning_sparsecomm.basis.wire import PeerError
from lightning_sparsecomm.elastic.connections import CONNECTING, Connections
from lightning_sparsecomm.elastic.last_word import LastWord
from lightning_sparsecomm.elastic.local_state import FOLDER, LocalState, ReplayedLocalState
from lightning_sparsecomm.elastic.members import Member, Offer, Plan
from lightning_sparsecomm.elastic.membership import short
from lightning_sparsecomm.elastic.quorum import address_towards, load_torchft
from lightning_sparsecomm.elastic.record import Landed
from lightning_sparsecomm.elastic.rounds import Made
from lightning_sparsecomm.elastic.script import Scene, Script
from lightning_sparsecomm.elastic.turns import ElasticTurns
from lightning_sparsecomm.elastic.wire import LostPeerError
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing.streamed import StreamedShare

STORE, REPLICA = "SPARSECOMM_REPLAY", "SPARSECOMM_REPLICA"
"""Variables of the environment that `sparsecomm replay` sets: HOST:PORT of its store, and whose log to follow."""


def local_state_of(
    folder: str | None, process: str, engine: Engine, patience: timedelta, tell: Callable[[str], None]
) -> LocalState:
    """What is a replica's own: in a replay, in files of the replay, which leaves the user's alone."""
    if not replaying():
        return LocalState(folder, process, engine, tell)
    return ReplayedLocalState(None if folder is None else os.environ[FOLDER], process, engine, patience)


class RecordedLossError(LostPeerError):
    """A replica was lost here in the run that is replayed."""


class DifferentError(ValueError):
    """A replay does not do what the log says."""


def script_key(replica: str) -> str:
    """Where the store has a replica's script."""
    return f"script of {replica}"


def place_key(replica: str) -> str:
    """Where the store has the name of the meeting that a replica waits in."""
    return f"place of {replica}"


def end_key(replica: str) -> str:
    """Where the store has how a replica has ended."""
    return f"end of {replica}"


def replaying() -> bool:
    """Whether this process was started to replay a run."""
    return STORE in os.environ


class Recorded(Connections):
    """Meets the replicas that have met in the run that is replayed, in its order.

    Args:
        timeout: How long a replica waits for others in an exchange.
        patience: How long it waits for others to come to a meeting.
        tell: Called with what a user should know.
    """

    def __init__(self, timeout: timedelta, patience: timedelta, tell: Callable[[str], None]) -> None:
        self._address, self.name = os.environ[STORE], os.environ[REPLICA]
        host, _, port = self._address.rpartition(":")
        super().__init__(load_torchft(), address_towards(f"http://{self._address}"), timeout, CONNECTING)
        self._store = TCPStore(host, int(port), is_master=False, timeout=patience)
        self._patience, self._tell = patience, tell
        self.script = Script.from_json(self._store.get(script_key(self.name)).decode())
        self._scenes = iter(self.script.scenes)
        self.scene: Scene | None = None
        # Which members are connected.
        self._connection: tuple[Any, ...] = ()

    @property
    def now(self) -> Scene:
        """The meeting that it is in."""
        assert self.scene is not None
        return self.scene

    def next(self) -> Scene:
        """The meeting that follows. Raises `SystemExit` where the replica was lost before it."""
        self.scene = next(self._scenes, None)
        if self.scene is None:
            self.leave()
        return self.now

    def leave(self) -> None:
        """Ends this process, since the replica was lost here. Raises `SystemExit`."""
        if self.script.weights:
            raise DifferentError(
                "a replay must do what the log says; it goes on after the last meeting in the log, with which training"
                " ended. Start it with the same script and the same number of steps."
            )
        self._tell(f"sparsecomm: the log of {short(self.name)} ends here: the replica was lost, or has failed")
        self.report("lost")
        raise SystemExit(0)

    def report(self, end: str) -> None:
        """Notes how it has ended."""
        self._store.set(end_key(self.name), end)

    def form(self) -> None:
        scene, met = self.now, self.now.met
        if not scene.counts:
            self._connection = ()
            self._connected(0, 1, met.number)
            return
        rank, size = met.members.index(self.name), len(met.members)
        # Also where the same have met before: who receives the state must have it before its sender turns it away.
        self._gather(scene.name, rank, size)
        if (connection := (met.number, met.members)) != self._connection:
            self._wrapped.configure(f"{self._address}/{scene.name}", self.name, rank, size)
            self._connection = connection
        self._connected(rank, size, met.number)

    def _gather(self, meeting: str, rank: int, size: int) -> None:
        """Waits until all members have come."""
        self._store.set(place_key(self.name), meeting)
        self._store.set(f"{meeting} {rank}", "here")
        try:
            self._store.wait([f"{meeting} {each}" for each in range(size)], self._patience)
        except RuntimeError as error:
            raise PeerError(
                f"other replicas have not come to a meeting of the replay within {self._patience}"
            ) from error

    def vote(self) -> bool:
        return True

    def last_word(self, run: str) -> LastWord | None:
        met = self.now.met
        return LastWord(run, met.state, 0) if met.outcome == "ended" else None

    def fail(self, error: BaseException) -> None:
        """Ends the replay, unless the replica was lost in the recorded run."""
        if isinstance(error, LostPeerError) and not isinstance(error, RecordedLossError):
            raise PeerError("a replica was lost in the replay that was not lost in the recorded run") from error


class ReplayedTurns(ElasticTurns):
    """Turns as they were: with the members that met, and the losses that they met.

    Members of a meeting that counts make it together. Of one that does not, each makes its own part alone, and takes it
    back: that rounds as it did.
    """

    _quorum: Recorded
    # The meeting that has started what is in flight.
    _departed: Scene | None = None

    def _meet(self, offer: Offer | None) -> tuple[bool, list[Offer]]:
        self._get_ready()
        scene = self._quorum.next()
        self._quorum.form()
        if not scene.counts:
            return False, self._repeat(scene)
        if offer is not None and scene.met.seconds:
            offer = offer._replace(step_seconds=scene.met.seconds[self._quorum.rank])
        try:
            return self._follow(offer)
        except RecordedLossError:
            self.membership.fail()
            return False, []

    def _note(self, plan: Plan, members: Sequence[Member], steps: int) -> None:
        met = self._quorum.now.met
        if plan.state != met.state or plan.round != met.round:
            raise DifferentError(
                f"a replay must do what the log says; after {plan.round} rounds, replicas share the state"
                f" {plan.state}, and not {met.state} as after {met.round} rounds in the log. Start it with the same"
                " script, data and versions, from the same checkpoint or none."
            )
        super()._note(plan, members, steps)

    def _receive(self, plan: Plan) -> None:
        if self._quorum.now.met.outcome == "lost":
            raise RecordedLossError("the state was not received")
        due, own = self._quorum.now.met.holder, self._joining.own
        assert isinstance(own, ReplayedLocalState)
        own.due = due
        super()._receive(plan)
        if own.taken != due:
            raise DifferentError(
                f"a replay must do what the log says; there, {short(self._quorum.name)} took over the local state of"
                f" {short(due.process)}, and here there is none. Start it with local_state_dir, as then."
            )

    def _exchange(self, plan: Plan, offer: Offer, members: Sequence[Member]) -> None:
        self._departed = self._quorum.now
        super()._exchange(plan, offer, members)

    def _count(self, made: Made, round_: int) -> None:
        if self._quorum.now.met.outcome == "in doubt":
            raise RecordedLossError("nobody has said whether the exchange counts")
        super()._count(made, round_)

    def _repeat(self, scene: Scene) -> list[Offer]:
        """Makes its part of a meeting that did not count; returns what it has committed to of the one before."""
        met, rounds = scene.met, self._rounds
        if met.state in (self.state, rounds.pending):
            self.state, self.round = met.state, met.round
        done = rounds.settle(met.state)
        self._joining.samples.settle(met.state)
        if met.outcome == "met":
            return done
        if met.outcome == "in flight" or met.prepared:
            self._make_alone(scene)
        if met.outcome == "in flight" and met.offer is not None:
            return [*done, met.offer]
        self.membership.fail()
        return []

    def _make_alone(self, scene: Scene) -> None:
        met, rounds = scene.met, self._rounds
        assert met.offer is not None and self._current is not None
        landed = self._landing(met.leads_to)
        flies = met.outcome == "in flight"
        units = met.offer.units if flies else list(met.offer.units)[: met.prepared]
        lost = RecordedLossError("lost in flight") if landed is not None and not landed.prepared else None
        plan = Plan(met.state, met.round, [0], [0], 0, [], [], {}, met.offer, False)
        rounds.make(plan, met.offer._replace(units=units), [met.replica], self._current[1], met.weight, lost)
        self._departed = scene
        if rounds.flight is None:
            rounds.take_back()

    def _landing(self, state: str) -> Landed | None:
        return next((each for each in self._quorum.script.landings if each.state == state), None)

    def _land(self) -> None:
        flight = self._rounds.flight
        if flight is None:
            return
        assert self._departed is not None
        landed = self._landing(self._departed.met.leads_to)
        if landed is not None and landed.outcome == "counts":
            return super()._land()
        with suppress(LostPeerError):
            flight.wait()
        if landed is None:
            self._quorum.leave()
        flight.landed = True
        if not self._departed.counts:
            self._rounds.take_back()
        self._joining.waiting = ()
        self.membership.fail()

    def _lands_early(self, flying: Sequence[StreamedShare]) -> bool:
        assert self._departed is not None
        landed = self._landing(self._departed.met.leads_to)
        return landed is not None and any(unit.steps >= landed.steps for unit in flying)

    def end(self, weights: str) -> None:
        wanted = self._quorum.script.weights
        self._quorum.report("same" if weights == wanted else "differs" if wanted else "ended")
