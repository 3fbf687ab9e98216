"""Ranks that wait for each other through the store that they have joined by, which pairs with no collective."""

import secrets
import time

from torch._C._distributed_c10d import Store


def meet(store: Store, place: str, rank: int, world_size: int, seconds: float) -> bool:
    """Waits for all ranks to come to a place, for so many seconds. Whether they came is equal on all that did."""
    key = f"lightning_sparsecomm at {place}"
    deadline = time.monotonic() + seconds
    came = _change(store, key, rank, True)
    while len(came) < world_size:
        if time.monotonic() > deadline:
            # The last may have come meanwhile. Then the others count on this one.
            return len(_change(store, key, rank, False, world_size)) == world_size
        time.sleep(0.001)
        came = _ranks_at(store.get(key).decode())
    return True


def _change(store: Store, key: str, rank: int, come: bool, full: int | None = None) -> set[int]:
    """Enters a rank among those at a place, or takes it out unless as many as `full` are there; returns all there."""
    while True:
        old = store.get(key).decode() if store.check([key]) else ""
        ranks = _ranks_at(old)
        if len(ranks) == full:
            return ranks
        ranks = ranks | {rank} if come else ranks - {rank}
        # The random part tells this rank's change from an equal one of another rank.
        new = f"{' '.join(map(str, sorted(ranks)))}|{secrets.token_hex(8)}"
        if store.compare_set(key, old, new).decode() == new:
            return ranks


def _ranks_at(value: str) -> set[int]:
    return {int(rank) for rank in value.partition("|")[0].split()}
