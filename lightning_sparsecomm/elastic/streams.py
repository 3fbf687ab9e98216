"""A large message from one replica to another, over several connections at once.

Where packets get lost, one TCP connection that takes each loss for congestion, as Linux's default does, carries a small
part of what the link could. Several connections carry as many times more. Each takes the next piece when it has sent
the one before, so that one that stalls holds up little.
"""

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NamedTuple

import torch
from torch._C._distributed_c10d import ProcessGroup, Work

from lightning_sparsecomm.basis.digests import digest_of

CONNECTIONS = 16
"""At 50 Mbit/s, 100 ms and 1% of loss, one connection of Reno takes 12 times as long as 16 (`benchmarks/join.py`)."""

PLACE_BYTES = 256

_PIECE_BYTES = 2**18
# Of the message that says where another one is.
_TAG = 1
_TOKEN_BYTES = 16
# Where a piece begins, and its bytes.
_HEAD = struct.Struct("<QI")


class Place(NamedTuple):
    """Where a message can be fetched.

    Attributes:
        bytes: Of the message.
        host, port: Where the sender listens.
        token: What the receiver says to get it, in hexadecimal digits.
        digest: Of the message, as `digest_of` has it.
    """

    bytes: int
    host: str
    port: int
    token: str
    digest: str

    def to_tensor(self) -> torch.Tensor:
        """As `[PLACE_BYTES]` uint8."""
        text = json.dumps(self).encode().ljust(PLACE_BYTES)
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> "Place":
        """Inverse of `to_tensor`. Raises `ValueError` for anything else."""
        text = bytes(tensor.tolist())
        try:
            size, host, port, token, digest = json.loads(text)
            texts, numbers = (host, digest), (size, port)
            if not all(isinstance(each, str) for each in texts) or not all(isinstance(each, int) for each in numbers):
                raise ValueError("types")
            if not bytes.fromhex(token):
                raise ValueError("token")
        except (ValueError, TypeError) as error:
            raise ValueError(f"another replica says that its state is at {text[:80]!r}, which is no place") from error
        return cls(size, host, port, token, digest)


class Sending:
    """A message that one receiver may fetch.

    Args:
        content: `[n]` uint8 on the CPU. It must not change any more.
        host: Address at which this machine listens, at a free port.
        connecting: Seconds that the receiver may let pass before it connects.
        timeout: Seconds that it may let pass between two pieces.
    """

    def __init__(self, content: torch.Tensor, host: str, connecting: float, timeout: float) -> None:
        self._content = content.numpy().data
        self._connecting, self._timeout = connecting, timeout
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family, backlog=CONNECTIONS)
        self._server.settimeout(connecting)
        self._begins = iter(range(0, len(self._content), _PIECE_BYTES))
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        port = self._server.getsockname()[1]
        self.place = Place(len(self._content), host, port, self._token.hex(), digest_of(content))
        self._accepting = _start(self._accept)

    def _accept(self) -> None:
        """Connects the receiver; others that come are turned away."""
        with self._server, contextlib.suppress(OSError):
            while len(self._threads) < CONNECTIONS:
                connection, _ = self._server.accept()
                self._threads.append(_start(self._send, connection))

    def _send(self, connection: socket.socket) -> None:
        """Sends pieces until none is left, and waits until they have arrived."""
        with connection, contextlib.suppress(OSError):
            # Whoever is none of ours may say nothing at all.
            connection.settimeout(self._connecting)
            said = bytearray()
            while len(said) < _TOKEN_BYTES and (some := connection.recv(_TOKEN_BYTES - len(said))):
                said += some
            if not hmac.compare_digest(bytes(said), self._token):
                return
            connection.settimeout(self._timeout)
            for begin in self._next():
                piece = self._content[begin : begin + _PIECE_BYTES]
                connection.sendall(_HEAD.pack(begin, len(piece)))
                connection.sendall(piece)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)

    def _next(self) -> Iterator[int]:
        while True:
            with self._lock:
                begin = next(self._begins, None)
            if begin is None:
                return
            yield begin

    def turn_away(self) -> None:
        """Lets nobody connect any more; goes on where the receiver has."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)

    @property
    def over(self) -> bool:
        """Whether it has arrived, or cannot."""
        return not any(thread.is_alive() for thread in (self._accepting, *self._threads))

    def wait(self) -> None:
        """Returns once it has arrived, or cannot."""
        self._accepting.join()
        for thread in self._threads:
            thread.join()


class Outbox:
    """Messages to members of a process group, each of which is told by the group where to fetch its own.

    Args:
        host: Address at which this machine listens.
        connecting: How long a receiver may take until it connects.
        timeout: How long it may pause.
    """

    def __init__(self, host: str, connecting: timedelta, timeout: timedelta) -> None:
        self._host, self._connecting, self._timeout = host, connecting, timeout
        self._announcing: list[tuple[Work, torch.Tensor]] = []
        self._sending: list[Sending] = []

    def send(self, content: torch.Tensor, group: ProcessGroup, rank: int) -> int:
        """Starts to send to a member; returns bytes. `content` is as for `Sending`."""
        sending = Sending(content, self._host, self._connecting.total_seconds(), self._timeout.total_seconds())
        self._sending.append(sending)
        place = sending.place.to_tensor()
        self._announcing.append((group.send([place], rank, _TAG), place))
        return content.nbytes + place.nbytes

    def turn_away(self) -> None:
        """Members have met again. Whoever has not begun to fetch is gone, or comes again; the others go on."""
        self._announcing.clear()
        self._sending = [sending for sending in self._sending if not sending.over]
        for sending in self._sending:
            sending.turn_away()

    def close(self) -> None:
        """Waits until all has arrived, or cannot."""
        for work, _ in self._announcing:
            with contextlib.suppress(RuntimeError):
                work.wait()
        for sending in self._sending:
            sending.wait()


def receive(group: ProcessGroup, rank: int, check: Callable[[int], None], timeout: timedelta) -> torch.Tensor:
    """Receives what a member of the group sends by its `Outbox`: `[n]` uint8.

    Args:
        group: Of both.
        rank: The sender's.
        check: Raises if there cannot be so many bytes.
        timeout: How long the sender may pause.

    Raises:
        RuntimeError, ConnectionError: The sender is gone.
    """
    announced = torch.zeros(PLACE_BYTES, dtype=torch.uint8)
    group.recv([announced], rank, _TAG).wait()
    place = Place.from_tensor(announced)
    check(place.bytes)
    content = torch.empty(place.bytes, dtype=torch.uint8)
    fetch(place, content, timeout.total_seconds())
    return content


def fetch(place: Place, into: torch.Tensor, timeout: float) -> None:
    """Fetches a message.

    Args:
        place: Where it is.
        into: `[n]` uint8 on the CPU, of the message's length; filled in place.
        timeout: Seconds that the sender may let pass between two pieces.

    Raises:
        ConnectionError: The sender is gone, or something else has arrived than it meant to send.
    """
    content = into.numpy().data
    received, errors = [0] * CONNECTIONS, list[OSError]()

    def receive_some(number: int) -> None:
        try:
            with socket.create_connection((place.host, place.port), timeout) as connection:
                connection.sendall(bytes.fromhex(place.token))
                head = bytearray(_HEAD.size)
                while _fill(connection, memoryview(head)):
                    begin, size = _HEAD.unpack(head)
                    piece = content[begin : begin + size]
                    if len(piece) != size or not size or not _fill(connection, piece):
                        raise ConnectionError("a piece of the message ends early, or is none of it")
                    received[number] += size
        except OSError as error:
            errors.append(error)

    threads = [_start(receive_some, number) for number in range(CONNECTIONS)]
    for thread in threads:
        thread.join()
    if sum(received) != len(content):
        why = f": {errors[0]}" if errors else ""
        raise ConnectionError(
            f"of {len(content):,} bytes from {place.host}:{place.port}, {sum(received):,} have arrived{why}"
        )
    # TCP's own checksum has 16 bits, and nothing else watches over what the weights of a replica begin with.
    if digest_of(into) != place.digest:
        raise ConnectionError(f"the {len(content):,} bytes from {place.host}:{place.port} are damaged")


def _fill(connection: socket.socket, buffer: memoryview) -> bool:
    """Receives until the buffer is full; False if nothing comes any more. Raises `ConnectionError` amid it."""
    filled = 0
    while filled < len(buffer):
        count = connection.recv_into(buffer[filled:])
        if not count and not filled:
            return False
        if not count:
            raise ConnectionError("the sender is gone")
        filled += count
    return True


def _start(function: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, name="state for a replica", daemon=True)
    thread.start()
    return thread
