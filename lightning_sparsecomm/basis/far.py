"""Collectives over high-latency links: messages go straight to whoever needs them, so that few round trips pass.

Gloo passes messages around a ring. Each of its hops takes a whole round trip, since a rank first has to say that it is
ready to receive: W − 1 of them in a gather, 2 (W − 1) in a sum. In an all-to-all, every rank sends to every other one
at once, in a single round trip.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_sparsecomm.basis.groups import round_trip
from lightning_sparsecomm.basis.ledger import SETUP, Collective, link_bytes
from lightning_sparsecomm.basis.wire import Wire

FAR_SECONDS = 4e-3
"""A round trip from which on a link is far. Those of a local network take a tenth of that."""

# Messages that compete for the receivers' cables take up to half as long again as in a ring. What that costs depends on
# the rate, in bytes per second, which is not known; a faster link gains less than it could.
_COMPETING, _RATE = 1.5, 5e6

# Over a short way: what a call takes besides its bytes, in seconds, and a rate between 100 Mbit/s and 1 Gbit/s.
_NEAR_CALL, _NEAR_RATE = 5e-4, 4e7


def far_of(round_trip: float) -> float:
    """How far a link is: its round trip to a power of two, in seconds; 0 where that is less than 4 ms.

    >>> far_of(0.02), far_of(0.001)
    (0.016, 0.0)
    """
    return FAR_SECONDS * 2.0 ** round(math.log2(round_trip / FAR_SECONDS)) if round_trip >= FAR_SECONDS else 0.0


def call_seconds(collective: Collective, handed_bytes: float, world_size: int, far: float) -> float:
    """About what a call takes, for choosing between ways: rates are not known, and are taken to be usual ones.

    >>> [round(1000 * call_seconds("all_gather", size, 4, far=0.0), 1) for size in (0, 1_000_000)]
    [0.5, 75.5]
    >>> [round(1000 * call_seconds("all_gather", size, 4, far=0.128)) for size in (0, 1_000_000)]
    [128, 984]

    Args:
        collective: Which one.
        handed_bytes: Bytes that each rank hands over.
        world_size: Number of ranks.
        far: As from `far_of`.
    """
    if not far:
        return _NEAR_CALL + link_bytes(collective, handed_bytes, world_size) / _NEAR_RATE
    ways = _straight_ways(collective, handed_bytes, world_size)
    return min(
        _ring_seconds(collective, handed_bytes, world_size, far), *(_seconds(way, world_size, far) for way in ways)
    )


def straight(
    collective: Collective, handed_bytes: float, world_size: int, far: float
) -> list[tuple[Collective, float]]:
    """The calls that a far wire makes for a collective, of one round trip each, and the bytes handed over in each.

    Empty where the collective goes around the ring: over a short way, or where bytes take longer than round trips.

    >>> straight("all_reduce", 1000, 4, far=0.128), straight("all_reduce", 1_000_000, 4, far=0.128)
    ([('all_gather', 1000)], [('all_to_all', 1000000), ('all_gather', 250000.0)])
    >>> straight("all_reduce", 100_000_000, 4, far=0.128)
    []

    Args:
        collective: Which one.
        handed_bytes: Bytes that each rank hands over.
        world_size: Number of ranks.
        far: As from `far_of`.
    """
    best: list[tuple[Collective, float]] = []
    if not far or collective == "send":
        return best
    least = _ring_seconds(collective, handed_bytes, world_size, far)
    for calls in _straight_ways(collective, handed_bytes, world_size):
        taken = _seconds(calls, world_size, far)
        if taken < least:
            best, least = calls, taken
    return best


def _straight_ways(
    collective: Collective, handed_bytes: float, world_size: int
) -> list[list[tuple[Collective, float]]]:
    ways: dict[str, list[list[tuple[Collective, float]]]] = {
        "all_to_all": [[("all_to_all", handed_bytes)]],
        "send": [[("send", handed_bytes)]],
        "all_gather": [[("all_gather", handed_bytes)]],
        "all_reduce": [
            [("all_gather", handed_bytes)],
            [("all_to_all", handed_bytes), ("all_gather", handed_bytes / world_size)],
        ],
    }
    return ways.get(collective, [])


def _ring_seconds(collective: Collective, handed_bytes: float, world_size: int, far: float) -> float:
    straight_only = {"all_to_all": math.inf, "send": math.inf}
    hops = {"all_reduce": 2 * (world_size - 1), **straight_only}.get(collective, world_size - 1)
    return hops * far + link_bytes(collective, handed_bytes, world_size) / _RATE


def _seconds(calls: list[tuple[Collective, float]], world_size: int, far: float) -> float:
    competing = _COMPETING if world_size > 2 else 1.0
    return sum(far + competing * link_bytes(*call, world_size) / _RATE for call in calls)


class FarWire(Wire):
    """A wire that sends straight where the way is long. Sums are in rank order then, on all ranks to the same bits.

    Attributes:
        round_trip: Seconds to the host of rank 0 and back, of the rank for which it is longest; 0 if unknown.
    """

    round_trip: float = 0.0

    @classmethod
    def apart(cls) -> "FarWire":
        """As `Wire.apart`; it measures the round trip, and sets `far`."""
        wire = super().apart()
        assert isinstance(wire, FarWire)
        if wire.world_size > 1 and wire.backend == "gloo":
            mine = torch.tensor([round_trip(FAR_SECONDS)], dtype=torch.float64)
            wire.round_trip = float(wire.all_gather(mine, SETUP).max())
            wire.far = far_of(wire.round_trip)
        return wire

    def resume(self, far: float) -> None:
        """Goes on as a run did that was saved, unless the link has become another one: so its bits are the same."""
        if far / 2 < self.round_trip < far * 2 or (not far and self.round_trip < FAR_SECONDS * 2):
            self.far = far

    def all_gather(self, tensor: Tensor, row: str | None = None) -> Tensor:
        if not straight("all_gather", tensor.nbytes, self.world_size, self.far):
            return super().all_gather(tensor, row)
        return _Gather(self, tensor, row).wait()

    def all_reduce_(self, tensor: Tensor, row: str | None = None) -> Tensor:
        if not straight("all_reduce", tensor.nbytes, self.world_size, self.far):
            return super().all_reduce_(tensor, row)
        self.all_reduce_later_(tensor, row)()
        return tensor

    def all_reduce_later_(self, tensor: Tensor, row: str | None = None) -> Callable[[], None]:
        """As of any wire; but all ranks must wait, and in the same order, as a second call may start in the wait."""
        if not straight("all_reduce", tensor.nbytes, self.world_size, self.far):
            return super().all_reduce_later_(tensor, row)
        return _Reduction(self, tensor, row, Tensor.add_).wait

    def all_reduce_or_(self, tensor: Tensor, row: str | None = None) -> Tensor:
        if not straight("all_reduce", tensor.nbytes, self.world_size, self.far):
            return super().all_reduce_or_(tensor, row)
        _Reduction(self, tensor, row, Tensor.bitwise_or_).wait()
        return tensor


class _Gather:
    """A gather of one round trip, under way from the start."""

    def __init__(self, wire: FarWire, tensor: Tensor, row: str | None) -> None:
        self._shape, self._dtype = tensor.shape, tensor.dtype
        self._waiting = wire.calling("all_gather", tensor.nbytes, row)
        with self._waiting:
            rows = tensor.detach().reshape(1, -1).expand(wire.world_size, -1).contiguous()
            # As bytes: not every version of torch exchanges every dtype so.
            self._received, self._work = wire.start_all_to_all(rows.view(torch.uint8))

    def wait(self) -> Tensor:
        """`[W, *shape]`."""
        with self._waiting:
            self._work.wait()
        return self._received.view(-1).view(self._dtype).view(len(self._received), *self._shape)


class _Pieces:
    """An all-to-all of a tensor's pieces, under way from the start: each rank gets all ranks' versions of one."""

    def __init__(self, wire: FarWire, tensor: Tensor, row: str | None) -> None:
        self._length, self._dtype = -(-tensor.numel() // wire.world_size), tensor.dtype
        rows = tensor.new_zeros(wire.world_size, self._length)
        rows.view(-1)[: tensor.numel()] = tensor.detach().reshape(-1)
        self._waiting = wire.calling("all_to_all", rows.nbytes, row)
        with self._waiting:
            self._received, self._work = wire.start_all_to_all(rows.view(torch.uint8))

    def wait(self) -> Tensor:
        """`[W, length]`."""
        with self._waiting:
            self._work.wait()
        return self._received.view(-1).view(self._dtype).view(len(self._received), self._length)


class _Reduction:
    """A sum, or the like, of one round trip or two; the first is under way from the start."""

    def __init__(
        self, wire: FarWire, tensor: Tensor, row: str | None, add_: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        self._wire, self._tensor, self._row, self._add_ = wire, tensor, row, add_
        self._whole = len(straight("all_reduce", tensor.nbytes, wire.world_size, wire.far)) == 1
        self._first = _Gather(wire, tensor, row) if self._whole else _Pieces(wire, tensor, row)

    def wait(self) -> None:
        """Writes the result into the tensor."""
        versions = self._first.wait()
        total = versions[0]
        for version in versions[1:]:
            self._add_(total, version)
        if not self._whole:
            total = _Gather(self._wire, total, self._row).wait().view(-1)[: self._tensor.numel()]
        self._tensor.detach().copy_(total.view(self._tensor.shape))
