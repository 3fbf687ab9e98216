"""Measures a lab through sockets, beside what was asked for: `network.py --check`.

| of | how |
|---|---|
| rate | UDP as fast as the sender's kernel takes it; what arrives, Ethernet headers included |
| rtt | the mean time of UDP packets that are sent back, on an idle network |
| jitter | three times the standard deviation of these times: that is how jitter is defined |
| loss | small UDP packets at half the rate or less; those whose numbers never arrive |

The rate counts what was not lost on the way. The standard error says what the number of packets can tell.
"""

import math
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from cable import bits_per_second
from namespaces import FORK
from switch import Report, Trip

TOLERANCE = 0.05
STANDARD_ERRORS = 3  # what is left to chance

_PORT = 4001
_DATAGRAM_BYTES, _WIRE_BYTES = 1472, 1514
_UDP_SEGMENT, _UDP_GRO = 103, 104
_PING = struct.Struct("d")
_PING_SECONDS = 0.01  # between two
_NUMBERED = struct.Struct("I96x")
_NUMBERED_WIRE_BYTES = 100 + 42
_MOST_PER_SECOND = 4000

Result = TypeVar("Result")


class Checked(Protocol):
    """What a check needs of `network.Lab`."""

    ranks: int
    ranks_per_node: int
    hosts: int
    inside: str
    has_length: bool

    def rates(self, sender: int, receiver: int) -> tuple[int | None, int | None]: ...
    def trip(self, sender: int, receiver: int) -> Trip: ...
    def report(self) -> Report: ...
    def run(self, function: Callable[..., Result], *args: object, timeout: float) -> list[Result]: ...


class Line(NamedTuple):
    """One property of one path.

    Attributes:
        path: `0 → 1`.
        name: Of the property.
        unit: Of the numbers.
        asked: None where nothing was asked for.
        measured: What was found.
        error: Standard error of what was found.
        tolerance: How far it may be off besides, as a share of what was asked.
    """

    path: str
    name: str
    unit: str
    asked: float | None
    measured: float
    error: float = 0.0
    tolerance: float = TOLERANCE

    @property
    def holds(self) -> bool:
        if self.asked is None:
            return True
        return abs(self.measured - self.asked) <= self.tolerance * self.asked + STANDARD_ERRORS * self.error

    def __str__(self) -> str:
        asked = "—" if self.asked is None else f"{self.asked:.4g}"
        off = f"{self.measured / self.asked - 1:+.1%}" if self.asked else "—"
        error = f"{self.error:.2g}" if self.error else "—"
        holds = "—" if self.asked is None else "yes" if self.holds else "NO"
        return f"| {self.path} | {self.name}, {self.unit} | {asked} | {self.measured:.4g} | {off} | {error} | {holds} |"


def check(lab: Checked) -> bool:
    """Prints what each kind of path is, beside what was asked for; whether all are that.

    Raises:
        LabError: The lab cannot be set up here.
    """
    lines = []
    with lab:  # type: ignore[attr-defined]
        print("| path | of | asked | measured | off by | standard error | holds |\n|---|---|---:|---:|---:|---:|---|")
        for sender, receiver in kinds(lab):
            for line in lines_of(lab, sender, receiver):
                print(line, flush=True)
                lines.append(line)
        if lab.ranks_per_node > 1:
            asked = bits_per_second(lab.inside)
            rate = received_rate(lab, 0, 1, asked, asked, "127.0.0.1")
            line = Line("inside a node", "rate", "Mbit/s", asked and asked / 1e6, rate / 1e6)
            print(line)
            lines.append(line)
    wrong = [line for line in lines if not line.holds]
    if wrong:
        names = ", ".join(f"{line.name} of {line.path}" for line in wrong)
        print(f"\nThis is not the network that was asked for: {names}. Is the machine busy with something else?")
    return not wrong


def kinds(lab: Checked) -> list[tuple[int, int]]:
    """A pair of hosts for each kind of path that there is."""
    pairs = {}
    for sender in range(lab.hosts):
        for receiver in range(lab.hosts):
            if sender != receiver:
                pairs.setdefault((lab.rates(sender, receiver), lab.trip(sender, receiver)), (sender, receiver))
    return list(pairs.values())


def lines_of(lab: Checked, sender: int, receiver: int) -> list[Line]:
    path, trip = f"{sender} → {receiver}", lab.trip(sender, receiver)
    ranks = sender * lab.ranks_per_node, receiver * lab.ranks_per_node
    address = f"10.99.0.{receiver + 1}"
    up, down = lab.rates(sender, receiver)
    slower = min((bits for bits in (up, down) if bits), default=None)
    rate = received_rate(lab, *ranks, up, slower, address)
    expected = None
    if slower:
        # What is lost does not reach the receiver's cable.
        expected = min(bits * share for bits, share in ((up, 1 - trip.loss), (down, 1.0)) if bits) / 1e6
    lines = [Line(path, "rate", "Mbit/s", expected, rate / 1e6)]
    jitter = trip.jitter_seconds
    # The delay's line turns every two jitters: so many turns are as many draws.
    duration = max(1.0, 200 * jitter)
    times = ping(lab, *ranks, duration, address)
    turns = duration / (2 * jitter) if jitter else len(times)
    deviation = statistics.stdev(times)
    rtt = 2000 * trip.delay_seconds
    mean = 1000 * statistics.mean(times)
    lines.append(Line(path, "rtt", "ms", rtt or None, mean, 1000 * deviation / math.sqrt(turns) if jitter else 0.0))
    if jitter:
        error = 3000 * deviation / math.sqrt(2 * turns)
        lines.append(Line(path, "jitter", "ms", 1000 * jitter, 3000 * deviation, error))
    if lab.has_length:
        count, lost = losses(lab, *ranks, slower, address, 4.0 if trip.loss else 1.0)
        error = 100 * math.sqrt(trip.loss * (1 - trip.loss) / count)
        lines.append(Line(path, "loss", "%", 100 * trip.loss, 100 * lost / count, error, tolerance=0.0))
    return lines


def received_rate(lab: Checked, sender: int, receiver: int, up: int | None, bits: int | None, address: str) -> float:
    """Bits a second that arrive while the sender sends all it can.

    Args:
        lab: The lab.
        sender, receiver: Ranks.
        up: Rate of the sender's cable; None where unlimited.
        bits: That of the slower of the two.
        address: The receiver's.
    """
    # At least 200 packets.
    duration = 2.5 if bits is None else max(2.5, 200 * 8 * _WIRE_BYTES / bits)
    ready, done = FORK.Event(), FORK.Event()
    # As many packets at once as the sender's cable takes in a millisecond.
    together = 40 if up is None else max(1, min(40, up // 8 // 1000 // _WIRE_BYTES))

    def part(rank: int) -> float:
        if rank == sender:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
                out.setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, _DATAGRAM_BYTES)
                ready.wait()
                data, end = bytes(together * _DATAGRAM_BYTES), time.monotonic() + duration
                while time.monotonic() < end:
                    out.sendto(data, (address, _PORT))
                done.set()
        if rank == receiver:
            with listening(address) as sink:
                sink.setsockopt(socket.IPPROTO_UDP, _UDP_GRO, 1)
                ready.set()
                times, counts = [], []
                while True:
                    try:
                        arrived = len(sink.recv(2**16))
                    except TimeoutError:
                        if done.is_set():
                            break
                        continue
                    times.append(time.monotonic())
                    counts.append(arrived // _DATAGRAM_BYTES)
            # Not the beginning, when token buckets are full, and not the end, when the sender has stopped.
            inside = [number for number, at in enumerate(times) if 0.2 <= (at - times[0]) / duration <= 0.95]
            packets = sum(counts[inside[0] + 1 : inside[-1] + 1])
            return 8 * _WIRE_BYTES * packets / (times[inside[-1]] - times[inside[0]])
        return 0.0

    return lab.run(part, timeout=60 + 10 * duration)[receiver]


def listening(address: str) -> socket.socket:
    """A socket for what a sender sends, with much room."""
    sink = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sink.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**24)
    sink.bind((address, _PORT))
    sink.settimeout(1.5)
    return sink


def ping(lab: Checked, sender: int, receiver: int, duration: float, address: str) -> list[float]:
    """Seconds that packets take to the receiver and back."""
    ready, done = FORK.Event(), FORK.Event()

    def part(rank: int) -> list[float]:
        times: list[float] = []
        if rank == receiver:
            with listening(address) as sink:
                ready.set()
                while not done.is_set():
                    try:
                        sink.sendto(*sink.recvfrom(100))
                    except TimeoutError:
                        continue
        if rank == sender:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
                ready.wait()
                out.connect((address, _PORT))
                out.settimeout(1.5)

                def send() -> None:
                    end = time.monotonic() + duration
                    while time.monotonic() < end:
                        out.send(_PING.pack(time.monotonic()))
                        time.sleep(_PING_SECONDS)

                thread = threading.Thread(target=send)
                thread.start()
                while True:
                    try:
                        answer = out.recv(100)
                    except TimeoutError:
                        if not thread.is_alive():
                            break
                        continue
                    times.append(time.monotonic() - _PING.unpack(answer)[0])
                thread.join()
                done.set()
        return times

    return lab.run(part, timeout=60 + 10 * duration)[sender]


def losses(
    lab: Checked, sender: int, receiver: int, bits: int | None, address: str, duration: float
) -> tuple[int, int]:
    """How many packets were sent, and how many never arrived."""
    ready, done = FORK.Event(), FORK.Event()
    most = _MOST_PER_SECOND if bits is None else min(_MOST_PER_SECOND, bits // 2 // (8 * _NUMBERED_WIRE_BYTES))
    # Some each time. A sender that was held up does not catch up: a switch in user space takes few packets at once.
    together = math.ceil(most / 1000)

    def part(rank: int) -> int:
        if rank == sender:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
                ready.wait()
                end, sent = time.monotonic() + duration, 0
                while time.monotonic() < end:
                    for _ in range(together):
                        out.sendto(_NUMBERED.pack(sent), (address, _PORT))
                        sent += 1
                    time.sleep(together / most)
                done.set()
                return sent
        if rank == receiver:
            with listening(address) as sink:
                # Those that this process was too slow for did arrive.
                numbers, refused = set(), overflowed()
                ready.set()
                while True:
                    try:
                        numbers.add(_NUMBERED.unpack(sink.recv(200))[0])
                    except TimeoutError:
                        if done.is_set():
                            return len(numbers) + overflowed() - refused
        return 0

    answers = lab.run(part, timeout=60 + 10 * duration)
    return answers[sender], answers[sender] - answers[receiver]


def overflowed() -> int:
    """Packets that this host's sockets had no room for."""
    lines = Path("/proc/self/net/snmp").read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("Udp:"))
    return int(values[names.index("RcvbufErrors")])
