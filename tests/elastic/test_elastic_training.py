"""Replicas that come and go: real processes, a real lighthouse, and kills at chosen places."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_sparsecomm import CompressionMonitor, methods
from tests.elastic.replicas import LONGEST_SECONDS, Replica, lighthouse, needs_torchft, replicas
from tests.elastic.training import (
    check_resumed,
    damage_payloads,
    die_in_round,
    die_while_receiving,
    die_while_sending,
    doubt_in_round,
    equal,
    may_repeat,
    refuse_round,
    slowed,
    stop_at,
    stop_at_and_tell_what_follows,
    train,
    wait_for_the_start,
    watch_the_law,
)

pytestmark = [
    needs_torchft,
    pytest.mark.timeout(300),
]

DILOCO = methods.diloco(every=5, outer_lr=0.5)
LOCO = methods.sparse_loco(every=5, chunk=64, density=0.1, fragments=2)
SBC = methods.sbc(density=0.1, every=4, momentum_masking=False)
AHEAD = methods.sbc(density=0.1, every=5, residual_in_weights=True)


def altered(*alterations: Callable[[], None]) -> Callable[[], None]:
    """Alters a process in several ways."""

    def before() -> None:
        for alter in alterations:
            alter()

    return before


def together(
    start: Callable[..., Replica],
    address: str,
    method: Any,
    alterations: dict[str, Callable[[], None]],
    names: str = "abc",
    stops: tuple[int, ...] = (),
    **options: Any,
) -> list[Replica]:
    """Replicas that begin together: the lighthouse knows all of them before any asks for a quorum.

    The last one pauses after the steps in `stops`.
    """
    started = []
    for seed, name in enumerate(names):
        before = altered(wait_for_the_start, *([alterations[name]] if name in alterations else []))
        pauses = [stops] if stops and name == names[-1] else []
        started.append(start(train, address, name, seed, method, *pauses, before=before, **options))
    for replica in started:
        assert replica.hear() == "ready"
    for replica in started:
        replica.say("go on")
    return started


def with_one_away(
    method: Any, until: int, alterations: dict[str, Callable[[], None]] | None = None, **options: Any
) -> list[dict[str, Any]]:
    """What three replicas end with, of which the last is stopped (SIGSTOP) from step 12 until the others' step `until`.

    All begin with their `alterations`, by name.
    """
    stops = {"a": stop_at(until), "b": stop_at(until), "c": stop_at_and_tell_what_follows(12)}
    more = alterations or {}
    each = {name: altered(stop, *([more[name]] if name in more else [])) for name, stop in stops.items()}
    with lighthouse() as address, replicas() as start:
        a, b, c = together(start, address, method, each, **options)
        assert c.hear() == 12
        os.kill(c.process.pid, signal.SIGSTOP)
        # The others go on without it.
        assert [a.hear(), b.hear()] == [until, until]
        os.kill(c.process.pid, signal.SIGCONT)
        c.say("go on")
        # Otherwise the others might be at the end before it has said anything.
        assert c.hear() == "meets"
        for replica in (a, b):
            replica.say("go on")
        return [replica.hear() for replica in (a, b, c)]


# Of these, a replay's test has one that is not slow.
@pytest.mark.slow
@pytest.mark.parametrize("method", [DILOCO, LOCO, AHEAD], ids=["diloco", "sparse_loco", "sbc, ahead"])
def test_one_is_killed_and_started_again(method: Any) -> None:
    with lighthouse() as address, replicas() as start:
        a, b, c = together(start, address, method, {}, stops=(12, 22))
        assert c.hear() == 12
        c.kill()
        again = start(train, address, "c", 7, method)
        results = [replica.hear() for replica in (a, b, again)]
    assert equal(results)
    assert [each["epochs"] for each in results] == [6, 6, 6]
    assert len({each["rate"] for each in results}) == 1
    assert results[2]["steps"] == 60
    names = [{name.partition(":")[0] for name in change["members"]} for change in results[0]["changes"]]
    assert names[-1] == {"a", "b", "c"}
    # The new one has taken part in fewer rounds itself, and got the rest.
    assert results[2]["round"] == results[0]["round"]
    assert results[2]["handed"]["weight updates"] < results[0]["handed"]["weight updates"]


@pytest.mark.slow
def test_a_slow_one_makes_fewer_steps_between_exchanges() -> None:
    with lighthouse() as address, replicas() as start:
        slow = {"a": slowed(0.1), "b": slowed(0.25), "c": slowed(0.1)}
        results = [each.hear() for each in together(start, address, DILOCO, slow, adapt_steps=True)]
    assert all(each["weights"].keys() == results[0]["weights"].keys() for each in results)
    assert len({each["round"] for each in results}) == 1
    a, b, c = (each["steps"] for each in results)
    # Twelve rounds; in the first one nobody knows how fast it is. Then it makes two of five.
    assert max(a, c) == 60
    assert 5 + 11 * 2 <= b <= 5 + 11 * 3
    for result in results:
        for name in ("network.0.weight", "network.3.bias"):
            assert np.array_equal(result["weights"][name], results[0]["weights"][name])


@pytest.mark.parametrize(
    ("method", "place"),
    [
        (DILOCO, "exchange"),
        pytest.param(SBC, "vote", marks=pytest.mark.slow),
        pytest.param(DILOCO, "vote", marks=pytest.mark.slow),
        pytest.param(SBC, "exchange", marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value).partition("(")[0],
)
def test_one_is_killed_amid_an_exchange(method: Any, place: str) -> None:
    """The others take the exchange back, and make it without it: what they sent and hold is what they took in."""
    watch = {"a": watch_the_law, "c": watch_the_law} if method is SBC else {}
    with lighthouse() as address, replicas() as start:
        a, _, c = together(start, address, method, {**watch, "b": die_in_round(4, place)})
        results = [a.hear(), c.hear()]
    assert equal(results)
    assert results[0]["steps"] == 60
    assert [change["why"] for change in results[0]["changes"] if change["gone"]] == ["lost in an exchange"]
    for result in results:
        assert method is not SBC or result["law"] < 1e-5


def test_one_that_does_not_know_whether_others_have_committed_commits_too() -> None:
    with lighthouse() as address, replicas() as start:
        started = together(start, address, SBC, {"a": altered(watch_the_law, doubt_in_round(4))})
        results = [replica.hear() for replica in started]
    assert all(each["weights"].keys() == results[0]["weights"].keys() for each in results)
    # It has waited for the others' next round, and is that many steps behind them when they end.
    assert [each["steps"] for each in results] == [56, 60, 60]
    for result in results:
        # Batch normalization counts each replica's own batches.
        del result["weights"]["network.1.num_batches_tracked"]
    assert equal([result | {"steps": 0} for result in results])
    assert results[0]["law"] < 1e-5
    # Nobody has joined anew.
    assert "state for joining replicas" not in {row for each in results[1:] for row in each["handed"]}


def test_a_round_that_one_replica_votes_against_is_taken_back_and_made_again() -> None:
    with lighthouse() as address, replicas() as start:
        a, b, c = together(start, address, SBC, {"a": altered(watch_the_law, refuse_round(4)), "b": watch_the_law})
        assert a.hear() == "taken back"
        results = [a.hear(), b.hear(), c.hear()]
    assert equal(results)
    assert [each["steps"] for each in results] == [60] * 3
    assert all(each["law"] < 1e-5 for each in results[:2])
    assert all(not change["gone"] for change in results[0]["changes"])


def test_a_round_whose_payload_is_damaged_on_its_way_is_taken_back_and_made_again() -> None:
    with lighthouse() as address, replicas() as start:
        alterations = {"a": altered(watch_the_law, may_repeat), "b": damage_payloads(4, 2), "c": may_repeat}
        started = together(start, address, SBC, alterations)
        results = [each.hear() for each in started]
    assert equal(results)
    assert [each["steps"] for each in results] == [60] * 3
    assert results[0]["law"] < 1e-5
    assert all(not change["gone"] for change in results[0]["changes"])


def test_a_replica_whose_payloads_are_always_damaged_ends_all() -> None:
    """Whoever reads it cannot tell damage on the way from what another program has written."""
    with lighthouse() as address, replicas() as start:
        started = together(start, address, SBC, {"a": may_repeat, "b": damage_payloads(4, 99)}, "ab")
        for replica in started:
            with pytest.raises(AssertionError, match="PayloadError: rank 1's payload: CRC-32"):
                replica.hear()


def test_what_a_joining_replica_gets_is_little_more_than_the_weights_and_the_outer_momentum() -> None:
    with lighthouse() as address, replicas() as start:
        monitored: dict[str, Any] = {"width": 3000, "callbacks": [CompressionMonitor()], "log_every_n_steps": 5}
        a = start(train, address, "a", 0, DILOCO, (12, 13), **monitored)
        assert a.hear() == 12
        b = start(train, address, "b", 1, DILOCO, before=wait_for_the_start, **monitored)
        assert b.hear() == "ready"
        b.say("go on")
        a.say("go on")
        assert a.hear() == 13
        a.say("go on")
        results = [a.hear(), b.hear()]
    assert equal(results)
    # On the progress bar, and for loggers.
    for result in results:
        assert result["metrics"]["replicas"] == result["metrics"]["sparsecomm/replicas"] == 2
    weights = results[0]["weights"]
    trained = sum(array.nbytes for name, array in weights.items() if "running" not in name and "num" not in name)
    buffers = sum(array.nbytes for array in weights.values()) - trained
    sent = results[0]["handed"]["state for joining replicas"]
    assert 2 * trained + buffers <= sent <= 1.2 * (2 * trained + buffers)
    assert "state for joining replicas" not in results[1]["handed"]


def test_one_set_up_otherwise_is_refused_and_the_others_go_on() -> None:
    with lighthouse() as address, replicas() as start:
        a = start(train, address, "a", 0, DILOCO, (12,))
        assert a.hear() == 12
        b = start(train, address, "b", 1, methods.diloco(every=5, outer_lr=0.6), before=wait_for_the_start)
        assert b.hear() == "ready"
        b.say("go on")
        a.say("go on")
        with pytest.raises(
            AssertionError, match=r"ValueError: method must be equal on all replicas; that of a:\S+ differs"
        ):
            b.hear()
        result = a.hear()
    assert result["steps"] == 60
    assert len(result["changes"][-1]["members"]) == 1


@pytest.mark.slow
def test_two_of_four_are_killed_at_once_and_the_others_go_on() -> None:
    with lighthouse() as address, replicas() as start:
        a, b, c, d = together(start, address, LOCO, {name: stop_at(12) for name in "cd"}, names="abcd")
        assert [c.hear(), d.hear()] == [12, 12]
        c.kill()
        d.kill()
        results = [a.hear(), b.hear()]
    assert equal(results)
    assert results[0]["steps"] == 60
    assert len(results[0]["changes"][-1]["members"]) == 2


@pytest.mark.slow
def test_the_replica_that_a_joining_one_copies_from_is_killed() -> None:
    """The joining one asks the others again."""
    with lighthouse() as address, replicas() as start:
        a, b, c = together(start, address, DILOCO, {"a": die_while_sending, "b": stop_at(12), "c": stop_at(12)})
        assert [b.hear(), c.hear()] == [12, 12]
        d = start(train, address, "d", 9, DILOCO, before=wait_for_the_start)
        assert d.hear() == "ready"
        for replica in (d, b, c):
            replica.say("go on")
        results = [replica.hear() for replica in (b, c, d)]
        a.process.join(1)
        assert a.process.exitcode == -9
    assert equal(results)
    assert results[0]["steps"] == 60


@pytest.mark.slow
def test_of_several_that_join_with_a_large_model_one_is_killed_amid_it() -> None:
    """The others get their state nevertheless, of about 50 MB, and all go on."""
    width = 400_000
    with lighthouse() as address, replicas() as start:
        a = start(train, address, "a", 0, DILOCO, (12, 13, 24), width=width)
        assert a.hear() == 12
        b, c, d = (
            start(train, address, name, 1, DILOCO, before=before, width=width)
            for name, before in (
                ("b", wait_for_the_start),
                ("c", altered(wait_for_the_start, die_while_receiving)),
                ("d", wait_for_the_start),
            )
        )
        assert [b.hear(), c.hear(), d.hear()] == ["ready"] * 3
        for replica in (b, c, d, a):
            replica.say("go on")
        assert a.hear() == 13
        a.say("go on")
        c.process.join(LONGEST_SECONDS)
        assert c.process.exitcode == -signal.SIGKILL
        assert a.hear() == 24
        a.say("go on")
        results = [a.hear(), b.hear(), d.hear()]
    assert equal(results)
    assert results[0]["steps"] == 60
    weights = results[0]["weights"]
    assert results[0]["handed"]["state for joining replicas"] > 3 * sum(each.nbytes for each in weights.values())
    assert len(results[0]["changes"][-1]["members"]) == 3


@pytest.mark.slow
def test_one_that_was_stopped_for_long_joins_again() -> None:
    results = with_one_away(DILOCO, 50)
    gone = [change for change in results[0]["changes"] if change["gone"]]
    assert [len(change["members"]) for change in gone] == [2]
    assert len(results[0]["changes"][-1]["members"]) == 3
    # Its own log says that it was away.
    change = results[2]["changes"][-1]
    assert change["behind_since"] < change["round"]
    assert any("c joined again (away since round " in line for line in results[2]["said"])
    # It ends with the others, though it has made fewer steps.
    for result in results:
        del result["weights"]["network.1.num_batches_tracked"]
    assert equal([result | {"steps": 0} for result in results])
    assert results[0]["steps"] == 60 > results[2]["steps"]


def test_one_replica_writes_each_checkpoint_and_any_number_resume(tmp_path: Path) -> None:
    """The one that leads writes, and goes on with its residual. Others begin with none."""
    folder = tmp_path / "checkpoints"
    save = str(folder / "{step}")
    with lighthouse() as address, replicas() as start:
        started = together(start, address, LOCO, {}, save=save, max_epochs=3)
        written = [replica.hear()["written"] for replica in started]
    assert written == [["step=10.ckpt", "step=20.ckpt", "step=30.ckpt"], [], []]
    assert sorted(path.name for path in folder.glob("*.ckpt")) == written[0]

    for count in (1, 4):
        with lighthouse() as address, replicas() as start:
            checkpoint = str(folder / "step=20.ckpt")
            names = "abcd"[:count]
            resumed = together(start, address, LOCO, {}, names, save=save, ckpt_path=checkpoint, max_epochs=4)
            results = [replica.hear() for replica in resumed]
        check_resumed(results, 40)


@pytest.mark.slow
def test_two_optimizers_that_the_module_steps_itself() -> None:
    with lighthouse() as address, replicas() as start:
        a, b = together(start, address, DILOCO, {}, names="ab", two=True)
        c = start(train, address, "c", 5, DILOCO, two=True)
        results = [replica.hear() for replica in (a, b, c)]
    assert [each["steps"] for each in results[:2]] == [120, 120]
    for result in results:
        # It has joined amid a batch of others, between their two optimizers, and began with the next batch.
        del result["weights"]["network.1.num_batches_tracked"]
    assert equal([result | {"steps": 0} for result in results])


@pytest.mark.slow
def test_the_lighthouse_is_killed_and_started_again() -> None:
    """Training waits for it at the next exchange, and goes on."""
    with replicas() as start:
        with lighthouse() as address:
            started = together(start, address, LOCO, {name: stop_at(12) for name in "abc"})
            assert [replica.hear() for replica in started] == [12, 12, 12]
        for replica in started:
            replica.say("go on")
        with lighthouse(int(address.rpartition(":")[2])):
            results = [replica.hear() for replica in started]
    assert max(each["steps"] for each in results) == 60
    for result in results:
        # Those that meet first go on without others, which join them then.
        del result["weights"]["network.1.num_batches_tracked"]
    assert equal([result | {"steps": 0} for result in results])
