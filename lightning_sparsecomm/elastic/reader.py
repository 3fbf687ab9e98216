"""One replica's samples of one dataloader: what it holds, what its loader has fetched, and what it has read."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from lightning_sparsecomm.elastic.deal import Deal, Need, Span, count_of, without

# Exchanges whose batches tell how many the next ones need.
_RECENT = 3


class Loading(NamedTuple):
    """How a dataloader reads.

    Attributes:
        size: Its samples.
        batch: Samples of a batch.
        drop_last: Whether all batches have as many.
        ahead: How many batches it asks for before it needs them.
        seed: Of the order of samples, if this replica begins the run.
    """

    size: int
    batch: int
    drop_last: bool = False
    ahead: int = 0
    seed: int = 0


class Stated(NamedTuple):
    """What a reader has told of itself in a meeting.

    Attributes:
        spans: How many spans of positions it has read.
        batches: How many batches.
    """

    spans: int
    batches: int


class _Fetched(NamedTuple):
    """A batch that the loader has asked for. Of another `period`, it is not this replica's any more."""

    period: int
    spans: tuple[Span, ...]
    borrowed: int


class Reader:
    """Hands out the samples that a replica holds, batch by batch, and knows which it has read.

    With `drop_last`, what is left of a pass and fills no batch is read in the next one.

    A loader asks for batches ahead of time, in the order in which it delivers them. What it has asked for still counts
    as held. If the replica has got the weights of others since, it holds other samples, and what was fetched before is
    dropped.

    One that needs more batches than it holds, as rounds have become longer, borrows: it reads samples at random, which
    others read too.

    Args:
        name: Of the replica.
        loading: Of the dataloader; may be replaced by another of the same size.

    Attributes:
        deal: What replicas share; None before this one has met any.
        number: The pass that it reads.
        borrowed: How many samples it has borrowed.
        fetched: Batches that were delivered in this iteration over the loader.
    """

    def __init__(self, name: str, loading: Loading) -> None:
        self.name, self.loading = name, loading
        self.deal: Deal | None = None
        self.number = self.borrowed = self.fetched = 0
        self._random = random.Random(name)
        # Samples delivered since they were last counted.
        self._delivered = 0
        self._queue: deque[Span] = deque()
        self._fetched: deque[_Fetched] = deque()
        self._read: list[Span] = []
        # Batches delivered since what the last counted exchange knows, and those that each such exchange has counted.
        self._batches = 0
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._period = 0
        # Whether the pass is over here.
        self._ended = False

    def begin(self) -> None:
        """An iteration over the loader begins: of the next pass, if that before was read to its end."""
        assert self.deal is not None
        back = [span for each in self._fetched if each.period == self._period for span in each.spans]
        self._queue.extendleft(reversed(back))
        self._fetched.clear()
        self.fetched = self._delivered = 0
        self._period += 1
        self.number += self._ended
        self._ended = False
        self.skip_empty()

    def skip_empty(self) -> None:
        """Goes to the first pass of which this replica has a batch, or will get one."""
        while self.over:
            self.number += 1

    def batches(self, index_of: Callable[[int], int]) -> Iterator[list[int]]:
        """The batches of an iteration, as indices; what a loader takes them from.

        Args:
            index_of: The index of the sample at a position.
        """
        assert self.deal is not None
        while not self.over:
            spans = self._take(self.loading.batch) if self._own() else ()
            missing = 0 if spans else self.loading.batch
            self._fetched.append(_Fetched(self._period, spans, missing))
            begin = self.number * self.loading.size
            lent = [begin + self._random.randrange(self.loading.size) for _ in range(missing)]
            yield [index_of(position) for position in (*(p for span in spans for p in range(*span)), *lent)]

    def deliver(self) -> bool:
        """The loader has delivered its next batch; whether this replica is to read it."""
        period, spans, borrowed = self._fetched.popleft()
        if period != self._period:
            return False
        self._read.extend(spans)
        self.borrowed += borrowed
        self._delivered += count_of(spans) + borrowed
        self._batches += 1
        self.fetched += 1
        self._ended = self.left() == 0
        return True

    def count_delivered(self) -> int:
        """How many samples were delivered in this iteration since the last call."""
        delivered, self._delivered = self._delivered, 0
        return delivered

    @property
    def over(self) -> bool:
        """Whether nothing of the pass is left to fetch, and nothing of it will come."""
        return self._own() == 0 and self._last()

    def left(self) -> int:
        """Batches of the pass that are still to be delivered; an estimate of 2 or more where not all is dealt out."""
        assert self.deal is not None
        fetched = sum(each.period == self._period for each in self._fetched)
        if self._last():
            return fetched + self._own()
        free = (self.number + 1) * self.loading.size - self.deal.next
        each = min(free, self.loading.size) // max(1, len(self.deal.held))
        return max(2, fetched + self._own() + -(-each // self.loading.batch))

    @property
    def batches_of_a_pass(self) -> int:
        """Batches of a pass for each replica, if as many take part as now."""
        assert self.deal is not None
        return -(-self.loading.size // (self.loading.batch * max(1, len(self.deal.held))))

    def need(self, expected: int) -> Need:
        """What this replica says in a meeting.

        Args:
            expected: How many batches it expects to read until the next exchange.
        """
        batches = max(expected, self._batches, *self._recent, 1)
        # One more stays when an exchange begins, so that the last batch of a pass is known as such.
        wanted = batches + batches // 4 + 1 + self.loading.ahead
        return Need(tuple(self._read), self.loading.batch, wanted)

    @property
    def stated(self) -> Stated:
        """What `need` tells of what was read."""
        return Stated(len(self._read), self._batches)

    def adopt(self, deal: Deal, stated: Stated) -> None:
        """An exchange counts in which this replica took part: what it had stated is read, and it gets more."""
        fetched = [span for each in self._fetched if each.period == self._period for span in each.spans]
        del self._read[: stated.spans]
        self._queue.extend(without(deal.held[self.name], [*fetched, *self._queue, *self._read]))
        self._recent.append(stated.batches)
        self._batches -= stated.batches
        self.deal = deal

    def take(self, deal: Deal, number: int) -> None:
        """This replica has got the weights of others. What it held and has read is theirs now.

        Args:
            deal: As they have dealt, with this one's part.
            number: The pass that they read.
        """
        self.deal = deal
        self._queue = deque(deal.held.get(self.name, ()))
        self._read.clear()
        self._batches, self._ended = 0, False
        self._period += 1
        first = self._next_pass()
        self.number = number if first is None else max(number, first)

    def state_dict(self) -> dict[str, Any]:
        """What another replica goes on from."""
        assert self.deal is not None
        return {"deal": self.deal.to_plain(), "number": self.number + self._ended}

    def saved(self) -> dict[str, Any]:
        """What a run that resumes goes on from: nobody holds anything, and what this replica has read counts."""
        assert self.deal is not None
        return {"deal": self.deal.resumed(self.name, self._read).to_plain(), "number": self.number + self._ended}

    def _next_pass(self) -> int | None:
        return self._queue[0][0] // self.loading.size if self._queue else None

    def _last(self) -> bool:
        """Whether this replica holds all of the pass that it will get, but for what comes back."""
        assert self.deal is not None
        beyond = any(begin // self.loading.size > self.number for begin, _ in self._queue)
        return beyond or self.deal.exhausted(self.number)

    def _own(self) -> int:
        """Batches of the pass that are held, and not fetched yet."""
        count = count_of(self._leading())
        return count // self.loading.batch if self.loading.drop_last else -(-count // self.loading.batch)

    def _leading(self) -> Iterator[Span]:
        """What is to be fetched of this pass, and of passes before it."""
        for span in self._queue:
            if span[0] // self.loading.size > self.number:
                return
            yield span

    def _take(self, count: int) -> tuple[Span, ...]:
        """The next positions of this pass, at most so many."""
        taken: list[Span] = []
        while count and next(self._leading(), None) is not None:
            begin, end = self._queue.popleft()
            cut = min(end, begin + count)
            taken.append((begin, cut))
            count -= cut - begin
            if cut < end:
                self._queue.appendleft((cut, end))
        return tuple(taken)
