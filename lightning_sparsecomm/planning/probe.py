"""Measures what collectives take between these very ranks."""

import itertools
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_sparsecomm.basis.ledger import PROBING, Collective
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.planning.measured_link import OPENING_TRIPS, MeasuredLink

# Bytes handed over; the larger ones tell the rate, and are left out on a link where they would take too long. Of fewer
# than the smallest, Gloo's ring makes fewer messages, and saves round trips.
_SMALLEST = 256
_SIZES = (_SMALLEST, 16 * 2**10, 128 * 2**10, 2**20, 8 * 2**20)
_FAR_SIZES = (128 * 2**10, 2 * 2**20, 8 * 2**20)
# Over a high-latency link, in round trips: how long measuring may take.
_ROUND_TRIPS = 60
_REPETITIONS = 3

# Where the smallest sum and gather take longer than this together, other sizes are measured once.
_SLOW_SECONDS = 0.03

_KINDS: tuple[Collective, ...] = "all_reduce", "all_gather"


def measure_link(wire: Wire, seconds: float = 1.0, device: torch.device | None = None) -> MeasuredLink:
    """Sums and gathers of growing size, as long as time allows. A collective; the result is equal on all ranks.

    A gather hands each byte to all others, so it is measured with as many bytes on the link as the sum. Over a
    high-latency link, where sums are made of gathers, only gathers grow.

    Args:
        wire: Between which ranks.
        seconds: About how long it may take; up to four times as long over a high-latency link, or sixty round trips, as
            small sizes tell no rate there. Two sizes are measured in any case.
        device: Where tensors are; the CPU by default.
    """
    measuring = _Measuring(wire, device)
    # Ranks come here one after another: the first call waits for the last of them.
    agreed(wire, [0.0], device)
    if wire.far:
        return _measure_far(measuring, seconds)
    slow = measuring.take(_SMALLEST, 1) > _SLOW_SECONDS
    repetitions = 1 if slow else _REPETITIONS
    if not slow:
        measuring.forget()
        measuring.take(_SMALLEST, repetitions)
    for size, larger in itertools.zip_longest(_SIZES[1:], _SIZES[2:]):
        taken = measuring.take(size, repetitions)
        # As if only bytes counted. Ranks also have to agree on what it took.
        if larger is None or measuring.spent + taken * larger / size + measuring.smallest > seconds:
            break
        repetitions = _REPETITIONS if taken * larger / size < seconds / 10 else 1
    return measuring.link()


def _measure_far(measuring: "_Measuring", seconds: float) -> MeasuredLink:
    """Gathers that grow until they fill the link."""
    measuring.take(_SMALLEST, 1)
    around, gathers = measuring.take_around(), _KINDS[1:]
    latency = measuring.link(around).latency
    least = measuring.points["all_gather"][0][1]
    for size, larger in itertools.zip_longest(_FAR_SIZES, _FAR_SIZES[1:]):
        taken = measuring.take(size, 1, gathers)
        if taken < OPENING_TRIPS * latency:
            # That opened TCP's window. Other messages find it open.
            measuring.points["all_gather"].pop()
            taken = measuring.take(size, _REPETITIONS - 1, gathers)
        link = measuring.link(around)
        if larger is None:
            break
        bound = _REPETITIONS * (least + (taken - least) * larger / size + latency)
        until = seconds if link.rate_is_known else max(4 * seconds, _ROUND_TRIPS * latency)
        if measuring.spent + bound + measuring.smallest > until:
            break
    return link


class _Measuring:
    """Collectives that are being measured.

    Attributes:
        points: For each kind, bytes handed over and seconds, equal on all ranks.
        spent: Seconds until the last one ended, equal on all ranks.
    """

    def __init__(self, wire: Wire, device: torch.device | None) -> None:
        self.points: dict[Collective, list[tuple[float, float]]] = {kind: [] for kind in _KINDS}
        self.spent = 0.0
        self._wire, self._device = wire, device
        self._begin = time.perf_counter()
        self._calls: dict[Collective, Callable[[Tensor], object]] = {
            "all_reduce": lambda tensor: wire.all_reduce_(tensor, PROBING),
            "all_gather": lambda tensor: wire.all_gather(tensor, PROBING),
        }

    @property
    def smallest(self) -> float:
        """Seconds of the smallest sum and gather, together."""
        return sum(seconds for (_, seconds), *_ in self.points.values())

    def forget(self) -> None:
        """Measures anew from the smallest size on."""
        for kind in self.points:
            self.points[kind].clear()

    def take(self, size: int, repetitions: int, kinds: Sequence[Collective] = _KINDS) -> float:
        """Enters what each kind takes with so many bytes; the seconds of all, equal on all ranks. A collective."""
        ranks = self._wire.world_size
        elements = {kind: max(2, (2 * size // ranks if kind == "all_gather" else size) // 4) for kind in kinds}
        fastest = [self._fastest(kind, elements[kind], repetitions) for kind in kinds]
        *fastest, self.spent = agreed(self._wire, [*fastest, time.perf_counter() - self._begin], self._device)
        for kind, seconds in zip(kinds, fastest):
            self.points[kind].append((4.0 * elements[kind], seconds))
        return sum(fastest)

    def take_around(self) -> float:
        """Seconds of the smallest sum around the ring, as DDP makes it, equal on all ranks. A collective."""
        begin = time.perf_counter()
        waiting, work = self._wire.start_sum(torch.ones(_SMALLEST // 4), PROBING)
        with waiting:
            work.wait()
        return agreed(self._wire, [time.perf_counter() - begin], self._device)[0]

    def link(self, around: float | None = None) -> MeasuredLink:
        """The link by what was measured so far."""
        return MeasuredLink(self._wire.world_size, {kind: [*each] for kind, each in self.points.items()}, around)

    def _fastest(self, kind: Collective, elements: int, repetitions: int) -> float:
        tensor, taken = torch.ones(elements, device=self._device), []
        for _ in range(repetitions):
            since = time.perf_counter()
            self._calls[kind](tensor.clone())
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)
            taken.append(time.perf_counter() - since)
        return min(taken)


def agreed(wire: Wire, numbers: list[float], device: torch.device | None = None) -> list[float]:
    """The largest of each number over ranks. A collective; as many numbers on all ranks."""
    mine = torch.tensor(numbers, dtype=torch.float64, device=device)
    largest: list[float] = wire.all_gather(mine, PROBING).max(0).values.tolist()
    return largest
