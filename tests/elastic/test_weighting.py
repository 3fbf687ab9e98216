"""Replicas count by the samples behind what they bring: against NumPy, and while some come and go."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_sparsecomm import methods
from tests.elastic.replicas import lighthouse, needs_torchft, replicas
from tests.elastic.test_elastic_training import altered, together
from tests.elastic.test_in_flight import SBC as FLYING
from tests.elastic.training import (
    PIPE,
    die_in_round,
    doubt_in_round,
    equal_but_for_steps,
    refuse_round,
    slowed,
    train,
    wait_for_the_start,
    watch_the_law,
    weigh_it,
)
from tests.elastic.weighing import RATE, count, fit, gradient, weighed

pytestmark = [needs_torchft, pytest.mark.timeout(300)]

EVERY = 4
AVERAGING = methods.federated_averaging(every=EVERY)
DROPPING = methods.gradient_dropping(density=1.0)
SBC = methods.sbc(density=0.1, every=4, momentum_masking=False)


def _begin_together(pipe: Any, *args: Any, **options: Any) -> dict[str, Any]:
    PIPE.append(pipe)
    wait_for_the_start()
    return fit(pipe, *args, **options)


def fitted(method: Any, *each: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """What replicas end with that begin together, by the options of each."""
    with lighthouse(least=len(each)) as address, replicas() as start:
        started = [start(_begin_together, address, name, method, **options, **own) for name, own in zip("abc", each)]
        for replica in started:
            assert replica.hear() == "ready"
        for replica in started:
            replica.say("go on")
        return [replica.hear() for replica in started]


def averaged(results: list[dict[str, Any]], accumulate: list[int], every: int, by_steps: bool = False) -> np.ndarray:
    """The weights after the same training in NumPy, where changes of `every` steps count by the samples behind them."""
    weight, steps = np.zeros(4), len(results[0]["steps"])
    for begin in range(0, steps, every):
        changes, counts = [], []
        for result, each in zip(results, accumulate):
            local, own = weight.copy(), result["steps"][begin : begin + every]
            for batches in own:
                local -= RATE * gradient(local, batches, each)
            changes.append(local - weight)
            counts.append(len(own) if by_steps else count(own))
        weight = weight + sum(change * each for change, each in zip(changes, counts)) / sum(counts)
    return weight


def check(results: list[dict[str, Any]], accumulate: list[int], every: int, by_steps: bool = False) -> None:
    """Replicas have the same bits, and those of NumPy to round-off; the other way of counting gives others."""
    assert all(np.array_equal(each["weight"], results[0]["weight"]) for each in results)
    expected, other = (averaged(results, accumulate, every, steps) for steps in (by_steps, not by_steps))
    np.testing.assert_allclose(results[0]["weight"], expected, rtol=1e-9)
    assert np.abs(other - expected).max() > 1e-3 * np.abs(expected).max()


def test_dealt_samples_weigh_changes() -> None:
    """Batches of 8 and of 24, and smaller ones at the end of each pass."""
    results = fitted(AVERAGING, {"batch_size": 8}, {"batch_size": 24}, kind="dealt", size=150, max_steps=11)
    assert any(len(y) not in (8, 24) for each in results for batches in each["steps"] for _, y in batches)
    check(results, [1, 1], EVERY)


def test_gradients_weigh_by_the_samples_of_the_very_step() -> None:
    """Two batches of 8 for each step, and one of 24, but a smaller one at the end of each epoch."""
    results = fitted(
        DROPPING, {"size": 64, "batch_size": 8, "accumulate": 2}, {"size": 100, "batch_size": 24}, max_steps=11
    )
    assert {count([batches]) for batches in results[1]["steps"]} == {24, 4}
    check(results, [2, 1], 1)


@pytest.mark.slow
@pytest.mark.parametrize("method", [AVERAGING, DROPPING], ids=["weights", "gradients"])
@pytest.mark.parametrize("kind", ["own", "stream", "two loaders"])
def test_samples_are_read_off_batches(kind: str, method: Any) -> None:
    """Where the user deals them out. One replica steps by itself, after each second batch."""
    manual = {"manual": True, "accumulate": 2}
    results = fitted(
        method, {"size": 64, "batch_size": 8, **manual}, {"size": 100, "batch_size": 24}, kind=kind, max_steps=10
    )
    check(results, [2, 1], EVERY if method is AVERAGING else 1)


@pytest.mark.slow
def test_a_batch_counts_once_though_its_loss_is_computed_twice() -> None:
    own = {"size": 64, "batch_size": 8, "twice": True}, {"size": 100, "batch_size": 24}
    check(fitted(AVERAGING, *own, max_steps=10), [1, 1], EVERY)


@pytest.mark.slow
@pytest.mark.parametrize("method", [AVERAGING, DROPPING], ids=["weights", "gradients"])
def test_steps_count_for_all_where_one_does_not_know_its_samples(method: Any) -> None:
    own = {"size": 64, "batch_size": 8, "kind": "opaque"}, {"size": 100, "batch_size": 24}
    check(fitted(method, *own, max_steps=10), [1, 1], EVERY if method is AVERAGING else 1, by_steps=True)


@pytest.mark.slow
def test_replicas_with_equally_many_samples_count_alike_to_the_bit() -> None:
    with lighthouse() as address, replicas() as start:
        results = [each.hear() for each in together(start, address, SBC, dict.fromkeys("abc", weigh_it))]
    assert {weight for weights in weighed(results) for weight in weights} == {1.0}


def _unequal(
    method: Any, alterations: dict[str, Any], batch_sizes: dict[str, int], law: bool = True, **options: Any
) -> list[dict[str, Any]]:
    """What replicas end with that begin together; a killed one ends with nothing."""
    each = {
        name: altered(
            *([watch_the_law] if law else []), weigh_it, *([alterations[name]] if name in alterations else [])
        )
        for name in batch_sizes
    }
    with lighthouse() as address, replicas() as start:
        started = []
        for seed, (name, size) in enumerate(batch_sizes.items()):
            before = altered(wait_for_the_start, each[name])
            started.append(start(train, address, name, seed, method, before=before, batch_size=size, **options))
        for replica in started:
            assert replica.hear() == "ready"
        for replica in started:
            replica.say("go on")
        results = []
        for name, replica in zip(batch_sizes, started):
            if alterations.get(name) in KILLED:
                continue
            if alterations.get(name) is REFUSED:
                assert replica.hear() == "taken back"
            results.append(replica.hear())
    return results


KILLED = [die_in_round(4, "exchange"), die_in_round(4, "vote")]
REFUSED = refuse_round(4)
DOUBTED = doubt_in_round(4)
SIZES = {"a": 4, "b": 8, "c": 20}


@pytest.mark.slow
@pytest.mark.parametrize("flies", [False, True], ids=["waiting", "in flight"])
@pytest.mark.parametrize(
    "alterations",
    [{"a": DOUBTED}, {"b": REFUSED}, {"b": KILLED[0]}, {"b": KILLED[1]}],
    ids=["in doubt", "taken back", "killed in an exchange", "killed before the end of it"],
)
def test_samples_last_as_long_as_the_changes_that_they_are_behind(alterations: dict[str, Any], flies: bool) -> None:
    """Through exchanges that are taken back, in doubt or in flight. What was sent and is held is what was taken in."""
    results = _unequal(FLYING if flies else SBC, alterations, SIZES, law=not flies)
    assert equal_but_for_steps(results)
    weights = weighed(results)
    # Of most exchanges, all who took part in it have told.
    assert len(weights) >= 7
    assert flies or all(result["law"] < 1e-5 for result in results)


@pytest.mark.slow
def test_a_slow_one_counts_by_its_samples() -> None:
    slow = {"a": slowed(0.02), "b": slowed(0.1)}
    results = _unequal(
        methods.sbc(density=0.1, every=6, momentum_masking=False), slow, {"a": 8, "b": 24}, adapt_steps=True
    )
    weights = weighed(results)
    assert results[1]["steps"] < results[0]["steps"] == 60
    # Six batches of 8 are as many samples as two of 24.
    assert [0.5, 1.5] in weights
    assert any(row[1] < 1.5 for row in weights)
    assert all(result["law"] < 1e-5 for result in results)


@pytest.mark.slow
def test_one_that_joins_amid_a_run_counts_by_what_it_has_trained_itself() -> None:
    with lighthouse() as address, replicas() as start:
        a = start(train, address, "a", 0, SBC, (14,), before=weigh_it, batch_size=8)
        assert a.hear() == 14
        b = start(train, address, "b", 1, SBC, before=altered(wait_for_the_start, weigh_it), batch_size=24)
        assert b.hear() == "ready"
        b.say("go on")
        a.say("go on")
        results = [a.hear(), b.hear()]
    assert equal_but_for_steps(results)
    assert [0.5, 1.5] in weighed(results)


@pytest.mark.slow
def test_a_run_that_resumes_amid_a_round_has_the_samples_of_before(tmp_path: Path) -> None:
    """The checkpoint was saved two steps after an exchange."""
    save = str(tmp_path / "checkpoints" / "{step}")
    with lighthouse() as address, replicas() as start:
        (a,) = together(start, address, SBC, {}, "a", save=save, max_epochs=2)
        assert a.hear()["written"][0] == "step=10.ckpt"
    options = {"ckpt_path": save.format(step="step=10") + ".ckpt", "save": save, "max_epochs": 3}
    results = _unequal(SBC, {}, {"a": 8, "b": 24}, law=False, **options)
    weights = weighed(results, before=16)
    # Four steps of 8, and two of 24 of the replica that has joined.
    assert weights[0] == [0.8, 1.2]
    assert weights[1] == [0.5, 1.5]
