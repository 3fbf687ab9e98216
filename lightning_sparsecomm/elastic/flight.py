"""One round between replicas, in flight: exchanged and confirmed in a thread, while training goes on."""

import copy
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from lightning_sparsecomm.basis.ledger import MEMBERSHIP, Ledger
from lightning_sparsecomm.basis.phases import phase
from lightning_sparsecomm.basis.stream import Flight, Stream
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.elastic.spare_parts import DaemonExecutor
from lightning_sparsecomm.elastic.wire import ElasticWire, LostPeerError

T = TypeVar("T")


class _Part(Flight[T]):
    """Work of a round in flight. Its result is there once all replicas have confirmed the whole round."""

    def __init__(self, round_: "RoundInFlight", work: Callable[[Wire], T], wire: Wire) -> None:
        self._round, self._work, self._wire = round_, work, wire
        self._result: T | None = None

    def run(self) -> None:
        self._result = self._work(self._wire)

    def wait(self) -> T:
        self._round.wait()
        return self._result  # type: ignore[return-value]


class RoundInFlight(Stream):
    """The works of one round, one after another, and then the word of all replicas that they have the results.

    Units start their works in it, as in any stream; they begin with `depart`. If one fails, all connections are closed,
    so that no replica waits for this one.

    Args:
        wire: Of this replica, within the round.
        vote: Whether nothing has failed here.
        disconnect: Closes connections; called in the thread.

    Attributes:
        rank: This replica's, in the round.
        landed: Whether its outcome was used, or what it has failed with.
        counts: Whether the results count although not all have confirmed them to this replica, as others know more.
    """

    landed = counts = False

    def __init__(self, wire: ElasticWire, vote: Callable[[], bool], disconnect: Callable[[], None]) -> None:
        super().__init__(wire)
        self._over: ElasticWire = wire.beside()
        self.rank = wire.rank
        self._vote, self._disconnect = vote, disconnect
        self._parts: list[_Part[object]] = []
        self._end: Future[object] = Future()
        self._entered = False
        # Whether this replica has said that it has the results.
        self._voted = False

    def wire(self, row: str | None = None) -> Wire:
        wire = copy.copy(self._over)
        wire.row = row or wire.row
        return wire

    def start(self, work: Callable[[Wire], T], wire: Wire | None = None) -> Flight[T]:
        part = _Part(self, work, wire or self.wire())
        self._parts.append(part)  # type: ignore[arg-type]
        return part

    def depart(self) -> None:
        """Starts the thread."""
        self._end = DaemonExecutor().submit(self._run)

    def call_off(self, error: BaseException) -> None:
        """Ends it by an error before it has departed."""
        self._end.set_exception(error)

    @property
    def ended(self) -> bool:
        """Whether nothing is left to wait for."""
        return self._end.done()

    @property
    def in_doubt(self) -> bool:
        """Whether it has failed here when other replicas may have had the word of all. It must have ended."""
        return self._voted and self._end.exception() is not None

    def wait(self) -> None:
        """Waits for the end. What was sent is in the wire's ledger from then on.

        Raises:
            LostPeerError: A replica is gone, or could not finish; unless the round `counts` nevertheless.
            Exception: What the works have raised.
        """
        with phase("wait"):
            error = self._end.exception()
        if not self._entered:
            self._entered = True
            self._wire.ledger.add(self._ledger)
        if error is not None and not self.counts:
            raise error

    @property
    def _ledger(self) -> Ledger:
        return self._over.ledger

    def _run(self) -> None:
        try:
            with torch.no_grad():
                for part in self._parts:
                    part.run()
                self._confirm()
        except BaseException as error:
            _let_go(error)
            self._over.close()
            self._disconnect()
            raise
        self._over.close()

    def _confirm(self) -> None:
        own = self._vote()
        # From here on others may have the word of all, even if this replica does not get it.
        self._voted = own
        votes = self._over.all_gather(torch.tensor([own], dtype=torch.uint8), MEMBERSHIP)
        if not bool(votes.all()):
            self._voted = False
            raise LostPeerError("a replica could not finish a round in flight")


def _let_go(error: BaseException) -> None:
    """Clears the frames that an error has come through: they hold the group, and so its connections."""
    chain: list[BaseException] = [error]
    for each in chain:
        # The first frame is the caller's, which still runs, and is left alone.
        traceback.clear_frames(each.__traceback__)
        chain += [cause for cause in (each.__cause__, each.__context__) if cause is not None and cause not in chain]
