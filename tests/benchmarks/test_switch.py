"""The switch delays, loses and serializes as it was asked to: with packets made here, and at moments that are given."""

import gc
import itertools
import random
import socket
import struct
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

from benchmarks import switch
from benchmarks.cable import Cable
from benchmarks.switch import Cut, Loss, Switch, Trip, Wander, without

HOSTS = [socket.inet_aton(f"10.99.0.{host + 1}") for host in range(3)]
HEADER, ETHERNET, IP = struct.Struct("=BBHHHH"), 14, 20
FIN, PUSH, ACK, REDUCED = 0x01, 0x08, 0x10, 0x80


def _sum(data: bytes) -> int:
    """The internet checksum's sum of 16-bit numbers."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def packet(payload: bytes, size: int = 0, sender: int = 0, receiver: int = 1, udp: bool = False) -> bytes:
    """What the kernel gives a switch: virtio's header, then Ethernet, IP, TCP or UDP with the sum of its pseudo-header.

    Args:
        payload: The bytes.
        size: Payload of each packet that it would be cut into; 0 if it is not.
        sender, receiver: Hosts.
        udp: Not TCP.
    """
    transport = 8 if udp else 20
    length, protocol = IP + transport + len(payload), 17 if udp else 6
    pseudo = _sum(HOSTS[sender] + HOSTS[receiver] + struct.pack("!HH", protocol, length - IP))
    if udp:
        body = struct.pack("!HHHH", 1000, 2000, length - IP, pseudo)
    else:
        flags = ACK | PUSH | FIN | REDUCED
        body = struct.pack("!HHIIBBHHH", 1000, 2000, 0xFFFFFF00, 7, 5 << 4, flags, 512, pseudo, 0)
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, length, 40, 0x4000, 64, protocol, 0, HOSTS[sender], HOSTS[receiver])
    ip = ip[:10] + struct.pack("!H", 0xFFFF ^ _sum(ip)) + ip[12:]
    kind = (5 if udp else 1) if size else 0
    header = HEADER.pack(1, kind, ETHERNET + IP + transport, size, ETHERNET + IP, 6 if udp else 16)
    return header + bytes(12) + b"\x08\x00" + ip + body + payload


@pytest.mark.parametrize("udp", [False, True])
@pytest.mark.parametrize("lost", [[0], [2], [6], [1, 2, 4], [0, 6], list(range(7))])
def test_what_is_left_of_a_large_packet_is_what_its_parts_would_be(lost: list[int], udp: bool) -> None:
    payload = random.Random(0).randbytes(6 * 100 + 30)
    whole = packet(payload, 100, udp=udp)
    cut = Cut.of(whole)
    head = ETHERNET + IP + (8 if udp else 20)
    assert cut == (7, HEADER.size + head, 100, len(payload) + 7 * head)
    arrived = {}
    for part in without(whole, cut, lost):
        _, kind, _, size, _, _ = HEADER.unpack_from(part)
        frame = part[HEADER.size :]
        ip, body, data = frame[ETHERNET : ETHERNET + IP], frame[ETHERNET + IP : head], frame[head:]
        assert _sum(ip) == 0xFFFF and struct.unpack_from("!H", ip, 2)[0] == len(frame) - ETHERNET
        number = struct.unpack_from("!H", ip, 4)[0] - 40
        pseudo = _sum(ip[12:] + struct.pack("!HH", ip[9], len(frame) - ETHERNET - IP))
        assert struct.unpack_from("!H", body, 6 if udp else 16)[0] == pseudo
        last = number + -(-len(data) // 100) == 7
        if udp:
            assert struct.unpack_from("!H", body, 4)[0] == len(frame) - ETHERNET - IP
        else:
            assert struct.unpack_from("!I", body, 4)[0] == (0xFFFFFF00 + 100 * number) % 2**32
            assert body[13] == ACK | (PUSH | FIN) * last | REDUCED * (number == 0)
        # One that is not cut says so.
        assert (kind, size) == ((0, 0) if len(data) <= 100 else (5 if udp else 1, 100))
        for place in range(0, len(data), 100):
            arrived[number + place // 100] = data[place : place + 100]
    assert arrived == {number: payload[100 * number :][:100] for number in range(7) if number not in lost}


def test_losses_have_their_share_and_do_not_depend_on_how_packets_come() -> None:
    at_once = Loss(0.02, random.Random(3)).among(50_000)
    one_by_one = Loss(0.02, random.Random(3))
    assert at_once == [number for number in range(50_000) if one_by_one.among(1)]
    # Four standard errors.
    assert abs(len(at_once) - 1000) < 4 * (50_000 * 0.02 * 0.98) ** 0.5
    assert Loss(0.0, random.Random(3)).among(10**9) == []


def test_jitter_stays_in_its_range_and_lets_no_packet_overtake() -> None:
    wander = Wander(0.05, 0.01, random.Random(0))
    times = [0.0003 * step for step in range(100_000)]
    delays = [wander.at(time) for time in times]
    assert 0.045 <= min(delays) < 0.0452 and 0.0548 < max(delays) <= 0.055
    assert abs(sum(delays) / len(delays) - 0.05) < 0.0003
    arrivals = [time + delay for time, delay in zip(times, delays)]
    # Half as far apart, at the least.
    assert all(after - before > 0.00014 for before, after in itertools.pairwise(arrivals))
    assert Wander(0.05, 0.0, random.Random(0)).at(1.0) == 0.05


class Bench:
    """A switch between sockets, each packet of which is read whole, at moments that a test gives.

    Args:
        trip: Of all packets.
        up, down: Rates of all cables, in bits a second.
    """

    def __init__(self, trip: Trip, up: int, down: int) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in HOSTS]
        self.hosts, self.devices = zip(*pairs)
        for end in (*self.hosts, *self.devices):
            end.setblocking(False)
        trips = {(a, b): trip for a in range(3) for b in range(3) if a != b}
        files = [device.fileno() for device in self.devices]
        self.switch = Switch(files, HOSTS, trips, [up] * 3, [down] * 3, 0.4, 0)

    def sent(self, sender: int, data: bytes, now: float) -> None:
        self.hosts[sender].send(data)
        self.switch.read(sender, now)

    def arrived(self, host: int, now: float) -> list[bytes]:
        self.switch.turn(now)
        found = []
        while True:
            try:
                found.append(self.hosts[host].recv(2**16))
            except BlockingIOError:
                return found


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(*request.param)
    yield made
    for end in (*made.hosts, *made.devices):
        end.close()


# 1,514 bytes take 1.514 ms.
PAYLOAD = bytes(1514 - ETHERNET - IP - 20)


@pytest.mark.parametrize("bench", [(Trip(0.05, 0.0, 0.0), 8_000_000, 8_000_000)], indirect=True)
def test_a_packet_arrives_after_half_the_round_trip_and_its_own_length(bench: Bench) -> None:
    bench.sent(0, packet(PAYLOAD), 10.0)
    assert bench.arrived(1, 10.049) == []
    # Its bits came one after another, and go on as they come.
    assert bench.arrived(1, 10.0501) == [packet(PAYLOAD)] and bench.arrived(2, 10.0501) == []


@pytest.mark.parametrize("bench", [(Trip(0.05, 0.0, 0.0), 10**9, 8_000_000)], indirect=True)
def test_packets_of_two_senders_share_the_receivers_cable(bench: Bench) -> None:
    ones, twos = packet(PAYLOAD), packet(PAYLOAD, sender=2)
    for _ in range(3):
        bench.sent(0, ones, 10.0)
        bench.sent(2, twos, 10.0)
    moments = [10.05 + 0.00153 * (1 + number) for number in range(6)]
    assert [[(ones, twos).index(each) for each in bench.arrived(1, now)] for now in moments] == [[0], [1]] * 3


@pytest.mark.parametrize("bench", [(Trip(0.05, 0.0, 0.0), 10**9, 10**9)], indirect=True)
def test_cables_may_become_slower(bench: Bench) -> None:
    bench.sent(0, packet(PAYLOAD), 10.0)
    assert len(bench.arrived(1, 10.0501)) == 1
    bench.switch.change_rate(8_000_000)
    for _ in range(3):
        bench.sent(0, packet(PAYLOAD), 11.0)
    assert [len(bench.arrived(1, 11.05 + 0.00153 * number)) for number in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("bench", [(Trip(0.05, 0.0, 0.0), 10**9, 8_000_000)], indirect=True)
def test_a_large_packet_takes_the_time_of_its_parts(bench: Bench) -> None:
    large = packet(bytes(14600), 1460)
    bench.sent(0, large, 10.0)
    assert bench.arrived(1, 10.0646) == [] and bench.arrived(1, 10.0649) == [large]
    assert bench.switch.report().packets == 10


@pytest.mark.parametrize("bench", [(Trip(0.05, 0.0, 0.0), 10**9, 800_000)], indirect=True)
def test_a_queue_that_is_full_drops(bench: Bench) -> None:
    """15.14 ms for each: of 40, all that begin within 0.4 s."""
    for _ in range(40):
        bench.sent(0, packet(PAYLOAD), 10.0)
    assert len(bench.arrived(1, 12.0)) == 27
    assert bench.switch.report()[:4] == (27, 0, 13, 27)


@pytest.mark.parametrize("bench", [(Trip(0.05, 0.0, 0.3), 10**9, 10**9)], indirect=True)
def test_what_is_lost_is_counted_and_does_not_arrive(bench: Bench) -> None:
    whole = bytes(range(200)) * 10
    for _ in range(10):
        bench.sent(0, packet(whole, 100), 10.0)
    data = b"".join(part[HEADER.size + ETHERNET + IP + 20 :] for part in bench.arrived(1, 11.0))
    report = bench.switch.report()
    assert 30 < report.lost < 90 and report.packets == 200 - report.lost and len(data) == 100 * report.packets


@pytest.mark.parametrize("bench", [(Trip(0.05, 0.0, 0.0), 10**9, 10**9)], indirect=True)
def test_packets_that_wait_to_be_read_are_late(bench: Bench) -> None:
    """A switch that reads too slowly delays packets too, also where it writes each in time."""
    for _ in range(5):
        bench.hosts[0].send(packet(PAYLOAD))
    bench.switch.read(0, 10.0)
    assert bench.switch.report().late_seconds == 0
    # It has read four, and the fifth may have waited since.
    bench.switch.read(0, 10.2)
    report = bench.switch.report()
    assert report.late_seconds == report.worst_seconds == pytest.approx(0.2)
    bench.sent(0, packet(PAYLOAD), 10.9)
    assert bench.switch.report().late_seconds == 0


@pytest.mark.parametrize("bench", [(Trip(0.05, 0.0, 0.0), 10**9, 10**9)], indirect=True)
def test_a_device_that_was_found_empty_made_nobody_wait(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four packets come at once, and again 40 ms later: as many as are read in one go."""
    device, waits, moments = bench.devices[0].fileno(), [], iter([10.0, 10.0, 10.04])

    def ready(
        files: Sequence[int], _: object, __: object, wait: float | None
    ) -> tuple[list[int], tuple[()], tuple[()]]:
        waits.append(wait)
        moment = next(moments)
        monkeypatch.setattr(switch, "time", SimpleNamespace(monotonic=lambda: moment))
        found = [device] if len(waits) != 2 else []
        for _ in range(4 * len(found)):
            bench.hosts[0].send(packet(PAYLOAD))
        return found, (), ()

    monkeypatch.setattr(switch, "select", SimpleNamespace(select=ready))
    monkeypatch.setattr(switch, "time", SimpleNamespace(monotonic=lambda: 10.0))
    control, here = Pipe()
    with control, here, pytest.raises(StopIteration):
        bench.switch.carry(control)
    gc.enable()
    monkeypatch.undo()
    # It looks again at once, and then waits for what is due first.
    assert waits[:2] == [None, 0.0] and waits[2] == pytest.approx(0.05, abs=0.001)
    assert bench.switch.report().late_seconds == 0


@pytest.mark.parametrize("bench", [(Trip(0.05, 0.0, 0.0), 10**9, 10**9)], indirect=True)
def test_what_is_for_nobody_here_is_dropped(bench: Bench) -> None:
    bench.sent(0, packet(b"")[:30] + bytes(4) + bytes(30), 10.0)
    bench.sent(0, b"short", 10.0)
    assert [bench.arrived(host, 11.0) for host in range(3)] == [[], [], []]


def test_cables_as_text() -> None:
    cable = Cable("100mbit", down="1gbit", rtt="0.2s", loss="0.1%")
    assert str(cable) == "100mbit, down 1gbit, rtt 0.2s, loss 0.1%" and Cable.of(str(cable)) == cable
    assert Cable.of("unlimited") == Cable("unlimited")
    assert (cable.up_bits, cable.down_bits, cable.rtt_seconds, cable.loss_fraction) == (10**8, 10**9, 0.2, 0.001)
    # A rate is that of both directions.
    assert cable.changed("rate=10mbit,rtt=300ms") == Cable("10mbit", rtt="300ms", loss="0.1%")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rtt": "100"}, r"rtt must be a number with its unit, ms or s; got '100'. Try 100ms"),
        ({"rtt": "-5ms"}, r"rtt must be a number with its unit, ms or s; got '-5ms'"),
        ({"rtt": "1ms"}, r"rtt must be 0ms, or from 10ms, .* to 10s; got 1ms. Try 20ms"),
        ({"jitter": "10ms"}, r"jitter must be at most the rtt, 0ms; got 10ms"),
        ({"loss": "0.1"}, r"loss must be a percentage; got '0.1'. Try 0.1%"),
        ({"loss": "200%"}, r"loss must be from 0% to 50%, .*; got 200%"),
        ({"up": "20"}, r"up must be a number of kbit, mbit or gbit a second, or unlimited; got '20'"),
        ({"rate": "10gbit", "rtt": "20ms"}, r"with rtt or loss, rate must be at most 1gbit, .*; got 10gbit"),
        ({"down": "unlimited", "loss": "1%"}, r"with rtt or loss, down must be at most 1gbit, .*; got unlimited"),
    ],
)
def test_cables_that_are_refused(changes: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Cable(**changes)
