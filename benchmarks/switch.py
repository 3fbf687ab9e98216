"""A switch in user space: it gives cables a length, jitter and losses, on kernels without netem.

Each host has a TAP device, whose other end is a file of this process. A packet's way:

1. The host's kernel sends it at the rate of the host's cable (tbf, as in a lab without length), so that TCP feels its
   own device fill up, as it does on a machine.
2. The switch reads it, and drops it with the probability of loss.
3. It holds it for half the round-trip time, plus jitter.
4. It queues it for the receiver's cable. A packet that would wait longer than the queue is long is dropped.
5. It writes it to the receiver's device when the last of its bits would have passed.

Steps 3 and 4 reckon with the moments at which things are due, not with those at which this process gets to them: a
switch that is late once does not slow down what follows. How late packets were read and written is counted, and the lab
refuses a run in which they were too late.

**Large packets.** TCP hands the kernel up to 64 kB at once, and a TAP device passes them whole, with a header that says
how to cut them (IFF_VNET_HDR). So Python handles hundreds of packets a second instead of tens of thousands. They take
the time, the bytes and the losses of the packets that they would be cut into: one that is lost is cut out.

**Order.** Jitter is a path's property that changes over time, as a queue of other people's packets fills and drains: a
line between random delays, never steeper than half a second a second. So packets do not overtake each other.
If each packet had a delay of its own, most would arrive out of order; TCP takes that for loss, and slows down. Paths do
that rarely.
"""

import fcntl
import gc
import heapq
import math
import os
import random
import select
import struct
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

_HEADER = struct.Struct("=BBHHHH")  # virtio_net_hdr: flags, type, header's length, segment's size, checksum's place
_MOST_BYTES = 2**16 + 64
_IP = _HEADER.size + 14
_TRANSPORT = _IP + 20  # hosts send no IP options

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x2, 0x1000, 0x4000
_CHECKSUM, _TSO4, _TSO_ECN, _USO4, _USO6 = 1, 2, 8, 32, 64
_NO_SEGMENTS, _TCP_SEGMENTS, _ECN = 0, 1, 128
_TCP = 6
_FIN_PUSH, _CONGESTION_REDUCED = 0x09, 0x80

# What a trip takes besides: wake-ups of this process, and the devices. `network.py --check` measures what is left.
_OWN_SECONDS = 0.00025

_AT_ONCE = 4  # packets that are read from one device before others get their turn


class Trip(NamedTuple):
    """What packets from one host to another meet.

    Attributes:
        delay_seconds: Of each packet, on average.
        jitter_seconds: The delay wanders by half of it, up and down.
        loss: Probability that a packet of at most 1,500 bytes is dropped.
    """

    delay_seconds: float
    jitter_seconds: float
    loss: float


class Report(NamedTuple):
    """What the switch has done since it was asked last.

    Attributes:
        packets: Delivered; large ones count as what they would be cut into.
        lost: Dropped by chance.
        overflowed: Dropped since the queue of the receiver's cable was full.
        writes: Packets written, large ones once.
        late_seconds: Sum over packets of the time that they waited to be read, at most, and to be written after they
            were due.
        worst_seconds: The longest such time.
        busy_seconds: Processor time.
    """

    packets: int
    lost: int
    overflowed: int
    writes: int
    late_seconds: float
    worst_seconds: float
    busy_seconds: float

    @property
    def late_by(self) -> float:
        """Seconds by which a packet was late, on average."""
        return self.late_seconds / self.writes if self.writes else 0.0


def open_device(name: str) -> int:
    """Makes a TAP device in this process's network namespace; its file, which does not block.

    Raises:
        OSError: /dev/net/tun is missing, or not allowed.
    """
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
        offered = _CHECKSUM | _TSO4 | _TSO_ECN
        try:
            fcntl.ioctl(file, _TUNSETOFFLOAD, offered | _USO4 | _USO6)
        except OSError:  # before Linux 6.2: the kernel cuts UDP itself
            fcntl.ioctl(file, _TUNSETOFFLOAD, offered)
    except BaseException:
        os.close(file)
        raise
    return file


class Wander:
    """A delay in seconds that changes over time: a line whose corners are uniform within a range."""

    def __init__(self, middle: float, width: float, chance: random.Random) -> None:
        self._middle, self._width, self._chance = middle, width, chance
        self._piece, self._begin, self._end = -2, middle, middle

    def at(self, now: float) -> float:
        """The delay of a packet that enters now. `now` must not fall."""
        if not self._width:
            return self._middle
        piece, part = divmod(now / (2 * self._width), 1)
        if piece != self._piece:
            self._begin = self._end if piece == self._piece + 1 else self._draw()
            self._piece, self._end = int(piece), self._draw()
        return self._begin + part * (self._end - self._begin)

    def _draw(self) -> float:
        return self._middle + self._width * (self._chance.random() - 0.5)


class Loss:
    """Drops packets by chance: it counts those until the next one that is lost."""

    def __init__(self, probability: float, chance: random.Random) -> None:
        self._probability, self._chance = probability, chance
        self._passing = self._draw()

    def _draw(self) -> float:
        """How many pass before one is lost: a geometric distribution."""
        if not self._probability:
            return math.inf
        return int(math.log(1 - self._chance.random()) / math.log(1 - self._probability))

    def among(self, packets: int) -> list[int]:
        """Which of the next packets are lost, by number."""
        lost = []
        place = self._passing
        while place < packets:
            lost.append(int(place))
            place += 1 + self._draw()
        self._passing = place - packets
        return lost


class Cut(NamedTuple):
    """How a packet is cut into those that the wire would carry.

    Attributes:
        packets: How many.
        head_bytes: From the beginning of the virtio header to the payload.
        size: Payload bytes of each; 0 if it is not cut.
        wire_bytes: Of all, with Ethernet headers.
    """

    packets: int
    head_bytes: int
    size: int
    wire_bytes: int

    @classmethod
    def of(cls, packet: bytes) -> "Cut":
        _, kind, _, size, transport, _ = _HEADER.unpack_from(packet)
        whole = len(packet) - _HEADER.size
        if kind == _NO_SEGMENTS:
            return cls(1, 0, 0, whole)
        head = _HEADER.size + transport
        head += (packet[head + 12] >> 4) * 4 if kind & ~_ECN == _TCP_SEGMENTS else 8
        packets = -(-(len(packet) - head) // size)
        return cls(packets, head, size, whole + (packets - 1) * (head - _HEADER.size))


def without(packet: bytes, cut: Cut, lost: Sequence[int]) -> list[bytes]:
    """What is left of a packet: what was between those of its parts that are lost, each a packet of its own."""
    stretches = zip([0, *(number + 1 for number in lost)], [*lost, cut.packets])
    return [_stretch(packet, cut, begin, end) for begin, end in stretches if begin < end]


def _stretch(packet: bytes, cut: Cut, begin: int, end: int) -> bytes:
    payload = packet[cut.head_bytes + begin * cut.size : cut.head_bytes + end * cut.size]
    head = bytearray(packet[: cut.head_bytes])
    flags, kind, _, size, transport, checksum = _HEADER.unpack_from(packet)
    if len(payload) <= size:
        kind, size = _NO_SEGMENTS, 0
    _HEADER.pack_into(head, 0, flags, kind, cut.head_bytes - _HEADER.size, size, transport, checksum)
    # IP's length, number and checksum.
    length = cut.head_bytes - _IP + len(payload)
    before, number = struct.unpack_from("!HH", head, _IP + 2)
    struct.pack_into("!HH", head, _IP + 2, length, (number + begin) & 0xFFFF)
    struct.pack_into("!H", head, _IP + 10, 0)
    struct.pack_into("!H", head, _IP + 10, 0xFFFF ^ _folded(sum(struct.unpack_from("!10H", head, _IP))))
    # The pseudo-header's checksum has a length too; the kernel adds the rest.
    place = _HEADER.size + transport + checksum
    (pseudo,) = struct.unpack_from("!H", head, place)
    struct.pack_into("!H", head, place, _folded(pseudo + (0xFFFF ^ (before - length))))
    if head[_IP + 9] == _TCP:
        (sequence,) = struct.unpack_from("!I", head, _TRANSPORT + 4)
        struct.pack_into("!I", head, _TRANSPORT + 4, (sequence + begin * cut.size) & 0xFFFFFFFF)
        # What ends a message is said with its last packet, what answers congestion with its first.
        head[_TRANSPORT + 13] &= ~((_FIN_PUSH if end < cut.packets else 0) | (_CONGESTION_REDUCED if begin else 0))
    else:
        struct.pack_into("!H", head, _TRANSPORT + 4, length - 20)
    return bytes(head) + payload


def _folded(total: int) -> int:
    """A sum of 16-bit numbers in one's complement."""
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


class _Path:
    """One direction between two hosts."""

    def __init__(self, receiver: int, trip: Trip, seed: str) -> None:
        self.receiver = receiver
        self.wander = Wander(trip.delay_seconds, trip.jitter_seconds, random.Random(f"jitter {seed}"))
        self.loss = Loss(trip.loss, random.Random(f"loss {seed}"))


class Switch:
    """Carries packets between devices.

    Args:
        devices: The hosts' TAP devices, as files that do not block.
        addresses: The hosts' IPv4 addresses, 4 bytes each.
        trips: By sender and receiver.
        up: Rates of the hosts' cables, from them, in bits a second; None where unlimited. The hosts keep to them.
        down: The same to them; the switch keeps to these.
        queue_seconds: The longest that a packet waits for the receiver's cable.
        seed: Of jitter and losses; equal seeds lose the same packets among equal ones.
    """

    def __init__(
        self,
        devices: Sequence[int],
        addresses: Sequence[bytes],
        trips: Mapping[tuple[int, int], Trip],
        up: Sequence[int | None],
        down: Sequence[int | None],
        queue_seconds: float,
        seed: int,
    ) -> None:
        self._devices, self._queue_seconds = devices, queue_seconds
        # Seconds that a byte takes.
        self._up = [8 / bits if bits else 0.0 for bits in up]
        self._down = [8 / bits if bits else 0.0 for bits in down]
        self._free = [0.0] * len(devices)  # when the receiver's cable has sent what is queued
        self._paths: list[dict[bytes, _Path]] = [{} for _ in devices]
        for (sender, receiver), trip in trips.items():
            self._paths[sender][addresses[receiver]] = _Path(receiver, trip, f"{seed} {sender} {receiver}")
        # When, in which order, the packet, its receiver, its wire bytes (0 once it has passed the queue), its number of
        # packets, and when its first bit could begin on the receiver's cable.
        self._events: list[tuple[float, int, bytes, int, int, int, float]] = []
        self._number = 0
        # Since when a device may hold packets that were not read; None where it was empty.
        self._unread: list[float | None] = [None] * len(devices)
        self._forget()

    def _forget(self) -> None:
        self._packets = self._lost = self._overflowed = self._writes = 0
        self._late = self._worst = 0.0
        self._busy = time.process_time()

    def report(self) -> Report:
        """What it has done since the last report."""
        busy = time.process_time() - self._busy
        report = Report(self._packets, self._lost, self._overflowed, self._writes, self._late, self._worst, busy)
        self._forget()
        return report

    def carry(self, control: Connection) -> None:
        """Carries packets until this process ends.

        `control` gets a report for None; a number is a new rate of all cables, in bits a second.
        """
        # What is made here holds no circles, and a collection takes time.
        gc.disable()
        files = [control.fileno(), *self._devices]
        senders = {file: sender for sender, file in enumerate(self._devices)}
        while True:
            wait = max(0.0, self._events[0][0] - time.monotonic()) if self._events else None
            if any(self._unread):
                wait = 0.0  # to learn at once whether they are empty
            ready, _, _ = select.select(files, (), (), wait)
            now = time.monotonic()
            for file, sender in senders.items():
                if file in ready:
                    self.read(sender, now)
                else:
                    self._unread[sender] = None
            if files[0] in ready:
                bits = control.recv()
                if bits is None:
                    control.send(self.report())
                else:
                    self.change_rate(bits)
            self.turn(now)

    def change_rate(self, bits: int) -> None:
        """From now on, all cables carry so many bits a second."""
        self._up = self._down = [8 / bits] * len(self._devices)

    def read(self, sender: int, now: float) -> None:
        """Takes some of what a host has sent."""
        device, since = self._devices[sender], self._unread[sender]
        waited = 0.0 if since is None else now - since
        self._unread[sender] = now if since is None else since
        for _ in range(_AT_ONCE):
            try:
                packet = os.read(device, _MOST_BYTES)
            except BlockingIOError:
                self._unread[sender] = None
                return
            self._count_late(waited)
            # To nobody here: the kernel's own, such as a host that asks for its groups.
            path = self._paths[sender].get(packet[_IP + 16 : _IP + 20])
            if path is None:
                continue
            cut = Cut.of(packet)
            lost = path.loss.among(cut.packets)
            self._lost += len(lost)
            due = now + max(0.0, path.wander.at(now) - _OWN_SECONDS)
            for part in without(packet, cut, lost) if lost else (packet,):
                if lost:
                    cut = Cut.of(part)
                self._number += 1
                first = due - cut.wire_bytes * self._up[sender]
                event = (due, self._number, part, path.receiver, cut.wire_bytes, cut.packets, first)
                heapq.heappush(self._events, event)

    def turn(self, now: float) -> None:
        """Does what is due: packets that have come the whole way are queued, and those that have left it delivered."""
        while self._events and self._events[0][0] <= now:
            due, number, packet, receiver, wire_bytes, packets, first = heapq.heappop(self._events)
            if wire_bytes:
                begin = max(first, self._free[receiver])
                if begin - due > self._queue_seconds:
                    self._overflowed += packets
                    continue
                # Not before its last bit has arrived: a large packet's parts follow each other on both cables.
                end = max(begin + wire_bytes * self._down[receiver], due)
                self._free[receiver] = end
                heapq.heappush(self._events, (end, number, packet, receiver, 0, packets, 0.0))
                continue
            os.write(self._devices[receiver], packet)
            self._packets += packets
            self._writes += 1
            self._count_late(time.monotonic() - due)

    def _count_late(self, seconds: float) -> None:
        self._late += seconds
        self._worst = max(self._worst, seconds)
