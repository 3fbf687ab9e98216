"""Measures the link between each two ranks, and names those that are slow."""

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from lightning_sparsecomm.basis.launched import ping
from lightning_sparsecomm.basis.ledger import PROBING
from lightning_sparsecomm.basis.wire import Wire

# A small message goes and comes so often; of a large one, twice, the rate counts.
_ROUND_TRIPS, _LARGE_BYTES = 10, 2**20

# A link is slow if it takes so many times the median's time, for a small message or for a byte.
_SLOW = 2.0


@dataclass(frozen=True)
class Pair:
    """The link between two ranks.

    Attributes:
        ranks: The two, the lower one first.
        rtt: Seconds that a message of 8 bytes takes to go and to come back.
        bandwidth: Bits per second of a message of 1 MiB, one way at a time.
    """

    ranks: tuple[int, int]
    rtt: float
    bandwidth: float


def measure_pairs(wire: Wire) -> list[Pair]:
    """The link between each two ranks, several pairs at a time, each rank in one of them. A collective."""
    found: list[list[float]] = []
    for pairs in pairings(wire.world_size):
        peers = {a: b for pair in pairs for a, b in itertools.permutations(pair)}
        mine = [0.0, 0.0]
        if wire.rank in peers and pairs:
            mine = _measured(wire, peers[wire.rank])
        found += wire.all_gather(torch.tensor(mine, dtype=torch.float64), PROBING).tolist()
    times = iter(found)
    result = []
    for pairs in pairings(wire.world_size):
        of_rank = [next(times) for _ in range(wire.world_size)]
        for a, b in pairs:
            rtt, large = (max(of_rank[a][i], of_rank[b][i]) for i in range(2))
            result.append(Pair((a, b), rtt, 16 * _LARGE_BYTES / max(large - rtt, large / 2)))
    return sorted(result, key=lambda pair: pair.ranks)


def slow_links(pairs: Sequence[Pair]) -> list[Pair]:
    """The links that are far slower than the median of all, and those of ranks whose links are far slower than others'.

    None where there are fewer than three. So one slow rank is found among three, of whose links most are slow.
    """
    if len(pairs) < 3:
        return []
    all_links = _Median.of(pairs)
    found = {pair for pair in pairs if all_links.far_below(pair)}
    for rank in {rank for pair in pairs for rank in pair.ranks}:
        own = [pair for pair in pairs if rank in pair.ranks]
        others = _Median.of([pair for pair in pairs if rank not in pair.ranks])
        median = _Median.of(own)
        if others.far_below(Pair((rank, rank), median.rtt, median.bandwidth)):
            found |= {pair for pair in own if others.far_below(pair)}
    return [pair for pair in pairs if pair in found]


@dataclass(frozen=True)
class _Median:
    rtt: float
    bandwidth: float

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> "_Median":
        return cls(*(statistics.median(getattr(pair, name) for pair in pairs) for name in ("rtt", "bandwidth")))

    def far_below(self, pair: Pair) -> bool:
        """Whether a link is far slower than this."""
        # Of short round trips, the processor's part is large, and uneven.
        return pair.rtt > _SLOW * self.rtt + 5e-4 or pair.bandwidth < self.bandwidth / _SLOW


def pairings(ranks: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs of ranks, in rounds in which no rank is in two of them: the circle method of tournaments.

    >>> list(pairings(4))
    [[(0, 3), (1, 2)], [(2, 3), (0, 1)], [(1, 3), (0, 2)]]
    """
    places = list(range(ranks + ranks % 2))
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = [(min(pair), max(pair)) for pair in zip(places[:half], reversed(places[half:]))]
        yield [pair for pair in pairs if pair[1] < ranks]
        places = [places[-2], *places[:-2], places[-1]]


def _measured(wire: Wire, peer: int) -> list[float]:
    small, large = torch.zeros(2), torch.zeros(_LARGE_BYTES // 4)
    times = []
    for _ in range(_ROUND_TRIPS):
        begin = time.perf_counter()
        ping(wire, peer, small)
        times.append(time.perf_counter() - begin)
    ping(wire, peer, large)
    begin = time.perf_counter()
    ping(wire, peer, large)
    return [statistics.median(times), time.perf_counter() - begin]
