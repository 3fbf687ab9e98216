"""Process groups: how they are made and ended, and what depends on the version of torch."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend, HashStore, PrefixStore, TCPStore, Work

Closing = list[Callable[[], object]]
"""What ends groups, the last one first. Whoever calls it keeps what the calls return until all else has let go."""


def all_gather_single(gathered: Tensor, tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    """Gathers every rank's 1-D `tensor` in `gathered`, one after another. Before 2.13, torch names this otherwise."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, tensor, group=group)


def default_timeout() -> timedelta:
    """The timeout of the default group."""
    timeout = backend_of(dist.distributed_c10d._get_default_group()).options._timeout
    assert isinstance(timeout, timedelta)
    return timeout


def round_trip(enough: float) -> float:
    """Seconds to the host of rank 0 and back, where ranks have met there; else 0.

    The shortest of several, as threads may wait for a processor, or for Python: none is tried after one that takes less
    than `enough`, nor many after some that take far longer.
    """
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return 0.0
    least, interval = math.inf, sys.getswitchinterval()
    # So that no other thread keeps the answer waiting.
    sys.setswitchinterval(1e-4)
    try:
        for number in range(30):
            begin = time.perf_counter()
            store.check(["lightning_sparsecomm"])
            least = min(least, time.perf_counter() - begin)
            if least < enough or (number >= 4 and least > 4 * enough):
                break
    finally:
        sys.setswitchinterval(interval)
    return least


def broadcast_object(item: object, source: int, group: dist.ProcessGroup | None) -> object:
    """The object of rank `source`, on all ranks. It must pickle. The caller enters it in the ledger."""
    items = [item]
    dist.broadcast_object_list(items, source, group=group)
    return items[0]


def broadcast_later(tensor: Tensor, source: int) -> Work:
    """Starts to broadcast in the default group; `tensor` is filled, or must not change, until that is waited for."""
    return cast(Work, dist.broadcast(tensor, source, async_op=True))


def join_alone() -> None:
    """Makes this process the only one of the default group, if there is none yet, without a port."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def new_group(timeout: timedelta, closing: Closing) -> dist.ProcessGroup:
    """Makes a process group, which the last of `closing` destroys from now on. A collective."""
    return _joined(dist.new_group(timeout=timeout), closing)


def own_group(groups: Sequence[Sequence[int]], rank: int, timeout: timedelta, closing: Closing) -> dist.ProcessGroup:
    """Makes process groups of some ranks each, and returns this rank's; as `new_group`. A collective of all ranks."""
    made = [dist.new_group(list(ranks), timeout=timeout) for ranks in groups]
    return _joined(made[next(number for number, ranks in enumerate(groups) if rank in ranks)], closing)


def group_beside(
    group: dist.ProcessGroup | None, groups: Sequence[Sequence[int]], closing: Closing
) -> dist.ProcessGroup | None:
    """Another group of the same ranks, as `new_group`; a collective of all ranks. One rank alone needs none.

    Args:
        group: Which one.
        groups: The ranks of that group, and of others that were made with it; empty where all ranks are in it.
        closing: As for `new_group`.
    """
    if groups:
        return own_group(groups, dist.get_rank(), default_timeout(), closing)
    return new_group(default_timeout(), closing) if dist.get_world_size(group) > 1 else group


def _joined(group: object, closing: Closing) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup)
    if dist.get_backend(group) == "gloo":
        # A rank that is refused right away would close connections that others are still waiting for.
        dist.barrier(group=group)

    def destroy() -> Backend | None:
        if not dist.is_initialized():
            return None
        backend = backend_of(group)
        dist.destroy_process_group(group)
        return backend

    closing.append(destroy)
    return group


def backend_of(group: dist.ProcessGroup) -> Backend:
    """The part of a group that has the connections and the threads. Who destroys a group must drop it last.

    Whatever is dropped last waits for the threads. One of them may need the GIL, to drop the last call's tensor. A
    backend releases the GIL while it waits; a group has done so since torch 2.8 only.
    """
    return group._get_backend(torch.device("cpu" if dist.get_backend(group) == "gloo" else "cuda"))


def destroy_all() -> None:
    """Destroys the default group, and all others."""
    backends = [backend_of(group) for group in dist.distributed_c10d._world.pg_map]
    dist.destroy_process_group()
    backends.clear()
