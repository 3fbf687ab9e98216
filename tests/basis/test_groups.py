"""Process groups that are made and ended again and again, at once after their last call."""

import gc
import random
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_sparsecomm.basis.groups import backend_of, default_timeout, destroy_all
from lightning_sparsecomm.basis.wire import Wire
from tests.distributed.launch import run_ranks

TIMES = 20


def _made_and_closed(rank: int) -> float:
    """A tensor that only the group still holds, and needs the GIL to drop, is that of the last call."""
    total = 0.0
    for number in range(TIMES):
        wire = Wire.apart()
        total += wire.all_reduce_(torch.full((2,), float(rank + number))).sum().item()
        wire.close()
    return total


def test_a_group_ends_right_after_its_last_call(tmp_path: Path) -> None:
    """torch before 2.8 waits for the group's threads with the GIL held, if the group is the last to go."""
    found = run_ranks(tmp_path, 2, _made_and_closed, timeout=30, patience=timedelta(seconds=20))
    assert found == 2 * [sum(2.0 * (1 + 2 * number) for number in range(TIMES))]


def _made_and_left(rank: int) -> int:
    """Ranks come at different times, and leave at once, as where a method is refused."""
    chance = random.Random(rank)
    for _ in range(40):
        time.sleep(chance.random() * 0.004)
        Wire.apart().close()
    return rank


def test_nobody_leaves_a_group_that_others_still_connect_to(tmp_path: Path) -> None:
    """Without a barrier, one in 300 of these failed to connect, since it lost a rank that was done already."""
    assert run_ranks(tmp_path, 4, _made_and_left, timeout=60) == [0, 1, 2, 3]


def _threads_after_all(rank: int) -> tuple[int, int]:
    before = len(list(Path("/proc/self/task").iterdir()))
    wire = Wire.apart()
    dist.all_reduce(torch.ones(2), group=wire.group)
    during = len(list(Path("/proc/self/task").iterdir()))
    wire.close()
    gc.collect()
    assert threading.active_count() == 1
    return during - before, len(list(Path("/proc/self/task").iterdir())) - before


def test_a_group_takes_its_threads_along(tmp_path: Path) -> None:
    """Nothing that keeps its backend for a moment keeps it for good."""
    for during, after in run_ranks(tmp_path, 2, _threads_after_all):
        assert during > 0
        assert after == 0


def _destroyed(rank: int) -> bool:
    dist.new_group()
    dist.all_reduce(torch.ones(2))
    destroy_all()
    there = dist.is_initialized()
    # The launcher destroys one more.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return there


def test_all_groups_are_destroyed(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, 2, _destroyed) == [False, False]


def test_the_default_groups_timeout(tmp_path: Path) -> None:
    patience = timedelta(seconds=17)
    assert run_ranks(tmp_path, 1, lambda rank: default_timeout(), patience=patience) == [patience]


def test_a_backend_has_the_groups_rank(wire: Wire) -> None:
    assert backend_of(dist.distributed_c10d._get_default_group()).rank() == 0
