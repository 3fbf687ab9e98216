"""Work that communicates beside the training: in a thread, and on a process group of its own."""

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

from lightning_sparsecomm.basis.ledger import Ledger
from lightning_sparsecomm.basis.phases import phase
from lightning_sparsecomm.basis.wire import Wire

T = TypeVar("T")


class Flight(Generic[T]):
    """Work in flight, with the collectives that it makes.

    Args:
        future: Of the work.
        ledger: What the work enters.
        into: Where `wait` adds that.
    """

    def __init__(self, future: "Future[T]", ledger: Ledger, into: Ledger) -> None:
        self._future = future
        self._ledger: Ledger | None = ledger
        self._into = into

    def wait(self) -> T:
        """The result, once it is there. What the work has sent is in the wire's ledger from then on.

        Raises:
            Exception: What the work has raised, such as a `PeerError`.
        """
        try:
            with phase("wait"):
                return self._future.result()
        finally:
            if self._ledger is not None:
                self._into.add(self._ledger)
                self._ledger = None


class Stream:
    """Runs work that communicates, one after another, in a thread beside the training.

    All ranks must start the same works in the same order. The thread and its process group begin with the first one,
    and end when the wire is closed.

    >>> from lightning_sparsecomm.basis import Wire
    >>> def exchange(rank):
    ...     flight = Stream(wire := Wire()).start(lambda beside: beside.all_reduce_(torch.ones(1)))
    ...     return flight.wait().item(), wire.ledger.handed_bytes()
    >>> run_ranks(2, exchange)[0]
    (2.0, 4)

    Args:
        wire: Whose group's ranks communicate, and whose ledger has what they send.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._beside: Wire | None = None
        self._pool: ThreadPoolExecutor | None = None

    def wire(self, row: str | None = None) -> Wire:
        """A wire for one work, and for what comes before it, while no other work runs.

        A collective when called for the first time.

        Args:
            row: Row of the ledger for calls that name none; that of the stream's wire by default.
        """
        if self._beside is None or self._pool is None:
            self._beside = self._wire.beside()
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="stream")
            self._wire.closing.append(self._pool.shutdown)
        wire = copy.copy(self._beside)
        wire.ledger, wire.step, wire.row = Ledger(wire.world_size), self._wire.step, row or self._wire.row
        wire.ledger.has_warned = self._wire.ledger.clamped_elements > 0
        return wire

    def start(self, work: Callable[[Wire], T], wire: Wire | None = None) -> Flight[T]:
        """Starts `work`. A collective when neither this nor `wire` was called before.

        Args:
            work: Called with a wire, in the stream's thread and without gradients. What it reads must not change until
                it is done.
            wire: What `wire` has returned, perhaps used before; None for a new one.
        """
        wire = wire or self.wire()
        assert self._pool is not None
        return Flight(self._pool.submit(_without_gradients, work, wire), wire.ledger, self._wire.ledger)


def _without_gradients(work: Callable[[Wire], T], wire: Wire) -> T:
    with torch.no_grad():
        return work(wire)
