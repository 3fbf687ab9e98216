"""Runs code in several processes, and returns their results or raises their failures. None outlives its deadline."""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_sparsecomm.basis.groups import destroy_all

FORK = multiprocessing.get_context("fork")

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Options of a Trainer that runs on the CPU and prints and saves nothing."""


class NotConnectedError(Exception):
    """Gloo did not connect the ranks, before the test's own function ran."""


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    patience: timedelta | None,
    results: Any,
    args: Any,
) -> None:
    try:
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=patience
            )
        except RuntimeError as error:
            if "connectFullMesh failed" in str(error):
                raise NotConnectedError(str(error)) from error
            raise
        value = function(rank, *args)
        destroy_all()
        results.put((rank, value, None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    results.close()
    results.join_thread()
    # Skips the exit handlers that were copied from the test runner.
    os._exit(0)


def run_ranks(
    tmp_path: Path,
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60,
    patience: timedelta | None = None,
    lost: Collection[int] = (),
) -> list[Any]:
    """Runs `function(rank, *args)` in `world_size` processes joined by Gloo, and returns their results by rank.

    Results must pickle without shared memory: plain Python values or NumPy arrays, not tensors. Seldom, on a machine
    that runs much else, Gloo does not connect the processes; then they are started again, once.

    Args:
        tmp_path: A folder for the test.
        world_size: How many processes.
        function: Any function, also a local one: processes are forked.
        args: Its arguments after the rank.
        timeout: Seconds to wait for the next result.
        patience: The process group's timeout.
        lost: Ranks that die, or hang, and give no result.
    """
    try:
        return _run_once(tmp_path, world_size, function, args, timeout, patience, lost)
    except NotConnectedError:
        return _run_once(tmp_path, world_size, function, args, timeout, patience, lost)


def _run_once(
    tmp_path: Path,
    world_size: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: float,
    patience: timedelta | None,
    lost: Collection[int],
) -> list[Any]:
    results = FORK.Queue()
    store = str(tmp_path / f"store-{os.urandom(6).hex()}")
    processes = [
        FORK.Process(target=_rank_main, args=(function, rank, world_size, store, patience, results, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    values: dict[int, Any] = {}
    try:
        for _ in range(world_size - len(lost)):
            rank, value, failure = results.get(timeout=timeout)
            if failure is not None and NotConnectedError.__qualname__ in failure:
                raise NotConnectedError(failure)
            assert failure is None, f"rank {rank} failed:\n{failure}"
            values[rank] = value
    finally:
        for rank, process in enumerate(processes):
            process.join(0.5 if rank in values else 0)
            if process.is_alive():
                process.kill()
    return [values[rank] for rank in range(world_size) if rank not in lost]
