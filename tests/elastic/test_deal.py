"""Which samples replicas read, whoever comes and goes: replicas, loaders that fetch ahead, and rounds, simulated."""

from collections import Counter, deque
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lightning_sparsecomm import methods
from lightning_sparsecomm.elastic.deal import Deal, Need
from lightning_sparsecomm.elastic.members import NOTHING, Member, Offer, plan_of, successor
from lightning_sparsecomm.elastic.reader import Loading, Reader
from lightning_sparsecomm.elastic.readers import Readers
from lightning_sparsecomm.elastic.units import steps_until_exchange


class Loader:
    """Fetches ahead, as a DataLoader with workers does, and begins anew after each pass."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.iterator: Iterator[list[int]] | None = None
        self.fetched: deque[list[int]] = deque()
        # By pass as its replica counts them, how many batches it has read.
        self.lengths: Counter[int] = Counter()

    def read(self) -> list[int]:
        while True:
            if self.iterator is None:
                self.iterator = self.reader.batches(lambda position: position)
            while len(self.fetched) <= self.reader.loading.ahead and (batch := next(self.iterator, None)) is not None:
                self.fetched.append(batch)
            if not self.fetched:
                if self.reader.over:
                    self.reader.begin()
                self.iterator = None
                continue
            batch = self.fetched.popleft()
            if self.reader.deliver():
                self.lengths[self.reader.number] += 1
                return batch


class Run:
    """Replicas that share the weights; `counted` has the positions whose exchange counts."""

    def __init__(self, loading: Loading, steps: int, delay: int = 0) -> None:
        self.loading, self.steps, self.delay = loading, steps, delay
        self.deal = Deal(loading.size, 0)
        self.loaders: dict[str, Loader] = {}
        self.counted: Counter[int] = Counter()
        # What each replica has read since the last counted exchange.
        self.read: dict[str, list[int]] = {}
        self.began = 0

    def steps_of(self, name: str, steps: int) -> None:
        for _ in range(steps):
            self.read[name] += self.loaders[name].read()

    def new(self) -> Reader:
        self.began += 1
        return Reader(f"replica {self.began}", self.loading)

    def round(self, joining: list[Reader], away: list[str], counts: bool = True) -> None:
        """An exchange of all but those that are `away`, which have to join again; in flight if there is a `delay`."""
        # From this exchange to the end of the next one, which may be lost once in flight.
        expected = self.steps + 3 * self.delay
        exchanging = {name: each.reader.need(expected) for name, each in self.loaders.items() if name not in away}
        deal = self.deal.after(exchanging, {reader.name: reader.need(expected) for reader in joining})
        stated = {name: (self.loaders[name].reader.stated, len(self.read[name])) for name in exchanging}
        for name in exchanging:
            self.steps_of(name, self.delay)
        if not counts:
            return
        first = next((self.loaders[name].reader for name in exchanging), None)
        for name, (said, count) in stated.items():
            self.counted.update(self.read[name][:count])
            del self.read[name][:count]
            self.loaders[name].reader.adopt(deal, said)
        for reader in joining:
            reader.take(deal, 0 if first is None else first.state_dict()["number"])
            self.loaders[reader.name] = self.loaders.get(reader.name, Loader(reader))
            self.read[reader.name] = []
        self.deal = deal

    def lose(self, name: str) -> Reader:
        self.read.pop(name)
        return self.loaders.pop(name).reader


LOADINGS = st.builds(
    Loading,
    size=st.integers(7, 60),
    batch=st.integers(1, 7),
    drop_last=st.booleans(),
    ahead=st.integers(0, 4),
)
EVENTS = st.lists(
    st.tuples(st.sampled_from(["join", "lose", "away", "fail", "round"]), st.integers(0, 3), st.integers(0, 5)),
    max_size=14,
)


@settings(max_examples=50, deadline=None)
@given(LOADINGS, st.integers(1, 6), st.sampled_from([0, 0, 1, 3]), st.integers(1, 4), EVENTS)
def test_each_sample_of_a_pass_counts_once_whoever_comes_and_goes(
    loading: Loading, steps: int, delay: int, count: int, events: list[tuple[str, int, int]]
) -> None:
    run = Run(loading, steps, delay)
    run.round([run.new() for _ in range(count)], [])
    for kind, number, made in events:
        for name in run.loaders:
            # Some are slower than others.
            run.steps_of(name, min(steps, made + 1))
        name = sorted(run.loaders)[number % len(run.loaders)]
        if kind == "lose" and len(run.loaders) > 1:
            run.lose(name)
        if kind == "fail":
            run.round([], [], counts=False)
        if kind == "away" and len(run.loaders) > 1:
            # It has trained on, and finds itself behind.
            run.round([], [name])
            run.steps_of(name, made)
            loader = run.loaders[name]
            run.round([loader.reader], [name])
        run.round([run.new()] if kind == "join" else [], [])
        assert max(run.counted.values(), default=0) <= 1
    # Undisturbed from here on.
    last = run.deal.next // loading.size
    for _ in range(1000):
        if min(each.reader.number for each in run.loaders.values()) > last + 1:
            break
        for name in run.loaders:
            run.steps_of(name, steps)
        run.round([], [])
    # What was read in flight counts with the next exchange.
    run.round([], [])
    counted = {position for position in run.counted if position < (last + 1) * loading.size}
    assert max(run.counted.values()) == 1
    assert counted == set(range((last + 1) * loading.size))
    if "away" not in [kind for kind, *_ in events]:
        # One that is away trains on, and may use up what it holds.
        assert not any(each.reader.borrowed for each in run.loaders.values())


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(LOADINGS, st.integers(1, 3), st.integers(1, 3))
def test_passes_end_after_equally_many_batches_on_all(loading: Loading, steps: int, count: int) -> None:
    # What all hold between two exchanges must be less than a pass.
    assume(loading.size >= count * loading.batch * (steps + steps // 4 + 1 + loading.ahead))
    run = Run(loading, steps)
    run.round([run.new() for _ in range(count)], [])
    for _ in range(15):
        for name in run.loaders:
            run.steps_of(name, steps)
        run.round([], [])
    for number in range(min(each.reader.number for each in run.loaders.values())):
        ends = [sum(each.lengths[earlier] for earlier in range(number + 1)) for each in run.loaders.values()]
        assert max(ends) - min(ends) <= (2 if loading.drop_last else 1)


def test_a_deal_counts_once_its_exchange_does() -> None:
    """Until then it changes nothing, and is dropped if the exchange is taken back."""
    loading = Loading(100, 4)
    readers = {name: Reader(name, loading) for name in "ab"}
    samples = {name: Readers([reader], lambda: 2) for name, reader in readers.items()}

    def members(states: tuple[str, str], offer: Offer | None) -> list[Member]:
        return [
            Member(name, state, 1, NOTHING, 10, {}, offer, samples=each.needs())
            for (name, each), state in zip(samples.items(), states)
        ]

    first = members((NOTHING, NOTHING), None)
    plan = plan_of(first, 1)
    samples["a"].meet(plan, first, 0, 1)
    samples["b"].meet(plan, first, 1, 1)
    samples["b"].take(samples["a"].state_dict())
    assert readers["a"].deal == readers["b"].deal
    for reader in readers.values():
        Loader(reader).read()
    before = readers["a"].deal
    offer = Offer(0, [0], "weights", 9, 0.5, 100)
    for meeting in (2, 3):
        second = members((plan.state, plan.state), offer)
        next_plan = plan_of(second, meeting)
        for rank, each in enumerate(samples.values()):
            each.meet(next_plan, second, rank, meeting)
        # That of the first of the two meetings has not been committed.
        assert readers["a"].deal == readers["b"].deal == before
    samples["a"].settle(successor(plan.state, ["a", "b"], 2))
    assert readers["a"].deal == before
    samples["b"].settle(successor(plan.state, ["a", "b"], 3))
    assert readers["b"].deal != before
    assert [len(reader.need(2).read) for reader in readers.values()] == [1, 0]


@pytest.mark.parametrize(("delay", "steps"), [(0, 30), (5, 40)])
def test_what_is_dealt_lasts_though_an_exchange_is_lost_once_in_flight(delay: int, steps: int) -> None:
    """From where one starts to where the next one lands, and as long again as it flies."""
    registry = SimpleNamespace(methods=[methods.sparse_loco(every=30, delay=delay)], optimizers=[], steps=0)
    assert steps_until_exchange(SimpleNamespace(registry=registry, epoch=0.0, length=100)) == steps  # type: ignore[arg-type]


def test_a_saved_deal_has_what_its_replica_has_read() -> None:
    reader = Reader("a", Loading(20, 4))
    reader.take(Deal(20, 5).after({}, {"a": reader.need(2), "b": Need((), 4, 2)}), 0)
    read = Loader(reader).read()
    resumed = Deal.from_plain(reader.saved()["deal"])
    assert (resumed.seed, resumed.held) == (5, {})
    free = {position for span in resumed.back for position in range(*span)} | set(range(resumed.next, 20))
    assert free == set(range(20)) - set(read)


def test_a_replica_without_a_batch_of_a_pass_begins_with_the_next() -> None:
    loading = Loading(10, 4, drop_last=True)
    run = Run(loading, 5)
    readers = [run.new() for _ in range(3)]
    run.round(readers, [])
    assert sorted(reader.left() for reader in readers) == [0, 1, 1]
    for reader in readers:
        reader.skip_empty()
    assert sorted(reader.number for reader in readers) == [0, 0, 1]
    assert all(reader.left() for reader in readers)
