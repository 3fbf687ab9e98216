"""The cost model: seconds of one training step, from what a method computes and sends, and what the network takes.

    step = compute · straggler + update, select, encode, decode + communication that nothing hides

A method that exchanges at the step waits for all its collectives, one after another. DDP's buckets are on the wire
while the backward pass goes on, so only what is left at its end is waited for. Between exchanges the network is idle
while ranks compute, and over a high-latency link TCP's window becomes smaller, of which DDP's sums need little. Each
rank is taken to have processor cores of its own.
"""

import math
from dataclasses import dataclass
from typing import Literal

from lightning_sparsecomm.planning.links import Link
from lightning_sparsecomm.planning.rehearsed import Rehearsed

Bound = Literal["compute", "network", "coding"]


@dataclass(frozen=True)
class Work:
    """What a rank computes in a step without any exchange.

    >>> round(Work(0.3).backward, 2)  # seconds that DDP's sums can hide behind
    0.2

    Args:
        seconds: Forward pass, backward pass and optimizer; 0 where it is not known, and TCP's window counts as closed.
        overlapped: Seconds of the backward pass that are left when DDP's first bucket is ready; None for what is usual:
            the backward pass takes two thirds of the time, and its first bucket comes early.
        straggler: Factor by which the slowest rank is slower; 1 for equal ranks.
    """

    seconds: float
    overlapped: float | None = None
    straggler: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.seconds < math.inf:
            raise ValueError(f"compute must be 0 or more seconds; got {self.seconds!r}. Use 0.3 for 300 ms.")
        if not 1 <= self.straggler < math.inf:
            raise ValueError(f"straggler must be at least 1, and finite; got {self.straggler!r}. Use 1 for none.")

    @property
    def backward(self) -> float:
        """Seconds that DDP's buckets can hide behind."""
        return self.seconds * 2 / 3 if self.overlapped is None else self.overlapped


@dataclass(frozen=True)
class Predicted:
    """One step, in seconds.

    Attributes:
        name: The method.
        compute: Forward, backward, optimizer, on the slowest rank.
        coding: What the method computes: memories, selection, encoding, decoding.
        network: All that its collectives take.
        exposed: The part of it that the step waits for.
        link_bytes: Bytes that a rank puts on the link.
        held_bytes: Bytes that the method keeps in memory.
    """

    name: str
    compute: float
    coding: float
    network: float
    exposed: float
    link_bytes: float
    held_bytes: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute + self.coding + self.exposed

    @property
    def bound(self) -> Bound:
        """What takes most of the step."""
        parts: dict[Bound, float] = {"compute": self.compute, "network": self.exposed, "coding": self.coding}
        return max(parts, key=lambda part: parts[part])


def predict(rehearsed: Rehearsed, link: Link, work: Work) -> Predicted:
    """The step of a method.

    Args:
        rehearsed: What the method computes and sends, for the number of ranks in question.
        link: The network.
        work: What a rank computes besides.
    """
    ranks, compute = rehearsed.ranks, work.seconds * work.straggler
    if rehearsed.overlaps and rehearsed.calls:
        # Buckets follow one another without a gap; the last one is ready when the backward pass ends.
        sizes = [size for _, size, _ in rehearsed.calls]
        hiding = work.backward * work.straggler
        network = link.buckets_seconds(sizes, ranks, first=not compute)
        # An earlier bucket that is as large has opened TCP's window for the last one.
        first = not compute and sizes[-1] > max(sizes[:-1], default=0.0)
        last = link.seconds("all_reduce", sizes[-1], ranks, ring=True, idle=math.inf if first else 0.0)
        exposed = max(last, network - hiding)
    else:
        exposed = network = _one_after_another(rehearsed, link, (compute or math.inf) + rehearsed.computing)
    return Predicted(
        rehearsed.name,
        compute,
        rehearsed.computing,
        network,
        exposed,
        rehearsed.link_bytes,
        rehearsed.held_bytes,
    )


def _one_after_another(rehearsed: Rehearsed, link: Link, idle: float) -> float:
    """Seconds of all collectives of a step, in which the network is idle for so long before the first of them."""
    network = opening = 0.0
    for kind, size, often in rehearsed.calls:
        if often:
            at_once = link.seconds(kind, size, rehearsed.ranks, idle=0.0)
            network += often * at_once
            # TCP's window opens once in an exchange; its largest messages need it most. Exchanges of a kind are taken
            # to be equally far apart.
            after = link.seconds(kind, size, rehearsed.ranks, idle=idle / often)
            opening = max(opening, often * (after - at_once))
    return network + opening
