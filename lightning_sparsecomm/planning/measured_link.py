"""What a collective takes, from collectives that were measured between the same ranks."""

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_sparsecomm.basis.far import FAR_SECONDS, far_of, straight
from lightning_sparsecomm.basis.ledger import Collective, link_bytes
from lightning_sparsecomm.planning.links import ON_THE_CABLE, Link, Network, hops

# Round trips that a message's bytes take on a far link. Fewer than the least are lost in noise: no higher rate is
# believed. The link was full if there were so many, or more than one and a smaller message was about as fast.
_LEAST_TRIPS, _FULL_TRIPS, _AS_FAST = 0.25, 2.0, 1 / 1.3

OPENING_TRIPS = 10
"""Round trips in which TCP's window opens for any message."""

# Bits per second that no link has. What takes about as long with them is round trips, and tells no rate.
_NO_RATE, _BY_ROUND_TRIPS = 1e13, 0.9


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
        shortest, sent = _LEAST_TRIPS * self.latency, 8 * ON_THE_CABLE * link_bytes("all_gather", 1, self.ranks)
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
