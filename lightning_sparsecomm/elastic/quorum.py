"""This replica's part in the quorum, which torchft's Manager forms through the lighthouse."""

import importlib
import logging
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from torch.torch_version import TorchVersion

from lightning_sparsecomm.basis.wire import PeerError
from lightning_sparsecomm.elastic import last_word
from lightning_sparsecomm.elastic.connections import CONNECTING, Connections
from lightning_sparsecomm.elastic.last_word import LastWord
from lightning_sparsecomm.elastic.spare_parts import DaemonExecutor, NoTransport

EXTRA = "pip install 'lightning-sparsecomm[elastic]'"

OLDEST_TORCH = "2.8"
"""torchft's process groups name their ranks by an option that Gloo lacks in older versions."""

_PAUSE_SECONDS = 1.0

# After which a replica says that it waits.
_LONG_SECONDS = 30.0

# How often the lighthouse is asked again that does not answer. By its retries, torchft also connects anew.
_ASKING_AGAIN = timedelta(seconds=5)


def load_torchft() -> ModuleType:
    """The module, imported when it is first needed.

    Raises:
        ModuleNotFoundError: It is not installed; says how to install it.
        ImportError: torch is older than torchft needs.
    """
    if torch.__version__ < TorchVersion(OLDEST_TORCH):
        raise ImportError(
            f"replicas that come and go need torch {OLDEST_TORCH} or newer, for torchft; got {torch.__version__}."
            f" Run: pip install 'torch>={OLDEST_TORCH}'"
        )
    logging.getLogger("torchft.manager").addFilter(_without_nccl)
    # Its servers log each heartbeat and request otherwise.
    os.environ.setdefault("RUST_LOG", "error")
    try:
        module = importlib.import_module("torchft")
        importlib.import_module("torchft.coordination")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"replicas that come and go need torchft, which is not installed ({error}). Install it with {EXTRA}."
        ) from error
    return module


def _without_nccl(record: logging.LogRecord) -> bool:
    """Whether a message of torchft's is for users: not that it cannot reset what NCCL records, which Gloo has not."""
    return "NCCL flight recorder" not in record.getMessage()


def address_towards(lighthouse: str) -> str:
    """The address of this machine that others reach it by: that of the card on the way to the lighthouse.

    Args:
        lighthouse: Its address, such as `http://host:29510`.

    Raises:
        ValueError: It is no such address, or nothing leads there.
    """
    host, _, port = lighthouse.partition("://")[2].rstrip("/").rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        # IPv4 where there is both.
        family, kind, protocol, _, address = sorted(found, key=lambda each: each[0] != socket.AF_INET)[0]
        with socket.socket(family, kind, protocol) as probe:
            # Sends nothing: it only chooses a card.
            probe.connect(address)
            found_address = str(probe.getsockname()[0])
        return found_address if _is_loopback(host) or not _is_loopback(found_address) else _outwards(found_address)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"lighthouse must be an address such as http://host:29510 that this machine reaches; got {lighthouse!r}:"
            f" {error}. Pass the address that `sparsecomm lighthouse` has printed."
        ) from error


def _is_loopback(host: str) -> bool:
    return host.lower() in ("localhost", "[::1]", "::1") or host.startswith("127.")


def _outwards(loopback: str) -> str:
    """The address of the card on the way out of this machine, whose own name may stand for its loopback address.

    Replicas on other machines cannot use that. Without a way out, it is returned as it is.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        # A network that exists in documentation only (RFC 5737): nothing is sent.
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return loopback


class Quorum(Connections):
    """Meets other replicas through a lighthouse, and connects those that have met.

    Args:
        name: This replica's name. A process that is started again may have the same.
        lighthouse: Address of the lighthouse, such as `http://host:29510`.
        timeout: How long a replica waits for others in an exchange.
        patience: How long it waits for others to come to a meeting.
        tell: Called with what a user should know; in another thread.
    """

    def __init__(
        self, name: str, lighthouse: str, timeout: timedelta, patience: timedelta, tell: Callable[[str], None]
    ) -> None:
        module = load_torchft()
        host = address_towards(lighthouse)
        super().__init__(module, host, timeout, CONNECTING)
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._tell = tell
        self._patience = patience
        self._lighthouse = lighthouse
        # Whether a quorum was asked for and has not formed, perhaps because of an interrupt.
        self._forming = False
        options: dict[str, Any] = {
            "pg": self._wrapped,
            "min_replica_size": 1,
            "load_state_dict": None,
            "state_dict": None,
            "use_async_quorum": False,
            "timeout": timedelta(seconds=60),
            "quorum_timeout": patience,
            "connect_timeout": CONNECTING,
            "rank": 0,
            "world_size": 1,
            "store_addr": host,
            "store_port": self._store.port,
            "lighthouse_addr": lighthouse,
            "replica_id": name,
            "hostname": f"[{host}]" if ":" in host else host,
            "quorum_retries": max(1, round(patience / _ASKING_AGAIN)),
            "checkpoint_transport": NoTransport(),
        }
        self._until(lambda: self._enter(module, options))
        self._manager._executor = DaemonExecutor()
        self.name = self._store.get("replica_id").decode()

    def _enter(self, module: ModuleType, options: dict[str, Any]) -> BaseException | None:
        """Connects to the lighthouse; returns what was in the way."""
        try:
            self._manager = module.Manager(**options)
        except (RuntimeError, TimeoutError) as error:
            return error
        return None

    def form(self) -> None:
        self._until(self._ask)
        self._connected(self.group.rank(), self.group.size(), self._wrapped.quorum)

    def _ask(self) -> BaseException | None:
        """Asks for a quorum; returns what was in the way."""
        try:
            self._forming = True
            with self._telling():
                self._manager.start_quorum(allow_heal=False)
            self._forming = False
            error = self._manager.errored()
        except (RuntimeError, TimeoutError) as raised:
            # The lighthouse is gone, or nobody else has come.
            self._forming = False
            return raised
        if error is None:
            return None
        self._vote_against(failure := RuntimeError(str(error)))
        return failure

    def _until(self, attempt: Callable[[], BaseException | None]) -> None:
        """Repeats an attempt until nothing is in the way. Raises `PeerError` if `patience` passes before."""
        deadline, told = time.monotonic() + self._patience.total_seconds(), False
        while (error := attempt()) is not None:
            if time.monotonic() > deadline:
                raise PeerError(
                    f"no quorum has formed for {self._patience} with the lighthouse at {self._lighthouse}: look whether"
                    " it runs, whether this machine reaches it, and whether half of the replicas or more hang."
                ) from error
            if not told:
                told = True
                warnings.warn(
                    f"no quorum yet with the lighthouse at {self._lighthouse}; trying on: {str(error).splitlines()[0]}",
                    stacklevel=2,
                )
            time.sleep(_PAUSE_SECONDS)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """A context that says so if it takes long."""
        words = f"sparsecomm: waiting for other replicas, or for the lighthouse at {self._lighthouse}"
        timer = threading.Timer(_LONG_SECONDS, self._tell, [words])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def vote(self) -> bool:
        return bool(self._manager.should_commit())

    def fail(self, error: BaseException) -> None:
        self.disconnect()
        self._others.clear()
        # A vote waits for the quorum.
        if not self._forming:
            self._vote_against(error)

    def _vote_against(self, error: BaseException) -> None:
        self._manager.report_error(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        with suppress(RuntimeError, TimeoutError):
            self._manager.should_commit()

    def leave_word(self, word: LastWord) -> None:
        last_word.leave(word, self._lighthouse, load_torchft())

    def last_word(self, run: str) -> LastWord | None:
        return last_word.find(run, self._lighthouse)

    def close(self) -> None:
        super().close()
        self._manager.shutdown(wait=False)
