"""Which samples each replica reads. Pure: from what all replicas say in a meeting, all come to the same deal."""

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Span = tuple[int, int]
"""Positions in the order of samples: the first one, and the first one after. It lies within one pass over the data."""


class Need(NamedTuple):
    """What a replica says of its samples of one dataloader.

    Attributes:
        read: What it has read since the last counted exchange.
        batch: Samples of a batch.
        batches: How many batches it wants to hold until the next exchange.
    """

    read: Sequence[Span]
    batch: int
    batches: int

    @classmethod
    def of(cls, fields: Sequence[Any]) -> "Need":
        """From what JSON has made of one."""
        read, batch, batches = fields
        return cls(tuple((begin, end) for begin, end in read), batch, batches)


class Deal(NamedTuple):
    """Who holds which samples of a dataloader; equal on all replicas that share the weights.

    Samples have positions in an endless order: one shuffled pass over the data after another. Position `p` is in pass
    `p // size`. What is neither free nor held has been read, and counts.

    Attributes:
        size: Samples of a pass.
        seed: Of the order.
        next: The first position that nobody has held yet.
        back: Positions that those who held them have not read, and that others are to read; sorted.
        held: By the name of a replica, what it has got to read, and has not read by the last counted exchange.
    """

    size: int
    seed: int
    next: int = 0
    back: tuple[Span, ...] = ()
    held: dict[str, tuple[Span, ...]] = {}  # noqa: RUF012

    def after(self, exchanging: Mapping[str, Need], joining: Mapping[str, Need]) -> "Deal":
        """The deal once an exchange counts.

        What the exchanging replicas have read stays read. What others held goes back, as they are gone, or join anew.
        Then each replica gets the samples that it wants, first those that have come back. At the end of a pass, what is
        left is divided in proportion to what replicas want, to within one batch each.

        Args:
            exchanging: By name, the needs of those that exchange.
            joining: Those of replicas that get the weights then, and hold nothing yet.
        """
        held = {name: list(without(self.held.get(name, ()), need.read)) for name, need in exchanging.items()}
        gone = [span for name, spans in self.held.items() if name not in exchanging for span in spans]
        free = deque(merged([*self.back, *gone], self.size))
        held |= {name: [] for name in joining}
        needs = {**exchanging, **joining}
        counts = {name: count_of(spans) for name, spans in held.items()}
        position = self.next
        while any(counts[name] <= need.batch * (need.batches - 1) for name, need in needs.items()):
            if free:
                begin, end = free.popleft()
            else:
                begin, end = position, (position // self.size + 1) * self.size
                position = end
            for name, count in _shares(end - begin, needs, counts).items():
                held[name].append((begin, begin + count))
                counts[name] += count
                begin += count
            if begin < end and end == position:
                position = begin
            elif begin < end:
                free.appendleft((begin, end))
        return self._replace(
            next=position, back=tuple(free), held={name: merged(spans, self.size) for name, spans in held.items()}
        )

    def resumed(self, own: str, read: Iterable[Span]) -> "Deal":
        """The deal from which a run goes on that resumes: nobody holds anything, and `own` has `read` these."""
        held = {name: without(spans, read) if name == own else spans for name, spans in self.held.items()}
        return self._replace(held=held).after({}, {})

    def exhausted(self, number: int) -> bool:
        """Whether all samples of a pass have been dealt out, but for those that have come back."""
        return self.next >= (number + 1) * self.size

    def to_plain(self) -> dict[str, Any]:
        """As numbers, strings, lists and dictionaries."""
        held = {name: list(spans) for name, spans in self.held.items()}
        return {**self._asdict(), "back": list(self.back), "held": held}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "Deal":
        """Inverse of `to_plain`."""
        held = {name: _spans(spans) for name, spans in plain["held"].items()}
        return cls(plain["size"], plain["seed"], plain["next"], _spans(plain["back"]), held)


def _shares(available: int, needs: Mapping[str, Need], counts: Mapping[str, int]) -> dict[str, int]:
    """How many of the available samples each replica gets: batch by batch, to the one with least of what it wants."""
    batches = {name: -(-counts[name] // need.batch) for name, need in needs.items()}
    queue = [(batches[name] / need.batches, name) for name, need in needs.items() if batches[name] < need.batches]
    heapq.heapify(queue)
    shares: dict[str, int] = {}
    while available and queue:
        _, name = heapq.heappop(queue)
        need = needs[name]
        count = min(available, need.batch)
        shares[name] = shares.get(name, 0) + count
        available -= count
        batches[name] += 1
        if batches[name] < need.batches:
            heapq.heappush(queue, (batches[name] / need.batches, name))
    return dict(sorted(shares.items()))


def count_of(spans: Iterable[Span]) -> int:
    """How many positions they hold.

    >>> count_of([(0, 4), (6, 7)])
    5
    """
    return sum(end - begin for begin, end in spans)


def merged(spans: Iterable[Span], size: int) -> tuple[Span, ...]:
    """The same positions, sorted, as few spans as may be; each within a pass of `size`.

    >>> merged([(6, 8), (0, 4), (4, 6), (8, 9)], size=8)
    ((0, 8), (8, 9))
    """
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and found[-1][1] == begin and begin % size:
            found[-1] = (found[-1][0], end)
        elif begin < end:
            found.append((begin, end))
    return tuple(found)


def without(spans: Iterable[Span], others: Iterable[Span]) -> tuple[Span, ...]:
    """The positions that are in `spans`, and not in `others`.

    >>> without([(0, 8)], [(2, 3), (7, 9)])
    ((0, 2), (3, 7))
    """
    rest = list(spans)
    for begin, end in others:
        rest = [
            part
            for first, last in rest
            for part in ((first, min(last, begin)), (max(first, end), last))
            if part[0] < part[1]
        ]
    return tuple(rest)


def _spans(plain: Iterable[Sequence[int]]) -> tuple[Span, ...]:
    return tuple((begin, end) for begin, end in plain)
