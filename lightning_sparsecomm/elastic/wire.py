"""A wire whose ranks change from round to round."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from torch._C._distributed_c10d import ProcessGroup

from lightning_sparsecomm.basis.ledger import Collective, Ledger
from lightning_sparsecomm.basis.wire import PeerError, Waiting, Wire


class LostPeerError(PeerError):
    """A replica was lost, or did not answer, while others waited for it in a round; they repeat it without it."""


class _WaitingForReplicas(Waiting):
    """As `Waiting`, but whatever the backend says counts as a loss: in a round, replicas cannot tell causes apart."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._phase.__exit__(kind, error, traceback)
        # torch replaces the backend's error by a ValueError, as it finds no record of a group that it has not made.
        if isinstance(error, (RuntimeError, ValueError)) and self._wire.world_size > 1:
            raise LostPeerError(f"{self._call} {self._wire.when} failed: a replica is gone, or too late.") from error


class ElasticWire(Wire):
    """Collectives over the replicas that take part in a round; between rounds, this replica is alone.

    Each replica is a process of its own, with a default process group of one rank. `among` opens a round: `rank`,
    `world_size` and the group are those of its replicas until it ends.

    Raises:
        ValueError: The default process group has more than one rank.
    """

    def __init__(self) -> None:
        super().__init__()
        if self.world_size != 1:
            raise ValueError(
                f"each replica must be a Trainer of its own with devices=1 and num_nodes=1; got {self.world_size}"
                " ranks. Start one process for each replica, with the same lighthouse."
            )

    def calling(self, collective: Collective, handed_bytes: int, row: str | None = None) -> Waiting:
        row = row or self.row
        self.ledger.record(row, collective, handed_bytes)
        return _WaitingForReplicas(self, f"{collective} of {handed_bytes:,} bytes ({row})")

    @contextmanager
    def among(self, group: ProcessGroup | None, ranks: Sequence[int], rank: int) -> Iterator[None]:
        """A context of calls between some replicas.

        Args:
            group: Their process group; None where this one is alone.
            ranks: The replicas, by their ranks in the quorum.
            rank: This replica's own.
        """
        self.group, self.rank, self.world_size = group, ranks.index(rank), len(ranks)
        self.ledger.resize(self.world_size)
        try:
            yield
        finally:
            self.group, self.rank, self.world_size = None, 0, 1

    def beside(self) -> "RoundWire":
        """A wire over the round that is open, for a thread. It stays open until it is closed."""
        return RoundWire(self)


class RoundWire(ElasticWire):
    """A wire over one round, with a ledger of its own. Copies of it, such as `under` makes, share its group.

    Connections last as long as anything holds the group. So `close` lets go of it in all copies: replicas that still
    wait for this one then fail at once.
    """

    def __init__(self, wire: ElasticWire) -> None:
        self._holder = [wire.group]
        vars(self).update({name: value for name, value in vars(wire).items() if name != "group"})
        self.ledger, self.closing = Ledger(wire.world_size), []

    # Copies share the list.
    @property
    def group(self) -> ProcessGroup | None:  # type: ignore[override]
        if not self._holder:
            raise LostPeerError("the round is over")
        return self._holder[0]

    def close(self) -> None:
        self._holder.clear()
