"""Methods that exchange gradients, with replicas that come and go: real processes and a real lighthouse."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_sparsecomm import methods
from lightning_sparsecomm.sharing import Method
from tests.distributed.summed import in_regions
from tests.elastic.replicas import lighthouse, needs_torchft, replicas
from tests.elastic.test_elastic_training import altered, together, with_one_away
from tests.elastic.training import (
    die_in_round,
    doubt_in_round,
    equal,
    equal_but_for_steps,
    nan_in,
    refuse_round,
    spoil,
    train,
    wait_for_the_start,
    watch_the_law,
    without_the_branch,
)

pytestmark = [needs_torchft, pytest.mark.timeout(300)]

DROPPING = methods.gradient_dropping(density=0.1)


def _for_run(steps: float, ranks: int) -> Method:
    return methods.default(every=2)


METHODS = {
    # As in a run that is long enough for local steps, which replicas that come and go cannot make.
    "default": methods.default().following(_for_run),
    "gradient_dropping": DROPPING,
    "in regions": in_regions(methods.gradient_dropping(density=0.1, warmup_steps=0)),
    "ok_topk": methods.ok_topk(density=0.1),
    "powersgd": methods.powersgd(2),
    "quantized": methods.quantized(),
    "sketched": methods.random_k(0.1),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "default" else pytest.mark.slow) for name in METHODS]
)
def test_one_is_killed_and_started_again(name: str) -> None:
    """It has the weights, the optimizer's state and the learning rate of the others from its first step on."""
    method = METHODS[name]
    with lighthouse() as address, replicas() as start:
        a, b, c = together(start, address, method, {}, stops=(12,))
        assert c.hear() == 12
        c.kill()
        again = start(train, address, "c", 7, method)
        results = [replica.hear() for replica in (a, b, again)]
    for result in results:
        del result["weights"]["network.1.num_batches_tracked"]
    assert equal(results)
    assert len({each["rate"] for each in results}) == 1
    assert results[2]["steps"] == 60
    names = [{name.partition(":")[0] for name in change["members"]} for change in results[0]["changes"]]
    assert names[-1] == {"a", "b", "c"}
    assert results[2]["round"] == results[0]["round"]
    assert results[2]["handed"]["gradients"] < results[0]["handed"]["gradients"]


@pytest.mark.few(1)
@pytest.mark.parametrize("place", ["vote", pytest.param("exchange", marks=pytest.mark.slow)])
def test_one_is_killed_amid_an_exchange(place: str, tmp_path: Path) -> None:
    """The others take it back, and make it without that one: what they sent and hold is what they took in."""
    with lighthouse() as address, replicas() as start:
        law = {"a": watch_the_law, "c": watch_the_law, "b": die_in_round(9, place)}
        a, _, c = together(start, address, DROPPING, law, membership_log=str(tmp_path / "members.jsonl"))
        results = [a.hear(), c.hear()]
    assert equal(results)
    assert results[0]["steps"] == 60
    assert [change["why"] for change in results[0]["changes"] if change["gone"]] == ["lost in an exchange"]
    assert all(result["law"] < 1e-5 for result in results)
    lines = [json.loads(line) for line in (tmp_path / "members.jsonl").read_text().splitlines() if line]
    logged = [line for line in lines if line["kind"] == "change"]
    # Each that is there has noted both changes.
    assert [len(line["members"]) for line in logged].count(2) == 2
    assert all({"time", "round", "joined", "gone", "why"} < line.keys() for line in logged)


@pytest.mark.slow
def test_one_that_does_not_know_whether_others_have_committed_makes_its_step_and_joins_again() -> None:
    with lighthouse() as address, replicas() as start:
        started = together(start, address, DROPPING, {"a": doubt_in_round(9)})
        results = [replica.hear() for replica in started]
    assert equal_but_for_steps(results)
    # The others have made one step before it was back, and one while they sent it the state.
    assert [each["steps"] for each in results] == [58, 60, 60]
    assert "state for joining replicas" in {row for each in results[1:] for row in each["handed"]}


@pytest.mark.slow
def test_a_round_that_one_replica_votes_against_is_taken_back_and_made_again() -> None:
    with lighthouse() as address, replicas() as start:
        law = {"a": altered(watch_the_law, refuse_round(9)), "b": watch_the_law}
        a, b, c = together(start, address, DROPPING, law)
        assert a.hear() == "taken back"
        results = [a.hear(), b.hear(), c.hear()]
    assert equal(results)
    assert [each["steps"] for each in results] == [60] * 3
    assert all(each["law"] < 1e-5 for each in results[:2])


@pytest.mark.slow
def test_one_that_was_stopped_for_long_joins_again() -> None:
    """Its schedule is behind, and the learning rate is that of the others."""
    results = with_one_away(methods.default(), 50)
    assert equal_but_for_steps(results)
    assert len(results[0]["changes"][-1]["members"]) == 3
    assert results[0]["steps"] == 60 > results[2]["steps"]


@pytest.mark.slow
def test_weights_that_other_code_has_changed_on_one_replica_are_replaced() -> None:
    with lighthouse() as address, replicas() as start:
        alterations = {"b": spoil(15)}
        started = together(start, address, DROPPING, alterations, check_replicas_every=10)
        results = [replica.hear() for replica in started]
    assert equal_but_for_steps(results)


@pytest.mark.slow
def test_one_replica_writes_each_checkpoint_and_any_number_resume(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save = str(folder / "{step}")
    with lighthouse() as address, replicas() as start:
        started = together(start, address, DROPPING, {}, save=save, max_epochs=3)
        written = [replica.hear()["written"] for replica in started]
    assert written == [["step=10.ckpt", "step=20.ckpt", "step=30.ckpt"], [], []]
    for count in (1, 4):
        with lighthouse() as address, replicas() as start:
            options: dict[str, Any] = {"ckpt_path": str(folder / "step=20.ckpt"), "max_epochs": 4}
            resumed = together(start, address, DROPPING, {}, "abcd"[:count], save=save, **options)
            results = [replica.hear() for replica in resumed]
        assert equal(results)
        assert results[0]["steps"] == 40


@pytest.mark.slow
def test_two_optimizers_that_the_module_steps_itself() -> None:
    """dgc for SGD, local moments for Adam."""
    with lighthouse() as address, replicas() as start:
        a, b = together(start, address, methods.default(), {}, names="ab", two=True)
        c = start(train, address, "c", 5, methods.default(), two=True, before=wait_for_the_start)
        assert c.hear() == "ready"
        c.say("go on")
        results = [replica.hear() for replica in (a, b, c)]
    assert equal_but_for_steps(results)


@pytest.mark.slow
@pytest.mark.parametrize("method", [DROPPING, methods.sparse_loco(every=5)], ids=["gradients", "weights"])
def test_replicas_resume_amid_an_epoch(method: Any, tmp_path: Path) -> None:
    """The one that does not lead makes as many steps as the one that does."""
    save = str(tmp_path / "checkpoints" / "{step}")
    with lighthouse() as address, replicas() as start:
        (a,) = together(start, address, method, {}, "a", save=save, save_every=7, max_epochs=1)
        assert a.hear()["steps"] == 10
    with lighthouse() as address, replicas() as start:
        options: dict[str, Any] = {"ckpt_path": save.format(step="step=7") + ".ckpt", "max_epochs": 3}
        results = [
            each.hear() for each in together(start, address, method, {}, "ab", save=save, save_every=7, **options)
        ]
    assert [each["steps"] for each in results] == [30, 30]
    assert equal(results)


@pytest.mark.slow
@pytest.mark.parametrize("two", [False, True], ids=["adamw", "sgd and adam"])
def test_one_is_back_in_the_last_exchange(two: bool) -> None:
    """It ends with the others, and with their weights, though it was away for most of the run."""
    assert equal_but_for_steps(with_one_away(methods.default(), 118 if two else 59, two=two))


@pytest.mark.slow
def test_a_gradient_of_old_weights_that_no_other_replica_has_counts_for_nothing() -> None:
    assert equal_but_for_steps(with_one_away(DROPPING, 40, dict.fromkeys("ab", without_the_branch)))


@pytest.mark.slow
def test_one_that_does_not_know_whether_the_last_exchange_counts_learns_it() -> None:
    with lighthouse() as address, replicas() as start:
        started = together(start, address, DROPPING, {"a": doubt_in_round(60)})
        results = [replica.hear() for replica in started]
    assert equal(results)
    assert results[0]["steps"] == 60


@pytest.mark.slow
@pytest.mark.parametrize("method", [DROPPING, methods.sparse_loco(every=5)], ids=["gradients", "weights"])
def test_a_gradient_that_is_not_finite_ends_its_replica_alone(method: Any) -> None:
    with lighthouse() as address, replicas() as start:
        a, b, c = together(start, address, method, {"b": nan_in(13)})
        with pytest.raises(AssertionError, match="NonFiniteGradientError"):
            b.hear()
        b.kill()
        results = [a.hear(), c.hear()]
    assert equal(results)
    assert results[0]["steps"] == 60
