"""All shares of a turn are prepared, all exchange, and all commit, or none does."""

from typing import Any

import pytest

from lightning_sparsecomm.run.turn import take_turn
from lightning_sparsecomm.sharing import Share, Turn

TURN = Turn("gradients", step=3)


class Fake(Share):
    """Writes down what it is asked to do, and fails where it is told to."""

    def __init__(self, name: str, events: list[str], overlaps: bool = False, fails: str = "") -> None:
        self.name, self.events, self.fails = name, events, fails
        self._overlaps = overlaps

    @property
    def overlaps(self) -> bool:
        return self._overlaps

    def _note(self, event: str) -> None:
        self.events.append(f"{event} {self.name}")
        if event == self.fails:
            raise KeyError(self.name)

    def due(self, turn: Turn) -> bool:
        return True

    def prepare(self, turn: Turn) -> None:
        assert turn is TURN
        self._note("prepare")

    def exchange(self) -> None:
        self._note("exchange")

    def commit(self) -> None:
        self._note("commit")

    def abort(self) -> None:
        self._note("abort")

    def residual_norm(self) -> float:
        return 0.0

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, saved: Any) -> None: ...


def taken(*shares: tuple[str, bool, str]) -> list[str]:
    events: list[str] = []
    due = [Fake(name, events, overlaps, fails) for name, overlaps, fails in shares]
    if any(fails for _, _, fails in shares):
        with pytest.raises(KeyError):
            take_turn(due, TURN)
    else:
        take_turn(due, TURN)
    return events


def test_all_prepare_then_all_exchange_then_all_commit() -> None:
    assert taken(("a", False, ""), ("b", False, "")) == [
        "prepare a",
        "prepare b",
        "exchange a",
        "exchange b",
        "commit a",
        "commit b",
    ]


def test_what_overlaps_starts_first_and_is_waited_for_last() -> None:
    assert taken(("a", False, ""), ("b", True, ""), ("c", False, ""), ("d", True, "")) == [
        *(f"prepare {name}" for name in "bdac"),
        *(f"exchange {name}" for name in "acbd"),
        *(f"commit {name}" for name in "abcd"),
    ]


@pytest.mark.parametrize("fails", ["a", "b"])
def test_all_abort_where_one_cannot_prepare(fails: str) -> None:
    events = taken(*((name, False, "prepare" if name == fails else "") for name in "abc"))
    assert events == [f"prepare {name}" for name in "abc" if name <= fails] + ["abort c", "abort b", "abort a"]


@pytest.mark.parametrize("fails", ["a", "c"])
def test_none_commits_where_one_cannot_exchange(fails: str) -> None:
    events = taken(*((name, False, "exchange" if name == fails else "") for name in "abc"))
    exchanged = [f"exchange {name}" for name in "abc" if name <= fails]
    assert events == ["prepare a", "prepare b", "prepare c", *exchanged, "abort c", "abort b", "abort a"]


def test_an_interrupt_aborts_too() -> None:
    events: list[str] = []

    class Interrupted(Fake):
        def exchange(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take_turn([Fake("a", events), Interrupted("b", events)], TURN)
    assert events == ["prepare a", "prepare b", "exchange a", "abort b", "abort a"]


def test_a_turn_of_nobody_is_nothing() -> None:
    take_turn([], TURN)


def test_a_commit_that_is_interrupted_leaves_no_share_in_between() -> None:
    events = taken(("a", False, ""), ("b", False, "commit"), ("c", False, ""))
    assert events[-5:] == ["commit a", "commit b", "abort c", "abort b", "abort a"]
