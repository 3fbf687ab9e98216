"""Runs code in several processes, with results and failures brought back. Nothing here outlives its deadline."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

FORK = multiprocessing.get_context("fork")


def _rank_main(function: Callable[..., Any], rank: int, world_size: int, store: str, results: Any, args: Any) -> None:
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        value = function(rank, *args)
        dist.destroy_process_group()
        results.put((rank, value, None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    results.close()
    results.join_thread()
    # Without the exit handlers of the forked test runner.
    os._exit(0)


def run_ranks(
    tmp_path: Path, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 60
) -> list[Any]:
    """`function(rank, *args)` in `world_size` processes joined by Gloo; their results, by rank.

    Results must pickle without shared memory: plain Python values or NumPy arrays, not tensors.
    """
    results = FORK.Queue()
    store = str(tmp_path / f"store-{os.urandom(6).hex()}")
    processes = [
        FORK.Process(target=_rank_main, args=(function, rank, world_size, store, results, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    values: dict[int, Any] = {}
    try:
        for _ in processes:
            rank, value, failure = results.get(timeout=timeout)
            assert failure is None, f"rank {rank} failed:\n{failure}"
            values[rank] = value
    finally:
        for process in processes:
            process.join(0.5 if len(values) == world_size else 0)
            if process.is_alive():
                process.kill()
    return [values[rank] for rank in range(world_size)]
