"""What a collective takes: from a network's rate and round-trip time, or from collectives that were measured."""

import bisect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_sparsecomm.basis.far import FAR_SECONDS, far_of, straight
from lightning_sparsecomm.basis.ledger import Collective, link_bytes

# A new TCP connection begins with ten segments in flight (RFC 6928), and doubles them in each round trip.
_FIRST_WINDOW_BYTES = 10 * 1448

# Gloo's ring sums segments of at most so many bytes, at least two for each rank. Two are on their way at a time.
_SEGMENT_BYTES = 2**20

# Linux halves a connection's window for each of its time-outs that it was idle (RFC 2861): a round trip and 200 ms. How
# long it is idle differs from step to step, so a part of a time-out counts as a part of a halving.
_LEAST_TIMEOUT = 0.2

# Round trips that a message's bytes take on a far link. Fewer than the least are lost in noise: no higher rate is
# believed. The link was full if there were so many, or more than one and a smaller message was about as fast.
_LEAST_TRIPS, _FULL_TRIPS, _AS_FAST = 0.25, 2.0, 1 / 1.3

OPENING_TRIPS = 10
"""Round trips in which TCP's window opens for any message."""

# Bits per second that no link has. What takes about as long with them is round trips, and tells no rate.
_NO_RATE, _BY_ROUND_TRIPS = 1e13, 0.9

# Headers of TCP, IP and Ethernet for each full packet.
_ON_THE_CABLE = 1538 / 1448


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
            ring: Whether it goes around Gloo's ring over a long way too, as DDP's own sums do.
            idle: Seconds since these ranks last sent something as large; infinite for a first message. Over a long way,
                TCP's window becomes smaller meanwhile, and opens again in some round trips. A ring's segments need so
                little of it that only a first sum finds it too small.
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
    """

    bandwidth: float
    rtt: float = 0.0
    call: float = 1e-4
    copying: float = 5e-10
    straight: bool = True

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth must be positive, in bits per second; got {self.bandwidth!r}. Use 1e8.")
        if not 0 <= self.rtt < math.inf:
            raise ValueError(f"rtt must be 0 or more seconds; got {self.rtt!r}. Use 0.02 for 20 ms.")

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
        return max(8 * _ON_THE_CABLE / self.bandwidth, self.copying)

    def _ramp(self, message: float, idle: float) -> float:
        """Round trips in which TCP's window is still smaller than a message, or than what the link could hold."""
        window = min(message, self.bandwidth / 8 * self.rtt) if self.rtt else 0.0
        if window <= _FIRST_WINDOW_BYTES:
            return 0.0
        return self.rtt * min(math.log2(window / _FIRST_WINDOW_BYTES), idle / (self.rtt + _LEAST_TIMEOUT))


@dataclass(frozen=True)
class MeasuredLink(Link):
    """A network by collectives that were measured between these very ranks.

    Between two measured sizes, time is on a straight line; above the largest, the last line goes on. Where a hop takes
    4 ms or more, measurements follow each other without a pause and find TCP's window open, and a training's steps may
    not: there it answers as a `Network` of the measured round trip and rate.

    Args:
        ranks: Number of ranks that measured.
        points: For each collective, pairs of bytes handed over, in rising order, and seconds. At least two. An
            all-to-all takes what a gather of one of its parts takes, and so does a message to each of the others.
        around: Seconds of the smallest sum around the ring, where others went straight; None where all went around.
            Then `points` need only the smallest sum.
        rate: Bits per second of a far link, where `fitted` has found it, or how low it cannot be; None for what its
            gathers tell.

    Raises:
        ValueError: Another number of ranks is asked for, or a collective that was not measured.
    """

    ranks: int
    points: Mapping[Collective, Sequence[tuple[float, float]]]
    around: float | None = None
    rate: float | None = None

    def fitted(self, predicted: Callable[["MeasuredLink"], float], measured: float) -> "MeasuredLink":
        """The same link with the rate at which something far larger would have taken what it took.

        Where round trips alone explain that, it tells only how low the rate cannot be: so a link that is slower gets a
        rate at which they are nine tenths of it, and a faster one stays as it is.

        Args:
            predicted: Its seconds by a link; they fall as the rate rises.
            measured: Its seconds.
        """
        at_least = predicted(replace(self, rate=_NO_RATE))
        if at_least > _BY_ROUND_TRIPS * measured:
            measured = max(measured, at_least) / _BY_ROUND_TRIPS
            if predicted(self) <= measured:
                return self
        low, high = 1e3, _NO_RATE
        for _ in range(60):
            rate = math.sqrt(low * high)
            low, high = (rate, high) if predicted(replace(self, rate=rate)) > measured else (low, rate)
        return replace(self, rate=high)

    def seconds(
        self, collective: Collective, handed_bytes: float, ranks: int, ring: bool = False, idle: float = math.inf
    ) -> float:
        if ranks == 1:
            return 0.0
        if self.is_far and ranks == self.ranks:
            return self._network.seconds(collective, handed_bytes, ranks, ring, idle)
        if collective == "all_to_all":
            # As many bytes on the link, in as many messages, as a gather of one rank's part.
            return self.seconds("all_gather", handed_bytes / ranks, ranks)
        if collective == "send":
            return self.seconds("all_gather", handed_bytes / (ranks - 1), ranks)
        if ranks != self.ranks or collective not in self.points:
            raise ValueError(
                f"the link was measured with {self.ranks} ranks and {', '.join(self.points)}; got {ranks} ranks and"
                f" {collective!r}. Measure again, or use planning.Network."
            )
        points = self.points[collective]
        at = min(max(bisect.bisect_left(points, (handed_bytes, 0.0)), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[at - 1], points[at]
        # Noise can make a larger size look faster.
        slope = max(0.0, (y1 - y0) / (x1 - x0))
        return max(y0 + slope * (handed_bytes - x0), min(y for _, y in points))

    def buckets_seconds(self, sizes: Sequence[float], ranks: int, first: bool = False) -> float:
        far = self.is_far and ranks == self.ranks
        return self._network.buckets_seconds(sizes, ranks, first) if far else super().buckets_seconds(sizes, ranks)

    @property
    def _network(self) -> Network:
        """By the figures of a far link."""
        return Network(self.bandwidth, self.latency, call=0.0, straight=self.around is not None)

    @property
    def is_far(self) -> bool:
        """Whether a hop takes 4 ms or more, or the wire took it to."""
        return self.around is not None or (self.latency >= FAR_SECONDS and "all_gather" in self.points)

    @property
    def _rates(self) -> list[float]:
        """Bits per second of a far link by each gather but the smallest, if it has found TCP's window open."""
        shortest, sent = _LEAST_TRIPS * self.latency, 8 * _ON_THE_CABLE * link_bytes("all_gather", 1, self.ranks)
        sizes = [size for size, _ in self.points["all_gather"][1:]]
        return [sent * size / max(transfer, shortest) for size, transfer in zip(sizes, self._transfers)]

    @property
    def _transfers(self) -> list[float]:
        """Seconds that the bytes of each gather but the smallest take: all that it takes longer, without more hops."""
        (_, least), *others = self.points["all_gather"]
        found = []
        for size, taken in others:
            around = self.around is not None and not straight("all_gather", size, self.ranks, far_of(self.latency))
            found.append(taken - least - (hops("all_gather", self.ranks) - 1) * self.latency * around)
        return found

    @property
    def rate_is_known(self) -> bool:
        """Whether a far link's rate is believed; otherwise the link may be far faster than `bandwidth`."""
        if self.rate is not None or not self.is_far:
            return True
        *smaller, largest = self._rates
        round_trips = self._transfers[-1] / self.latency
        # More are due to the link, or to a window that a training finds no wider; a smaller message that was as fast
        # shows that it was open.
        return round_trips > _FULL_TRIPS or (round_trips > 1 and any(rate > _AS_FAST * largest for rate in smaller))

    @property
    def latency(self) -> float:
        """Seconds of a sum of the smallest size, for each of its hops: a round trip."""
        around = self.points["all_reduce"][0][1] if self.around is None else self.around
        return around / max(1, hops("all_reduce", self.ranks))

    @property
    def bandwidth(self) -> float:
        """Bits per second on the link that a sum reaches.

        From its two largest sizes, or from the smallest to the largest where that is less: either may be off by chance.
        Where a hop takes more than 4 ms, from the largest gather, or a bound. Where that took so few round trips that
        TCP's window may have held it up, from the one that was fastest for its size. Where it was fitted, `rate`.
        """
        if self.rate is not None:
            return self.rate
        if self.is_far:
            *_, largest = self._rates
            return largest if self._transfers[-1] > OPENING_TRIPS * self.latency else max(self._rates)
        points = self.points["all_reduce"]
        (x1, y1), rates = points[-1], [math.inf]
        for x0, y0 in (points[-2], points[0]):
            if y1 > y0:
                rates.append(8 * link_bytes("all_reduce", x1 - x0, self.ranks) / (y1 - y0))
        return min(rates)


def hops(collective: Collective, ranks: int) -> int:
    """Round trips that wait for each other: in a ring such as Gloo's, or one where all send to all at once."""
    return {"all_reduce": 2 * (ranks - 1), "all_to_all": 1, "send": 1}.get(collective, ranks - 1)
