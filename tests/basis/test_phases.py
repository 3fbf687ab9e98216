"""Seconds of exchanges by phase, with a clock that the test sets."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lightning_sparsecomm.basis import PHASES, Clock, Ledger, phase
from lightning_sparsecomm.basis import phases as module


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def __call__(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(module, "time", time)
    return time


def test_each_second_counts_for_the_innermost_phase(passing: Time) -> None:
    clock = Clock()
    with clock.running():
        passing(1)
        with phase("encode"):
            passing(2)
            with phase("select"):
                passing(4)
            passing(8)
        passing(16)
        with phase("wait"):
            passing(32)
    passing(64)
    assert clock.seconds == {"update": 17, "select": 4, "encode": 10, "wait": 32, "decode": 0}
    assert tuple(clock.seconds) == PHASES


def test_outside_of_an_exchange_nothing_counts(passing: Time) -> None:
    clock = Clock()
    with phase("wait"):
        passing(1)
    with clock.running():
        pass
    with phase("decode"):
        passing(1)
    assert sum(clock.seconds.values()) == 0


def test_after_an_error_the_clock_goes_on(passing: Time) -> None:
    clock = Clock()

    def broken() -> None:
        with clock.running(), phase("decode"):
            passing(1)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        broken()
    passing(2)
    with clock.running():
        passing(4)
    assert (clock.seconds["decode"], clock.seconds["update"]) == (1, 4)


def test_exchanges_have_clocks_of_their_own(passing: Time) -> None:
    first, second = Clock(), Clock()
    with first.running(), second.running(), phase("wait"):
        passing(1)
    with first.running(), phase("wait"):
        passing(2)
    assert (first.seconds["wait"], second.seconds["wait"]) == (2, 1)


def test_a_profiler_sees_the_phases() -> None:
    clock, seen = Clock(), list[str]()

    @contextmanager
    def profile(name: str) -> Iterator[None]:
        seen.append(f"<{name}")
        yield
        seen.append(f"{name}>")

    clock.profile = profile
    # Profilers refuse an action that is running already: the second `encode` is part of the first.
    with clock.running(), clock.running(), phase("encode"), phase("encode"), phase("select"):
        pass
    assert seen == ["<exchange", "<encode", "<select", "select>", "encode>", "exchange>"]


def test_seconds_of_version_0_1_are_kept() -> None:
    ledger = Ledger(2)
    state = {**ledger.state_dict(), "exchange_seconds": 2.5}
    del state["seconds"]
    ledger.load_state_dict(state)
    assert ledger.exchange_seconds == 2.5
