"""Measures what collectives take between these very ranks."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_sparsecomm.basis.ledger import PROBING, Collective
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.planning.links import MeasuredLink

# Bytes handed over; the largest tell the rate, and are left out on a link where they would take too long.
_SIZES = (8, 16 * 2**10, 128 * 2**10, 2**20, 8 * 2**20)
_REPETITIONS = 3

# Over a long way, the smallest of both takes longer than this together.
_FAR_SECONDS = 0.03


def measure_link(wire: Wire, seconds: float = 1.0, device: torch.device | None = None) -> MeasuredLink:
    """Sums and gathers of growing size, as long as time allows. A collective; the result is equal on all ranks.

    A gather hands each byte to all others, so it is measured with as many bytes on the link as the sum.

    Args:
        wire: Between which ranks.
        seconds: About how long it may take; up to four times as long over a long way, where small sizes tell no rate.
            Two sizes are measured in any case.
        device: Where tensors are; the CPU by default.
    """
    kinds: dict[Collective, Callable[[Tensor], object]] = {
        "all_reduce": lambda tensor: wire.all_reduce_(tensor, PROBING),
        "all_gather": lambda tensor: wire.all_gather(tensor, PROBING),
    }
    begin = time.perf_counter()
    points: dict[Collective, list[tuple[float, float]]] = {kind: [] for kind in kinds}

    def measure(size: int, repetitions: int) -> float:
        """Enters what each kind takes with so many bytes; the seconds of both, equal on all ranks."""
        for kind, collective in kinds.items():
            elements = max(2, (2 * size // wire.world_size if kind == "all_gather" else size) // 4)
            tensor = torch.ones(elements, device=device)
            taken = []
            for _ in range(repetitions):
                since = time.perf_counter()
                collective(tensor.clone())
                if tensor.is_cuda:
                    torch.cuda.synchronize(tensor.device)
                taken.append(time.perf_counter() - since)
            points[kind].append((4.0 * elements, min(taken)))
        return sum(agreed(wire, [several[-1][1] for several in points.values()], device))

    # Ranks come here one after another: the first call waits for the last of them.
    agreed(wire, [0.0], device)
    smallest = measure(_SIZES[0], 1)
    far = smallest > _FAR_SECONDS
    if not far:
        for kind in kinds:
            points[kind].clear()
        smallest = measure(_SIZES[0], _REPETITIONS)
    # Over a long way, sizes that a window holds tell nothing about the rate.
    sizes = _SIZES[2:] if far else _SIZES[1:]
    repetitions = 1 if far else _REPETITIONS
    for size, larger in zip(sizes, (*sizes[1:], None)):
        slowest = measure(size, repetitions)
        spent = agreed(wire, [time.perf_counter() - begin], device)[0]
        if larger is None:
            break
        # As if only bytes counted, beyond what the smallest size takes over a long way.
        next_slowest = slowest * larger / size
        if far:
            next_slowest = smallest + (slowest - smallest) * larger / size
        # Ranks also have to agree on what it took.
        if next_slowest + smallest > (4 * seconds if far else seconds) - spent:
            break
        repetitions = _REPETITIONS if next_slowest < seconds / 10 else 1
    flat = [time for several in points.values() for _, time in several] + ([_around(wire)] if wire.far else [])
    times = iter(agreed(wire, flat, device))
    found = {kind: [(size, next(times)) for size, _ in several] for kind, several in points.items()}
    return MeasuredLink(wire.world_size, found, next(times, None))


def _around(wire: Wire) -> float:
    """Seconds of the smallest sum around the ring, as DDP makes it."""
    begin = time.perf_counter()
    waiting, work = wire.start_sum(torch.ones(2), PROBING)
    with waiting:
        work.wait()
    return time.perf_counter() - begin


def agreed(wire: Wire, numbers: list[float], device: torch.device | None = None) -> list[float]:
    """The largest of each number over ranks. A collective; as many numbers on all ranks."""
    mine = torch.tensor(numbers, dtype=torch.float64, device=device)
    largest: list[float] = wire.all_gather(mine, PROBING).max(0).values.tolist()
    return largest
