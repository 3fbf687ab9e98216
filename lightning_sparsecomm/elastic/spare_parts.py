"""Parts that torchft's Manager gets from us instead of its own, which keep a process from ending or serve its state."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
from torch._C._distributed_c10d import Backend


class DaemonExecutor:
    """Runs work in a thread that nobody waits for when the process ends.

    Python waits for those of a `ThreadPoolExecutor`. One that waits for a quorum may do so for an hour.
    """

    def submit(self, work: Callable[..., object], **options: Any) -> "Future[object]":
        """Starts `work`, and returns its future."""
        future: Future[object] = Future()

        def run() -> None:
            try:
                future.set_result(work(**options))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="quorum", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True) -> None:
        """Does nothing."""


class NoTransport:
    """Serves no state: replicas that join get theirs through the process group. torchft's own opens a port for HTTP."""

    def metadata(self) -> str:
        return ""

    def disallow_checkpoint(self) -> None:
        """Does nothing: there is none."""

    def shutdown(self, wait: bool = True) -> None:
        """Does nothing."""


def groups_of(module: ModuleType) -> Any:
    """A kind of torchft's process groups on Gloo that connects soon, or fails soon, and then has patience."""

    class Group(module.ProcessGroupGloo):  # type: ignore[misc, name-defined]
        collective_timeout: timedelta
        address: str
        quorum: int

        def configure(self, store_addr: str, *args: Any, **kwargs: Any) -> None:
            super().configure(store_addr, *args, **kwargs)
            self.address, self.quorum = store_addr, self._quorum_id
            backend: Backend = self.parent._get_backend(torch.device("cpu"))
            backend._set_default_timeout(self.collective_timeout)

    return Group
