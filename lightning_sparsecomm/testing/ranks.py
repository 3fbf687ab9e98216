"""Runs a function on several ranks: processes of this machine, joined by Gloo."""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_sparsecomm.basis.groups import destroy_all


class RankError(Exception):
    """The traceback of an exception that a rank raised: the cause of the exception that `run_ranks` raises.

    >>> try:
    ...     run_ranks(2, lambda rank: 1 // rank)
    ... except ZeroDivisionError as error:
    ...     isinstance(error.__cause__, RankError)
    True
    """


class _Outcome(NamedTuple):
    """What one rank sends back.

    Attributes:
        result: What the function returned; None if it raised.
        error: What it raised; None if it returned.
        text: The error's traceback.
    """

    result: object
    error: BaseException | None = None
    text: str = ""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """Calls `function(rank, *args)` on `world_size` ranks, and returns their results by rank.

    Each rank is a fork of this process, on the CPU, with one thread. The function may be a lambda or a local function;
    results must be picklable. It makes its own `Wire()`. No rank outlives the call.

    >>> from lightning_sparsecomm.basis import Wire
    >>> run_ranks(2, lambda rank: Wire().all_reduce_(torch.tensor([rank + 1.0])).item())
    [3.0, 3.0]

    Args:
        world_size: Number of ranks.
        function: Called on each rank.
        args: Its arguments after the rank.
        timeout: Seconds until every rank must have returned.

    Raises:
        TimeoutError: Some rank has not returned in time.
        RuntimeError: A rank ended without a result, or raised an exception that cannot be pickled.
        Exception: The first exception that a rank raised; its cause shows the rank's traceback.
    """
    fork = multiprocessing.get_context("fork")
    deadline = time.monotonic() + timeout
    processes = []
    readers: dict[Connection, int] = {}
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        store = os.path.join(folder, "store")
        try:
            for rank in range(world_size):
                reader, writer = fork.Pipe(duplex=False)
                arguments = (function, rank, world_size, store, timeout, writer, args)
                processes.append(fork.Process(target=_rank_main, args=arguments, daemon=True))
                processes[-1].start()
                writer.close()
                readers[reader] = rank
            return _results(readers, deadline, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _results(readers: dict[Connection, int], deadline: float, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    while readers:
        ready = wait(list(readers), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(
                f"ranks {sorted(readers.values())} did not return within {timeout} s. Look for a collective that only"
                " some ranks call, or give a longer timeout."
            )
        for reader in ready:
            assert isinstance(reader, Connection)
            rank = readers.pop(reader)
            try:
                outcome: _Outcome = pickle.loads(reader.recv_bytes())
            except EOFError:
                raise RuntimeError(f"rank {rank} ended without a result: it was killed, or it crashed.") from None
            finally:
                reader.close()
            if outcome.error is not None:
                raise outcome.error from RankError(f"\n\nOn rank {rank}:\n{outcome.text}")
            results[rank] = outcome.result
    return [results[rank] for rank in sorted(results)]


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    timeout: float,
    writer: Connection,
    args: tuple[Any, ...],
) -> None:
    try:
        # The threads of the pool that the parent may have are not in its fork.
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=max(1.0, timeout)),
        )
        # A rank that fails at once would cut connections that others are still making, and they would report first.
        dist.barrier()
        message = pickle.dumps(_Outcome(function(rank, *args)))
        destroy_all()
    except BaseException as error:
        message = _pickled_error(error)
    writer.send_bytes(message)
    writer.close()
    # Skips the exit handlers of the parent, of which this is a fork.
    os._exit(0)


def _pickled_error(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    # A SystemExit or KeyboardInterrupt of a rank must not end the caller.
    if isinstance(error, Exception):
        try:
            message = pickle.dumps(_Outcome(None, error, text))
            pickle.loads(message)
            return message
        except Exception:  # Pickling runs the error's own code: what cannot travel is told by its text, below.
            pass
    return pickle.dumps(_Outcome(None, RuntimeError(f"{type(error).__name__}: {error}"), text))
