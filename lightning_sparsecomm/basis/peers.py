"""The error of a rank that waited for others in vain, and how it learns where the others waited."""

from contextlib import suppress
from datetime import timedelta
from typing import Protocol

# Ranks that wait for each other fail at about the same time. One that is dead never says where it was.
_PATIENCE_WHEN_LATE, _PATIENCE_WHEN_CLOSED = timedelta(seconds=30), timedelta(seconds=2)

_GONE = (
    " Another rank is gone, or did not answer within the process group's timeout: look for the first error in the logs"
    " of all ranks. If a rank is only slow at times, give the strategy a longer timeout=datetime.timedelta(hours=1)."
)
_APART = (
    " So ranks took different ways: one had more batches than another, or stopped by itself, or code that communicates"
    " ran on some ranks only. Give all ranks equally many batches, or use SparseCommStrategy(uneven_inputs=True); in"
    " Fabric, iterate over fabric.strategy.uneven(loader). Give all ranks the same callbacks."
)


class PeerError(RuntimeError):
    """Another rank is gone, or did not answer within the process group's timeout.

    The message says for which collective this rank waited, and for how long, and for which ones the others waited if
    they waited elsewhere. The backend's own error is the cause.

    >>> def one_rank_is_gone(rank):
    ...     try:
    ...         return Wire().all_reduce_(torch.ones(1)) if rank == 0 else None
    ...     except PeerError as error:
    ...         return str(error).partition(". ")[2]
    >>> run_ranks(2, one_rank_is_gone)[0]
    "Another rank is gone, or did not answer within the process group's timeout: look for the first error ...
    """


class Store(Protocol):
    """What is used of a `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


class Peers:
    """The other ranks, when a call has failed: each rank tells them through a store where it waited.

    Nothing is sent before that. So it costs nothing where nothing fails.

    Args:
        rank: This process's rank.
        world_size: Number of ranks.
        store: The store that all ranks share; None where ranks cannot ask each other.
        name: A name of this run, equal on all ranks.
        timeout: The process group's timeout.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store | None = None,
        name: str = "",
        timeout: timedelta = timedelta.max,
    ) -> None:
        self.timeout = timeout
        self._rank = rank
        self._store = store
        self._keys = {each: f"lightning_sparsecomm/{name}/{each}" for each in range(world_size)}

    def error(self, place: str, seconds: float, late: bool) -> PeerError:
        """The error of this rank. It asks the others where they waited, for 30 s at most.

        Args:
            place: What this rank waited for, and where.
            seconds: For how long.
            late: Whether that was until the timeout. Otherwise a connection was closed.
        """
        found = {}
        if self._store is not None:
            # The store raises if it is gone.
            with suppress(RuntimeError):
                self._store.set(self._keys[self._rank], place)
            found = self.places(_PATIENCE_WHEN_LATE if late else _PATIENCE_WHEN_CLOSED)
        elsewhere = {rank: other for rank, other in found.items() if other != place}
        words = f"rank {self._rank} waited {seconds:.1f} s in vain for its {place}."
        for rank, other in elsewhere.items():
            words += f" Rank {rank} waited for its {other}."
        all_alive = len(found) == len(self._keys) - 1
        return PeerError(words + (_APART if elsewhere and all_alive else _GONE))

    def places(self, patience: timedelta = _PATIENCE_WHEN_LATE) -> dict[int, str]:
        """Where other ranks waited in vain, by rank, of those that say so within `patience` or the timeout."""
        if self._store is None:
            return {}
        keys = {rank: key for rank, key in self._keys.items() if rank != self._rank}
        # The store raises if a key is still missing, or if it is gone itself.
        with suppress(RuntimeError):
            self._store.wait(list(keys.values()), min(patience, self.timeout))
        with suppress(RuntimeError):
            return {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}
        return {}
