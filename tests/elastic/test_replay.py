"""Runs of replicas that come and go, made again to the same bits from their logs."""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_sparsecomm import methods
from lightning_sparsecomm.commands.replay import Process, replay
from lightning_sparsecomm.elastic import streams
from lightning_sparsecomm.elastic.record import Landed, Met, read
from lightning_sparsecomm.elastic.replay import REPLICA
from lightning_sparsecomm.elastic.script import scripts_of
from tests.elastic.replicas import Replica, lighthouse, needs_torchft, replicas
from tests.elastic.test_elastic_training import DILOCO, LOCO, SBC, together
from tests.elastic.test_in_flight import METHODS
from tests.elastic.training import (
    die_in_round,
    die_while_sending,
    doubt_in_round,
    slowed,
    stop_at,
    train,
    wait_for_the_start,
)

DROPPING = methods.gradient_dropping(density=0.2)

pytestmark = [needs_torchft, pytest.mark.timeout(300)]


class Running:
    """A replica's process in a replay, and its result once it has ended."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.result: dict[str, Any] | None = None

    def poll(self) -> int | None:
        if not self._replica.pipe.poll(0):
            return None
        kind, content = self._replica.pipe.recv()
        if kind == "error" and "SystemExit: 0" in content:
            return 0
        assert kind == "result", content
        self.result = content
        return 0

    def terminate(self) -> None:
        self._replica.process.kill()

    def kill(self) -> None:
        self._replica.process.kill()

    def wait(self, timeout: float | None = None) -> None:
        self._replica.process.join(timeout)


def replayed(log: Path, method: Any, seeds: dict[str, list[int]], **options: Any) -> tuple[dict[str, str], list[Any]]:
    """How each replica of a log ends in its replay, and the results of those that end their training.

    Args:
        log: Of all replicas.
        method: As it was.
        seeds: By the first letter of a replica's name, those of its processes in the order in which they came.
        options: As they were.
    """
    scripts = scripts_of(read(log))
    rest = {name: list(numbers) for name, numbers in seeds.items()}
    seed_of = {script.replica: rest[script.replica[0]].pop(0) for script in scripts}
    running: list[Running] = []
    with replicas() as start:

        def begin(environment: dict[str, str]) -> Process:
            name = environment[REPLICA]

            def before() -> None:
                os.environ.update(environment)
                fetch = streams.fetch

                def late(*args: Any) -> None:
                    # Longer than the others take to their next meeting.
                    time.sleep(0.3)
                    fetch(*args)

                streams.fetch = late

            running.append(Running(start(train, "", name[0], seed_of[name], method, before=before, **options)))
            return running[-1]

        ends = replay(scripts, begin)
    return ends, [each.result for each in running if each.result is not None]


def check_same(results: list[dict[str, Any]], again: list[dict[str, Any]]) -> None:
    """Asserts that all results have the weights of all."""
    assert len(results) == len(again)
    for result in again:
        assert result["round"] == results[0]["round"]
        for name, weights in results[0]["weights"].items():
            assert np.array_equal(weights, result["weights"][name]), name


@pytest.mark.parametrize(
    "method", [LOCO, pytest.param(DROPPING, marks=pytest.mark.slow)], ids=["sparse_loco", "gradient_dropping"]
)
def test_a_run_in_which_one_was_killed_and_came_again_is_made_again(method: Any, tmp_path: Path) -> None:
    log = tmp_path / "members.jsonl"
    options: dict[str, Any] = {} if method is DROPPING else {"local_state_dir": str(tmp_path)}
    with lighthouse() as address, replicas() as start:
        a, b, c = together(start, address, method, {}, stops=(12,), membership_log=str(log), **options)
        assert c.hear() == 12
        c.kill()
        again = start(train, address, "c", 7, method, membership_log=str(log), **options)
        results = [replica.hear() for replica in (a, b, again)]
    assert (results[2]["began_with"] > 0) is bool(options)
    said = " ".join(results[2]["said"])
    assert re.search(r"sparsecomm: after round \d+, c joined; 3 replicas from now on", said)
    assert ("this replica goes on with its local state, from " in said) is bool(options)
    assert log.read_bytes().startswith(b"{")
    kept = {path.name: path.read_bytes() for path in tmp_path.glob("*.state")}
    ends, made = replayed(log, method, {"a": [0], "b": [1], "c": [2, 7]}, **options)
    assert sorted(ends.values()) == ["lost", "same", "same", "same"]
    check_same(results, made)
    # A replay leaves the files of the run alone.
    assert kept == {path.name: path.read_bytes() for path in tmp_path.glob("*.state")}


@pytest.mark.parametrize(
    ("method", "place"),
    [
        pytest.param(DROPPING, "exchange", marks=pytest.mark.slow),
        pytest.param(DROPPING, "vote", marks=pytest.mark.slow),
        pytest.param(SBC, "vote", marks=pytest.mark.slow),
    ],
    ids=["gradient_dropping, exchange", "gradient_dropping, vote", "sbc, vote"],
)
def test_a_run_in_which_one_was_killed_amid_an_exchange_is_made_again(method: Any, place: str, tmp_path: Path) -> None:
    """What the others have taken in and back has rounded."""
    log = tmp_path / "members.jsonl"
    with lighthouse() as address, replicas() as start:
        kill: dict[str, Callable[[], None]] = {"b": die_in_round(4, place)}
        a, _, c = together(start, address, method, kill, membership_log=str(log))
        results = [replica.hear() for replica in (a, c)]
    assert any(entry.prepared for entry in read(log) if isinstance(entry, Met))
    ends, made = replayed(log, method, {"a": [0], "b": [1], "c": [2]})
    assert sorted(ends.values()) == ["lost", "same", "same"]
    check_same(results, made)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["exchange", "vote"])
@pytest.mark.parametrize("name", ["sbc", "sparse_loco in fragments"])
def test_a_run_in_which_one_was_killed_in_flight_is_made_again(name: str, place: str, tmp_path: Path) -> None:
    log, method = tmp_path / "members.jsonl", METHODS[name]
    with lighthouse() as address, replicas() as start:
        a, _, c = together(start, address, method, {"b": die_in_round(4, place)}, membership_log=str(log))
        results = [replica.hear() for replica in (a, c)]
    ends, made = replayed(log, method, {"a": [0], "b": [1], "c": [2]})
    assert sorted(ends.values()) == ["lost", "same", "same"]
    check_same(results, made)


@pytest.mark.slow
@pytest.mark.parametrize("method", [SBC, METHODS["sbc"]], ids=["at once", "in flight"])
def test_a_run_in_which_one_did_not_know_whether_an_exchange_counts_is_made_again(method: Any, tmp_path: Path) -> None:
    log = tmp_path / "members.jsonl"
    with lighthouse() as address, replicas() as start:
        started = together(start, address, method, {"a": doubt_in_round(4)}, membership_log=str(log))
        results = [replica.hear() for replica in started]
    assert "in doubt" in log.read_text()
    ends, made = replayed(log, method, {"a": [0], "b": [1], "c": [2]})
    assert list(ends.values()) == ["same"] * 3
    for result in (*results, *made):
        # Batch normalization counts each replica's own batches, and one has made fewer.
        del result["weights"]["network.1.num_batches_tracked"]
    check_same(results, made)


@pytest.mark.slow
def test_a_run_in_which_one_was_killed_amid_sending_the_state_is_made_again(tmp_path: Path) -> None:
    log = tmp_path / "members.jsonl"
    options: dict[str, Any] = {"membership_log": str(log)}
    with lighthouse() as address, replicas() as start:
        alterations = {"a": die_while_sending, "b": stop_at(12), "c": stop_at(12)}
        _, b, c = together(start, address, DILOCO, alterations, **options)
        assert [b.hear(), c.hear()] == [12, 12]
        d = start(train, address, "d", 9, DILOCO, before=wait_for_the_start, **options)
        assert d.hear() == "ready"
        for replica in (d, b, c):
            replica.say("go on")
        results = [replica.hear() for replica in (b, c, d)]
    ends, made = replayed(log, DILOCO, {"a": [0], "b": [1], "c": [2], "d": [9]})
    assert sorted(ends.values()) == ["lost", "same", "same", "same"]
    check_same(results, made)


@pytest.mark.slow
def test_a_run_with_an_outcome_used_early_for_one_that_joined_is_made_again(tmp_path: Path) -> None:
    log, method = tmp_path / "members.jsonl", methods.diloco(every=12, outer_lr=0.5, delay=9)
    options: dict[str, Any] = {"membership_log": str(log)}
    with lighthouse() as address, replicas() as start:
        slow = dict.fromkeys("ab", slowed(0.05))
        a, b = together(start, address, method, slow, "ab", stops=(22,), **options)
        assert b.hear() == 22
        c = start(train, address, "c", 5, method, before=wait_for_the_start, **options)
        assert c.hear() == "ready"
        c.say("go on")
        b.say("go on")
        results = [replica.hear() for replica in (a, b, c)]
    assert any(entry.steps < 9 for entry in read(log) if isinstance(entry, Landed))
    ends, made = replayed(log, method, {"a": [0], "b": [1], "c": [5]})
    assert list(ends.values()) == ["same"] * 3
    check_same(results, made)


@pytest.mark.slow
def test_a_run_of_replicas_of_unequal_speed_is_made_again(tmp_path: Path) -> None:
    log = tmp_path / "members.jsonl"
    options: dict[str, Any] = {"adapt_steps": True, "membership_log": str(log)}
    with lighthouse() as address, replicas() as start:
        slow = {"a": slowed(0.1), "b": slowed(0.25), "c": slowed(0.1)}
        results = [each.hear() for each in together(start, address, DILOCO, slow, **options)]
    ends, made = replayed(log, DILOCO, {"a": [0], "b": [1], "c": [2]}, **options)
    assert list(ends.values()) == ["same"] * 3
    assert sorted(each["steps"] for each in made) == sorted(each["steps"] for each in results)


@pytest.mark.slow
def test_a_replay_with_other_weights_says_so(tmp_path: Path) -> None:
    log = tmp_path / "members.jsonl"
    with lighthouse() as address, replicas() as start:
        for replica in together(start, address, DILOCO, {}, "ab", membership_log=str(log)):
            replica.hear()
    ends, _ = replayed(log, DILOCO, {"a": [0], "b": [7]})
    assert list(ends.values()) == ["differs", "differs"]
