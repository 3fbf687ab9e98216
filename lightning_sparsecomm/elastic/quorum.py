"""This replica's part in the quorum: torchft's Manager, its process group, and groups of some of its members."""

import importlib
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
from torch._C._distributed_c10d import Backend, ProcessGroup, TCPStore, Work
from torch.torch_version import TorchVersion

from lightning_sparsecomm.basis.wire import PeerError
from lightning_sparsecomm.elastic.spare_parts import DaemonExecutor, NoTransport
from lightning_sparsecomm.elastic.streams import PLACE_BYTES, Place, Sending, fetch

EXTRA = "pip install 'lightning-sparsecomm[elastic]'"

OLDEST_TORCH = "2.8"
"""torchft's process groups name their ranks by an option that Gloo lacks in older versions."""

# How long replicas wait for each other to connect once a quorum has formed. One that dies meanwhile costs so much.
_CONNECTING = timedelta(seconds=20)

_PAUSE_SECONDS = 1.0

# The tag of the message that says where a state is.
_PLACE = 1

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
            return str(probe.getsockname()[0])
    except (ValueError, OSError) as error:
        raise ValueError(
            f"lighthouse must be an address such as http://host:29510 that this machine reaches; got {lighthouse!r}:"
            f" {error}. Pass the address that `sparsecomm lighthouse` has printed."
        ) from error


class Quorum:
    """Meets other replicas through a lighthouse, and connects those that have met.

    Args:
        name: This replica's name. A process that is started again may have the same.
        lighthouse: Address of the lighthouse, such as `http://host:29510`.
        timeout: How long a replica waits for others in an exchange.
        patience: How long it waits for others to come to a meeting.
        tell: Called with what a user should know; in another thread.

    Attributes:
        rank, size: This replica's place in the last quorum, and how many are in it.
        number: Number of the last quorum, which changes with its members and after a failure.
    """

    def __init__(
        self, name: str, lighthouse: str, timeout: timedelta, patience: timedelta, tell: Callable[[str], None]
    ) -> None:
        module = load_torchft()
        self._host = host = address_towards(lighthouse)
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._timeout = timeout
        self._tell = tell
        self._patience = patience
        self._lighthouse = lighthouse
        self._groups = _groups_of(module)
        self._wrapped = self._groups(timeout=_CONNECTING)
        self._wrapped.collective_timeout = timeout
        self._others: list[Any] = []
        # Whether a quorum was asked for and has not formed, perhaps because of an interrupt.
        self._forming = False
        # In the background: announcements, and what they announce.
        self._announcing: list[tuple[Work, torch.Tensor]] = []
        self._sending: list[Sending] = []
        self._manager = module.Manager(
            pg=self._wrapped,
            min_replica_size=1,
            load_state_dict=None,
            state_dict=None,
            use_async_quorum=False,
            timeout=timedelta(seconds=60),
            quorum_timeout=patience,
            connect_timeout=_CONNECTING,
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            replica_id=name,
            hostname=host,
            quorum_retries=max(1, round(patience / _ASKING_AGAIN)),
            checkpoint_transport=NoTransport(),
        )
        self._manager._executor = DaemonExecutor()
        self.name: str = self._store.get("replica_id").decode()
        self.rank, self.size, self.number = 0, 1, 0

    def form(self) -> None:
        """Waits for a quorum, and connects its members. A collective of all replicas that are there.

        Raises:
            PeerError: No quorum has formed within `patience`.
        """
        deadline, told = time.monotonic() + self._patience.total_seconds(), False
        while True:
            try:
                self._forming = True
                with self._telling():
                    self._manager.start_quorum(allow_heal=False)
                self._forming = False
                error = self._manager.errored()
            except (RuntimeError, TimeoutError) as raised:
                # The lighthouse is gone, or nobody else has come.
                self._forming, error = False, raised
            else:
                if error is None:
                    break
                self._vote_against(RuntimeError(str(error)))
            if time.monotonic() > deadline:
                raise PeerError(
                    f"no quorum has formed for {self._patience} with the lighthouse at {self._lighthouse}:"
                    " look whether it runs, and whether this machine reaches it."
                ) from (error if isinstance(error, BaseException) else None)
            if not told:
                told = True
                warnings.warn(
                    f"no quorum yet with the lighthouse at {self._lighthouse}; trying on: {str(error).splitlines()[0]}",
                    stacklevel=2,
                )
            time.sleep(_PAUSE_SECONDS)
        self._others.clear()
        self._announcing.clear()
        self._sending = [sending for sending in self._sending if not sending.over]
        for sending in self._sending:
            # Whoever has not begun to fetch is gone, or comes again.
            sending.turn_away()
        self.rank, self.size, self.number = self.group.rank(), self.group.size(), self._wrapped.quorum

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

    @property
    def group(self) -> ProcessGroup:
        """The process group of all members."""
        group: ProcessGroup = self._wrapped.parent
        return group

    def group_of(self, ranks: Sequence[int], meeting: str = "") -> ProcessGroup | None:
        """A process group of some members; None for this one alone. A collective of these members.

        `meeting` is a name that no other group of this quorum has had.

        Raises:
            RuntimeError: One of them is gone.
        """
        if len(ranks) == 1:
            return None
        if len(ranks) == self.size:
            return self.group
        other = self._groups(timeout=_CONNECTING)
        other.collective_timeout = self._timeout
        other.configure(f"{self._wrapped.address}/{meeting}", self.name, ranks.index(self.rank), len(ranks))
        self._others.append(other)
        group: ProcessGroup = other.parent
        return group

    def vote(self) -> bool:
        """Whether nothing has failed here since the quorum has formed."""
        return bool(self._manager.should_commit())

    def fail(self, error: BaseException) -> None:
        """Closes all connections, so that no member waits for this one, and asks for a quorum with new ones."""
        self.disconnect()
        self._others.clear()
        # A vote waits for the quorum.
        if not self._forming:
            self._vote_against(error)

    def disconnect(self) -> None:
        """Closes all connections that nothing else holds. May be called in any thread."""
        for group in (self._wrapped, *self._others):
            with suppress(RuntimeError):
                group.abort()

    def _vote_against(self, error: BaseException) -> None:
        self._manager.report_error(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        with suppress(RuntimeError, TimeoutError):
            self._manager.should_commit()

    def send(self, content: torch.Tensor, rank: int) -> int:
        """Starts to send to a member, in the background: `[n]` uint8 that must not change any more. Returns bytes."""
        sending = Sending(content, self._host, _CONNECTING.total_seconds(), self._timeout.total_seconds())
        self._sending.append(sending)
        place = sending.place.to_tensor()
        self._announcing.append((self.group.send([place], rank, _PLACE), place))
        return content.nbytes + place.nbytes

    def receive(self, rank: int, check: Callable[[int], None]) -> torch.Tensor:
        """Receives what a member sends: `[n]` uint8. `check` raises if n cannot be.

        Raises:
            RuntimeError, ConnectionError: The member is gone.
        """
        announced = torch.zeros(PLACE_BYTES, dtype=torch.uint8)
        self.group.recv([announced], rank, _PLACE).wait()
        place = Place.from_tensor(announced)
        check(place.bytes)
        content = torch.empty(place.bytes, dtype=torch.uint8)
        fetch(place, content, self._timeout.total_seconds())
        return content

    def close(self) -> None:
        """Leaves, once what is being sent has arrived."""
        for work, _ in self._announcing:
            with suppress(RuntimeError):
                work.wait()
        for sending in self._sending:
            sending.wait()
        self.disconnect()
        self._manager.shutdown(wait=False)


def _groups_of(module: ModuleType) -> Any:
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
