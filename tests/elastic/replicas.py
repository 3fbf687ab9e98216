"""Replicas for tests: processes of this machine, each with a Trainer, and a lighthouse in a process of its own."""

import importlib.util
import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import pytest
import torch
from torch.torch_version import TorchVersion

from lightning_sparsecomm.elastic.quorum import OLDEST_TORCH

needs_torchft = pytest.mark.skipif(
    importlib.util.find_spec("torchft") is None or torch.__version__ < TorchVersion(OLDEST_TORCH),
    reason=f"torchft is not installed, or torch is older than {OLDEST_TORCH}",
)

FORK = multiprocessing.get_context("fork")

# All waits are for events; this only bounds them.
LONGEST_SECONDS = 150

# After which a replica counts as gone. On a machine that runs much else, threads that tell they live come late.
_SILENT_MS = 4000


def _serve(pipe: Connection, host: str, port: int, least: int) -> None:
    os.environ["RUST_LOG"] = "error"
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=f"{host}:{port}",
        min_replicas=least,
        join_timeout_ms=60_000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=_SILENT_MS,
    )
    pipe.send(server.address().rpartition(":")[2])
    pipe.recv()
    os._exit(0)


@contextmanager
def lighthouse(port: int = 0, least: int = 1, host: str = "127.0.0.1") -> Iterator[str]:
    """The address of a lighthouse, which ends with the context. It has a free port by default, and lets no fewer than
    the least number of replicas meet."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=_serve, args=(theirs, host, port, least), daemon=True)
    process.start()
    try:
        assert ours.poll(LONGEST_SECONDS), "the lighthouse did not start"
        yield f"http://{host}:{ours.recv()}"
    finally:
        process.kill()
        process.join()


class Replica(NamedTuple):
    """A replica's process, and a pipe to it: it sends what its function tells, and then what that returns."""

    process: Any
    pipe: Connection

    def hear(self) -> Any:
        """The next thing it tells. Raises what it has raised, as text."""
        assert self.pipe.poll(LONGEST_SECONDS), "a replica said nothing"
        kind, content = self.pipe.recv()
        assert kind != "error", content
        return content

    def say(self, item: object) -> None:
        """Lets a replica go on that waits by `recv`."""
        self.pipe.send(item)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(LONGEST_SECONDS)


def _run(function: Callable[..., Any], pipe: Connection, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    try:
        import torch

        torch.set_num_threads(1)
        # torchft logs by a name that Python has deprecated.
        warnings.filterwarnings("ignore", message="The 'warn' (method|function) is deprecated")
        # Where runs resume.
        warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
        warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
        # Where a test has changed them.
        warnings.filterwarnings("ignore", message=".*weights differ from those of most others")
        # Where a replica dies before it has kept its residual.
        warnings.filterwarnings("ignore", message="the local state in .* is from before an exchange")
        # A machine that is busy may take more than one attempt.
        warnings.filterwarnings("ignore", message="no quorum yet")
        pipe.send(("result", function(pipe, *args, **options)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
    os._exit(0)


@contextmanager
def replicas() -> Iterator[Callable[..., Replica]]:
    """Starts replicas: `start(function, *args)` runs `function(pipe, *args)` in a process, until the context ends."""
    started: list[Replica] = []

    def start(function: Callable[..., Any], *args: Any, **options: Any) -> Replica:
        ours, theirs = FORK.Pipe()
        process = FORK.Process(target=_run, args=(function, theirs, args, options), daemon=True)
        process.start()
        theirs.close()
        started.append(Replica(process, ours))
        return started[-1]

    try:
        yield start
    finally:
        for replica in started:
            replica.process.kill()
            replica.process.join()


TIMEOUTS = {"exchange_timeout": timedelta(seconds=30), "patience": timedelta(seconds=LONGEST_SECONDS)}
"""Of the strategies in tests."""
