"""What replicas do in a replay, from logs."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from lightning_sparsecomm.commands import replay as commands_replay
from lightning_sparsecomm.elastic.members import Offer
from lightning_sparsecomm.elastic.membership import Change
from lightning_sparsecomm.elastic.record import Ended, Entry, Landed, Met, Outcome, Record, read
from lightning_sparsecomm.elastic.script import Script, scripts_of


def met(replica: str, members: str, state: str, leads_to: str, outcome: Outcome = "counts", number: int = 1) -> Met:
    return Met(replica, number, tuple(members), state, int(state[1:]), leads_to, outcome)


def counts_of(scripts: list[Script]) -> dict[str, list[tuple[str, bool, str]]]:
    """For each replica: of each meeting the state, whether it counts, and the outcome."""
    return {
        script.replica: [(scene.met.state, scene.counts, scene.met.outcome) for scene in script.scenes]
        for script in scripts
    }


@pytest.mark.parametrize("broken_off", ['{"kind": "mee', '{"ki', "{", '{"kind": "meeting", "offer": [0, {"lr": 0.1}'])
def test_what_a_log_has_is_read_and_a_line_broken_off_is_not(tmp_path: Path, broken_off: str) -> None:
    path = tmp_path / "log.jsonl"
    record = Record(str(path))
    record.change(Change(0.0, 0, ("a",), ("a",), (), ""))
    offer = Offer(0, [0, 1], "weights", 4, 0.5, float("inf"), 5, 0.25, ({"lr": 0.1, "betas": [0.9, 0.95]},), 1)
    meeting = Met("a", 1, ("a", "b"), "s0", 0, "s1", "lost", (0.25, 0.0), 1, 0.5, offer)
    entries: list[Entry] = [meeting, Landed("a", "s1", 3, "counts", 1), Ended("a", 2, "ab")]
    record._write("meeting", meeting)
    record.landing(entries[1])  # type: ignore[arg-type]
    record.end(entries[2])  # type: ignore[arg-type]
    with path.open("a") as log:
        log.write(broken_off)
    assert read(path) == entries
    # The next process of that replica begins a line of its own.
    Record(str(path)).end(Ended("b", 2, "cd"))
    assert read(path) == [*entries, Ended("b", 2, "cd")]
    assert "" not in path.read_text().splitlines()
    script = Script("a", scripts_of([met("a", "a", "s0", "")])[0].scenes, [entries[1]], "ab", ["b"])  # type: ignore[list-item]
    assert Script.from_json(script.to_json()) == script


def test_a_log_may_go_through_a_pipe() -> None:
    reading, writing = os.pipe()
    record = Record(f"/dev/fd/{writing}")
    for round_ in (1, 2):
        record.end(Ended("a", round_, "ab"))
    os.close(writing)
    with os.fdopen(reading) as log:
        assert [json.loads(line)["round"] for line in log] == [1, 2]


@pytest.mark.parametrize(
    "text",
    [
        "no log\n",
        '{"kind": "meeting"}\n{"kind": "end"}\n',
        '[1]\n{"kind": "change"}\n',
        '{"kind": "end", "replica": 5, "round": 1, "weights": "ab"}\n',
        '{"kind": "end", "replica": "a", "round": "1", "weights": "ab"}\n',
    ],
)
def test_what_is_no_log_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    with pytest.raises(
        ValueError, match=r"LOG must be a file that membership_log has written; line 1 of '.*log\.jsonl'"
    ):
        read(path)
    path.write_bytes(b"\x80")
    for wrong in (path, tmp_path, tmp_path / "none"):
        with pytest.raises(ValueError, match=rf"LOG must be a file that membership_log has written; got '{wrong}'"):
            read(wrong)


def test_a_log_that_is_there_twice_is_refused() -> None:
    entries: list[Entry] = [met("a", "a", "s0", ""), met("a", "a", "s0", "")]
    with pytest.raises(ValueError, match="each log must be given once; of that of a, it has a meeting twice"):
        scripts_of(entries)
    with pytest.raises(ValueError, match="of that of b, it has a meeting of others"):
        scripts_of([met("b", "a", "s0", "")])


def test_an_exchange_counts_if_any_replica_has_built_on_it() -> None:
    entries: list[Entry] = [
        met("a", "ab", "s0", "s1", "in doubt"),
        met("b", "ab", "s0", "s1"),
        met("a", "ab", "s1", "s2", "lost", number=2),
        met("b", "ab", "s1", "s2", "in doubt", number=2),
        # b is killed; a goes on from before.
        met("a", "a", "s1", "s3", number=3),
    ]
    assert counts_of(scripts_of(entries)) == {
        "a": [("s0", True, "in doubt"), ("s1", False, "lost"), ("s1", True, "counts")],
        "b": [("s0", True, "counts"), ("s1", False, "in doubt")],
    }


def test_an_exchange_in_flight_counts_once_it_has_landed_anywhere() -> None:
    entries: list[Entry] = [
        met("a", "ab", "s0", "s1", "in flight"),
        Landed("a", "s1", 2, "counts"),
        met("a", "ab", "s1", "s2", "in flight"),
        met("b", "ab", "s0", "s1", "in flight"),
        Landed("b", "s1", 2, "in doubt"),
        met("b", "ab", "s1", "s2", "in flight"),
        Landed("b", "s2", 2, "lost"),
    ]
    counts = counts_of(scripts_of(entries))
    assert [each[1] for each in counts["a"]] == [each[1] for each in counts["b"]] == [True, False]


def test_a_replica_that_was_killed_before_it_could_write_takes_part() -> None:
    entries: list[Entry] = [
        met("a", "ab", "s0", "s1"),
        met("b", "ab", "s0", "s1"),
        met("a", "ab", "s1", "s2"),
        met("a", "a", "s2", "s3", number=2),
        Ended("a", 3, "digest"),
    ]
    a, b = scripts_of(entries)
    assert counts_of([b]) == {"b": [("s0", True, "counts"), ("s1", True, "counts")]}
    assert [scene.name for scene in b.scenes] == [scene.name for scene in a.scenes][:2]
    assert (a.weights, b.weights) == ("digest", "")


def test_one_that_has_missed_the_outcome_of_a_meeting_loses_it_again() -> None:
    entries: list[Entry] = [
        met("a", "ab", "s0", "s1"),
        met("b", "ab", "s1", "s2", number=2),
        met("a", "ab", "s1", "s2", number=2),
    ]
    assert counts_of(scripts_of(entries))["b"] == [("s0", True, "lost"), ("s1", True, "counts")]


def test_a_replica_is_started_when_those_before_it_wait_for_it() -> None:
    entries: list[Entry] = [
        met("a", "ab", "s0", ""),
        met("b", "ab", "s0", ""),
        met("a", "abc", "s0", "s1", number=2),
        met("b", "abc", "s0", "s1", number=2),
        met("c", "abc", "s0", "s1", number=2),
    ]
    a, b, c = scripts_of(entries)
    assert (a.follows, b.follows, c.follows) == ([], [], ["a", "b"])
    assert c.first == a.scenes[1].name != a.first


def test_equal_meetings_are_told_apart() -> None:
    (script,) = scripts_of([met("a", "a", "s0", "", "met")._replace(nth=nth) for nth in range(2)])
    assert len({scene.name for scene in script.scenes}) == 2


def test_the_log_of_a_replica_that_is_missing_is_named() -> None:
    entries: list[Entry] = [met("a", "ab", f"s{each}", f"s{each + 1}") for each in range(4)]
    with pytest.raises(ValueError, match=r"the log of b must be there too: it has taken part in 4 meetings"):
        scripts_of(entries)
    with pytest.raises(ValueError, match="logs must hold a meeting at least"):
        scripts_of([])


def test_a_log_is_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    Record(str(path)).change(Change(1.5, 3, ("a:1", "b:2"), ("b:2",), (), "", 0))
    assert json.loads(path.read_text().strip()) == {
        "kind": "change",
        "time": 1.5,
        "round": 3,
        "members": ["a:1", "b:2"],
        "joined": ["b:2"],
        "gone": [],
        "why": "",
        "lost_steps": 0,
        "behind_since": None,
    }


def test_training_goes_on_where_the_log_can_no_longer_be_written(tmp_path: Path) -> None:
    """As on a disk that is full or gone. It says so once."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    record = Record(str(folder / "log"))
    record.end(Ended("a", 1, "digest"))
    shutil.rmtree(folder)
    with pytest.warns(UserWarning, match=r"the membership log .*log ends here: .*No such file.* Training goes on"):
        record.end(Ended("a", 2, "digest"))
    record.end(Ended("a", 3, "digest"))


class Deaf:
    """A replica that does not end when it is told to."""

    def __init__(self, code: int | None) -> None:
        self.code = code
        self.killed = False

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        pass

    def kill(self) -> None:
        self.killed = True

    def wait(self, timeout: float | None = None) -> None:
        if timeout is not None:
            raise subprocess.TimeoutExpired("replica", timeout)


def test_a_replay_ends_though_another_replica_waits_for_the_one_that_failed() -> None:
    both = ("A", "B")
    scripts = scripts_of([Met(name, 1, both, "s0", 0, "s1", "counts") for name in both])
    replicas = iter([Deaf(1), Deaf(None)])
    started: list[Deaf] = []

    def start(_: dict[str, str]) -> Deaf:
        started.append(next(replicas))
        return started[-1]

    assert commands_replay.replay(scripts, start)["A"] == "broke off with exit code 1"
    assert started[1].killed
