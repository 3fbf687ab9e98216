"""What a collective takes, from a network's rate and round-trip time."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_sparsecomm.basis.arguments import check_booleans, is_number
from lightning_sparsecomm.basis.far import far_of, straight
from lightning_sparsecomm.basis.ledger import Collective, link_bytes

# A new TCP connection begins with ten segments in flight (RFC 6928), and doubles them in each round trip.
_FIRST_WINDOW_BYTES = 10 * 1448

# Gloo's ring sums segments of at most so many bytes, at least two for each rank. Two are on their way at a time.
_SEGMENT_BYTES = 2**20

# Linux halves a connection's window for each of its time-outs that it was idle (RFC 2861): a round trip and 200 ms. How
# long it is idle differs from step to step, so a part of a time-out counts as a part of a halving.
_LEAST_TIMEOUT = 0.2

ON_THE_CABLE = 1538 / 1448
"""Bytes on the cable for each byte of a full packet: with the headers of TCP, IP and Ethernet."""


class Link(ABC):
    """The network as one rank sees it."""

    @abstractmethod
    def seconds(
        self, collective: Collective, handed_bytes: float, ranks: int, ring: bool = False, idle: float = math.inf
    ) -> float:
        """What a collective takes, from its start until the slowest rank has its result.

        Args:
            collective: Which one.
            handed_bytes: Bytes that each rank hands over.
            ranks: Number of ranks.
            ring: Whether it goes around Gloo's ring over a high-latency link too, as DDP's own sums do.
            idle: Seconds since these ranks last sent something as large; infinite for a first message. Over a
                high-latency link, TCP's window becomes smaller meanwhile, and opens again in some round trips. A ring's
                segments need so little of it that only a first sum finds it too small.
        """

    def buckets_seconds(self, sizes: Sequence[float], ranks: int, first: bool = False) -> float:
        """What DDP's sums of buckets of such bytes take, one after another; `first`, they find TCP's window closed."""
        return self.seconds("all_reduce", sum(sizes), ranks, ring=True, idle=math.inf if first else 0.0)


@dataclass(frozen=True)
class Network(Link):
    """A network of equal cables between ranks and a switch, by its figures.

    Collectives work in rings, as Gloo's do, each hop of a whole round trip. So a sum puts at most 2 MiB on a rank's
    link in a round trip. Where that takes 4 ms or more, collectives are those of `FarWire`, unless they are DDP's own.

    >>> network = Network(100e6, rtt=0.02)
    >>> [round(network.seconds("all_reduce", 40_000, ranks=4, ring=ring), 2) for ring in (True, False)]
    [0.12, 0.05]

    Args:
        bandwidth: Bits per second that each rank sends, and receives at the same time; infinite for no limit.
        rtt: Round-trip time between two ranks, in seconds.
        call: Seconds of software in each hop.
        copying: Seconds of processor time for each byte on the link.
        straight: Whether messages go straight where the way is long, as in `FarWire`.

    Raises:
        ValueError: A figure is out of its range, or no number.
        TypeError: `straight` is no bool.
    """

    bandwidth: float
    rtt: float = 0.0
    call: float = 1e-4
    copying: float = 5e-10
    straight: bool = True

    def __post_init__(self) -> None:
        if not is_number(self.bandwidth) or not self.bandwidth > 0:
            raise ValueError(f"bandwidth must be positive, in bits per second; got {self.bandwidth!r}. Use 1e8.")
        remedies = {"rtt": "Use 0.02 for 20 ms.", "call": "Leave it out.", "copying": "Leave it out."}
        for name, remedy in remedies.items():
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < math.inf:
                raise ValueError(f"{name} must be 0 or more seconds; got {value!r}. {remedy}")
        check_booleans(straight=self.straight)

    def seconds(
        self, collective: Collective, handed_bytes: float, ranks: int, ring: bool = False, idle: float = math.inf
    ) -> float:
        if ranks == 1:
            return 0.0
        may = self.straight and not ring
        calls = straight(collective, handed_bytes, ranks, far_of(self.rtt)) if may else []
        if calls:
            # The second call's messages are no larger, and find the window open.
            idles = [idle, *[0.0] * (len(calls) - 1)]
            return sum(
                self._call_seconds(link_bytes(*call, ranks), 1, ranks - 1, each) for call, each in zip(calls, idles)
            )
        sent = link_bytes(collective, handed_bytes, ranks)
        if collective == "send":
            # A message to each of the others, all at once.
            return (ranks - 2) * self.call + self._call_seconds(sent, 1, ranks - 1, idle)
        if collective == "all_reduce":
            return self._ring_seconds(handed_bytes, ranks, first=idle == math.inf)
        return self._call_seconds(sent, hops(collective, ranks), 1, idle)

    def buckets_seconds(self, sizes: Sequence[float], ranks: int, first: bool = False) -> float:
        # Gloo sums two buckets at a time, in two threads. Of each thread: its seconds if it were alone, and how many of
        # them its bytes need. TCP's window opens once, and for the largest segments furthest.
        alone, filling, opening = [0.0, 0.0], [0.0, 0.0], 0.0
        for size in sizes if ranks > 1 else ():
            thread = alone.index(min(alone))
            taken = self._ring_seconds(size, ranks)
            alone[thread] += taken
            filling[thread] += link_bytes("all_reduce", size, ranks) * self._byte_seconds
            opening = max(opening, self._ring_seconds(size, ranks, first) - taken)
        (short, filled), (long, filled_too) = sorted(zip(alone, filling))
        if not short:
            return opening + long
        # What one sends finds the other's segments on the link, for that part of the time, and waits as long.
        waiting = filled * filled_too / long
        both = max(short + waiting, filled + filled_too * short / long)
        return opening + both + long - short

    def _ring_seconds(self, handed_bytes: float, ranks: int, first: bool = False) -> float:
        """Of Gloo's sum around the ring: pieces are added up, then passed on. Each segment takes a round trip."""
        of_each = math.ceil(max(handed_bytes / _SEGMENT_BYTES, 2 * ranks) / ranks)
        size = handed_bytes / (of_each * ranks)
        transfer = size * self._byte_seconds
        pairs, single = divmod((ranks - 1) * of_each, 2)
        # The second of a pair arrives after the first; a single one is the last, and arrives after all.
        last = self.rtt + transfer if single else min(self.rtt, transfer)
        one_way = pairs * max(2 * transfer, self.rtt + transfer) + last
        return 2 * one_way + hops("all_reduce", ranks) * self.call + self._ramp(2 * size, math.inf if first else 0.0)

    def _call_seconds(self, sent: float, count: int, connections: int, idle: float) -> float:
        """Of a call that puts `sent` bytes on the link in `count` hops, each over so many connections at once."""
        hops_seconds = count * (self.rtt + self.call)
        return hops_seconds + sent * self._byte_seconds + self._ramp(sent / count / connections, idle)

    @property
    def _byte_seconds(self) -> float:
        return max(8 * ON_THE_CABLE / self.bandwidth, self.copying)

    def _ramp(self, message: float, idle: float) -> float:
        """Round trips in which TCP's window is still smaller than a message, or than what the link could hold."""
        window = min(message, self.bandwidth / 8 * self.rtt) if self.rtt else 0.0
        if window <= _FIRST_WINDOW_BYTES:
            return 0.0
        return self.rtt * min(math.log2(window / _FIRST_WINDOW_BYTES), idle / (self.rtt + _LEAST_TIMEOUT))


def hops(collective: Collective, ranks: int) -> int:
    """Round trips that wait for each other: in a ring such as Gloo's, or one where all send to all at once."""
    return {"all_reduce": 2 * (ranks - 1), "all_to_all": 1, "send": 1}.get(collective, ranks - 1)
