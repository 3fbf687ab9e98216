"""Connections between replicas that have met: all of them, some of them, and large messages from one to another."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup

from lightning_sparsecomm.elastic.last_word import LastWord
from lightning_sparsecomm.elastic.spare_parts import groups_of
from lightning_sparsecomm.elastic.streams import Outbox, receive

CONNECTING = timedelta(seconds=20)
"""How long replicas wait for each other to connect once they are to meet. One that dies meanwhile costs so much."""


class Connections:
    """What connects a replica to those that it has met last.

    Args:
        module: torchft.
        host: Address at which this machine listens.
        timeout: How long a replica waits for others in an exchange.
        connecting: How long it waits for them to connect.

    Attributes:
        name: This replica's, unique to its process.
        rank, size: Its place in the last meeting, and how many were in it.
        number: Number of the last meeting's quorum, which changes with its members and after a failure.
    """

    name = ""
    rank, size, number = 0, 1, 0

    def __init__(self, module: ModuleType, host: str, timeout: timedelta, connecting: timedelta) -> None:
        self._timeout, self._connecting = timeout, connecting
        self._groups = groups_of(module)
        self._wrapped = self._groups(timeout=connecting)
        self._wrapped.collective_timeout = timeout
        self._others: list[Any] = []
        self._outbox = Outbox(host, connecting, timeout)

    def form(self) -> None:
        """Waits for a quorum, and connects its members. A collective of all replicas that are there.

        Raises:
            PeerError: No quorum has formed.
        """
        raise NotImplementedError

    def vote(self) -> bool:
        """Whether nothing has failed here since the quorum has formed."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """Closes all connections, so that no member waits for this one, and asks for a quorum with new ones."""
        raise NotImplementedError

    def leave_word(self, word: LastWord) -> None:
        """Leaves word of how the run has ended, for replicas that are away."""

    def last_word(self, run: str) -> LastWord | None:
        """How a run has ended that others have finished; None as far as this replica can know."""
        return None

    def close(self) -> None:
        """Leaves, once what is being sent has arrived."""
        self._outbox.close()
        self.disconnect()

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
        other = self._groups(timeout=self._connecting)
        other.collective_timeout = self._timeout
        other.configure(f"{self._wrapped.address}/{meeting}", self.name, ranks.index(self.rank), len(ranks))
        self._others.append(other)
        group: ProcessGroup = other.parent
        return group

    def disconnect(self) -> None:
        """Closes all connections that nothing else holds. May be called in any thread."""
        for group in (self._wrapped, *self._others):
            with suppress(RuntimeError):
                group.abort()

    def send(self, content: torch.Tensor, rank: int) -> int:
        """Starts to send to a member, in the background: `[n]` uint8 that must not change any more. Returns bytes."""
        return self._outbox.send(content, self.group, rank)

    def receive(self, rank: int, check: Callable[[int], None]) -> torch.Tensor:
        """Receives what a member sends: `[n]` uint8. `check` raises if n cannot be.

        Raises:
            RuntimeError, ConnectionError: The member is gone.
        """
        return receive(self.group, rank, check, self._timeout)

    def _connected(self, rank: int, size: int, number: int) -> None:
        """Notes this replica's place in a quorum that has formed."""
        self._others.clear()
        self._outbox.turn_away()
        self.rank, self.size, self.number = rank, size, number
