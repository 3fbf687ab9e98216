"""Exchanges in flight between replicas that come and go: real processes, a real lighthouse, and kills amid flights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from lightning_sparsecomm import methods
from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.basis.mirror import MirrorWire
from lightning_sparsecomm.elastic.flight import RoundInFlight
from lightning_sparsecomm.elastic.wire import ElasticWire, LostPeerError
from lightning_sparsecomm.sharing import DeltaSync, Turn
from lightning_sparsecomm.sharing.streamed import StreamedShare
from tests.elastic.flying import hold_until_steps, watch_flights
from tests.elastic.replicas import lighthouse, needs_torchft, replicas
from tests.elastic.test_elastic_training import altered, together, with_one_away
from tests.elastic.training import (
    check_resumed,
    damage_payloads,
    die_in_round,
    doubt_in_round,
    equal,
    equal_but_for_steps,
    fail_in_step,
    may_repeat,
    nan_in,
    refuse_round,
    train,
    wait_for_the_start,
)

pytestmark = [needs_torchft, pytest.mark.timeout(400)]

# Nothing starts at the last of 60 steps, so that each exchange has its steps to fly.
SBC = methods.sbc(density=0.1, every=7, momentum_masking=False, delay=2)
DILOCO = methods.diloco(every=7, outer_lr=0.5, delay=2)
LOCO = methods.sparse_loco(every=6, chunk=64, density=0.1, fragments=2, delay=2)
METHODS = {
    "sbc": SBC,
    "diloco": DILOCO,
    "sparse_loco in fragments": LOCO,
    "streaming_diloco": methods.streaming_diloco(every=8, fragments=2, delay=3),
    "federated_averaging": methods.federated_averaging(every=7, fragments=2, delay=1),
    # Its fragments start before the one before has had its steps.
    "sparse_loco, long delay": methods.sparse_loco(every=6, chunk=64, density=0.1, fragments=2, delay=5),
}


def books_agree(results: list[dict[str, Any]], least: int = 3) -> bool:
    """Whether replicas have shared the same bits in each state, and nothing of what they trained is missing."""
    shared = [result["flights"]["shared"] for result in results]
    common = set.intersection(*map(set, shared))
    exact = all(result["flights"][name] < 1e-5 for result in results for name in ("trained", "weighted"))
    return exact and len(common) >= least and all(len({each[state] for each in shared}) == 1 for state in common)


def watched(alterations: dict[str, Callable[[], None]], names: str = "abc") -> dict[str, Callable[[], None]]:
    """The alterations, with books kept by all."""
    return {name: altered(watch_flights, *([alterations[name]] if name in alterations else [])) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_replicas_share_the_same_bits_after_each_round_and_lose_nothing(name: str) -> None:
    with lighthouse() as address, replicas() as start:
        results = [each.hear() for each in together(start, address, METHODS[name], watched({}))]
    assert equal(results)
    assert [each["steps"] for each in results] == [60] * 3
    # What mixes in a share of the anchor drops a part of what was trained meanwhile, by definition.
    if name != "streaming_diloco":
        assert books_agree(results, least=8)
    assert all(not change["gone"] for change in results[0]["changes"])


@pytest.mark.slow
def test_training_goes_on_in_flight() -> None:
    """Each exchange takes place only once training has made two steps more. Who waited for it would fail."""
    hold = hold_until_steps(2)
    with lighthouse() as address, replicas() as start:
        started = together(start, address, SBC, watched(dict.fromkeys("abc", hold)))
        results = [each.hear() for each in started]
    assert equal(results)
    assert books_agree(results, least=8)
    for result in results:
        assert result["flights"]["meanwhile"] == [2] * 8


@pytest.mark.slow
@pytest.mark.parametrize("place", ["exchange", "vote"])
@pytest.mark.parametrize("name", ["sbc", "sparse_loco in fragments", "diloco"])
def test_one_is_killed_in_flight(name: str, place: str) -> None:
    """The others take the exchange back, and start it again without that one."""
    with lighthouse() as address, replicas() as start:
        a, _, c = together(start, address, METHODS[name], watched({"b": die_in_round(4, place)}))
        results = [a.hear(), c.hear()]
    assert equal(results)
    assert results[0]["steps"] == 60
    assert [change["why"] for change in results[0]["changes"] if change["gone"]] == ["lost in an exchange"]
    assert books_agree(results)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sbc", "sparse_loco in fragments"])
def test_one_is_killed_and_started_again(name: str) -> None:
    with lighthouse() as address, replicas() as start:
        a, b, c = together(start, address, METHODS[name], watched({}), stops=(15, 22))
        assert c.hear() == 15
        c.kill()
        again = start(train, address, "c", 7, METHODS[name], before=watch_flights)
        results = [replica.hear() for replica in (a, b, again)]
    assert equal(results)
    assert books_agree(results)
    assert results[2]["steps"] == 60
    assert results[2]["round"] == results[0]["round"]
    assert len(results[0]["changes"][-1]["members"]) == 3


@pytest.mark.slow
def test_one_that_joins_in_a_meeting_that_starts_an_exchange_gets_its_outcome() -> None:
    """It waits for that, while the others train; then it takes part in the next round."""
    hold = hold_until_steps(2)
    with lighthouse() as address, replicas() as start:
        a, b = together(start, address, DILOCO, watched({"a": hold, "b": hold}, "ab"), "ab", stops=(13,))
        assert b.hear() == 13
        c = start(train, address, "c", 5, DILOCO, before=altered(watch_flights, wait_for_the_start))
        assert c.hear() == "ready"
        c.say("go on")
        b.say("go on")
        results = [replica.hear() for replica in (a, b, c)]
    assert equal_but_for_steps(results)
    assert books_agree(results)
    assert all(steps == 2 for result in results[:2] for steps in result["flights"]["meanwhile"][:3])
    assert results[2]["handed"]["weight updates"] < results[0]["handed"]["weight updates"]


@pytest.mark.slow
def test_one_that_does_not_know_whether_others_have_committed_commits_too() -> None:
    """What it has trained while the exchange was in flight counts in the next round."""
    with lighthouse() as address, replicas() as start:
        started = together(start, address, SBC, watched({"a": doubt_in_round(4)}))
        results = [replica.hear() for replica in started]
    assert equal_but_for_steps(results)
    assert books_agree(results)
    # It has waited for the others' next round, and is that many steps behind them when they end.
    assert [each["steps"] for each in results] == [58, 60, 60]
    assert "state for joining replicas" not in {row for each in results[1:] for row in each["handed"]}


@pytest.mark.slow
def test_one_that_had_to_save_while_it_did_not_know_joins_again(tmp_path: Path) -> None:
    """A save closes the exchange, and whether others have committed to it cannot be told yet."""
    save = str(tmp_path / "checkpoints" / "{step}")
    with lighthouse() as address, replicas() as start:
        options: dict[str, Any] = {"save": save, "save_every": 29}
        started = together(start, address, SBC, {"a": doubt_in_round(4)}, **options)
        results = [replica.hear() for replica in started]
    assert equal_but_for_steps(results)
    assert "state for joining replicas" in {row for each in results[1:] for row in each["handed"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sbc", "sparse_loco in fragments"])
def test_a_round_that_one_replica_votes_against_is_taken_back_and_made_again(name: str) -> None:
    with lighthouse() as address, replicas() as start:
        a, b, c = together(start, address, METHODS[name], watched({"a": refuse_round(4)}))
        assert a.hear() == "taken back"
        results = [a.hear(), b.hear(), c.hear()]
    assert equal(results)
    assert books_agree(results)
    assert [each["steps"] for each in results] == [60] * 3


@pytest.mark.slow
def test_one_that_was_stopped_in_flight_joins_again() -> None:
    """It is stopped after a step between the start of an exchange and its use."""
    results = with_one_away(methods.diloco(every=5, outer_lr=0.5, delay=3), 50, watched({}))
    assert equal_but_for_steps(results)
    assert len(results[0]["changes"][-1]["members"]) == 3
    assert results[0]["steps"] == 60 > results[2]["steps"]


@pytest.mark.slow
@pytest.mark.parametrize("failure", [nan_in(13), fail_in_step(16)], ids=["not finite", "raises in flight"])
def test_one_that_fails_ends_and_the_others_go_on(failure: Callable[[], None]) -> None:
    with lighthouse() as address, replicas() as start:
        a, b, c = together(start, address, SBC, watched({"b": failure}))
        with pytest.raises(AssertionError, match=r"NonFiniteGradientError|ArithmeticError"):
            b.hear()
        results = [a.hear(), c.hear()]
    assert equal(results)
    assert books_agree(results)
    assert results[0]["steps"] == 60


@pytest.mark.slow
def test_an_exchange_whose_payload_is_damaged_on_its_way_is_taken_back_and_made_again() -> None:
    with lighthouse() as address, replicas() as start:
        alterations = {"a": may_repeat, "b": damage_payloads(4, 2), "c": may_repeat}
        results = [each.hear() for each in together(start, address, SBC, watched(alterations))]
    assert equal(results)
    assert books_agree(results)
    assert [each["steps"] for each in results] == [60] * 3


@pytest.mark.slow
def test_saves_in_flight_change_nothing_and_any_number_resume(tmp_path: Path) -> None:
    """A checkpoint after step 15, or 22, finds an exchange in flight."""
    folder = tmp_path / "checkpoints"
    save = str(folder / "{step}")
    with lighthouse() as address, replicas() as start:
        plain = [each.hear() for each in together(start, address, SBC, watched({}), max_epochs=3)]
    with lighthouse() as address, replicas() as start:
        options: dict[str, Any] = {"save": save, "save_every": 15, "max_epochs": 3}
        saving = [each.hear() for each in together(start, address, SBC, watched({}), **options)]
    assert equal([*plain, *saving])
    assert saving[0]["written"] == ["step=15.ckpt", "step=30.ckpt"]
    for count in (1, 3):
        with lighthouse() as address, replicas() as start:
            checkpoint = str(folder / "step=15.ckpt")
            options |= {"ckpt_path": checkpoint, "max_epochs": 4}
            resumed = together(start, address, SBC, {}, "abc"[:count], **options)
            results = [replica.hear() for replica in resumed]
        check_resumed(results, 40)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [56, 57, 58, 59])
def test_training_ends_with_an_exchange_in_flight(steps: int) -> None:
    """It starts after step 56, and is used after 58."""
    with lighthouse() as address, replicas() as start:
        started = together(start, address, SBC, watched({}, "ab"), "ab", max_epochs=-1, max_steps=steps)
        results = [each.hear() for each in started]
    assert equal(results)
    assert books_agree(results)
    assert results[0]["steps"] == steps


@pytest.mark.slow
def test_two_optimizers_that_the_module_steps_itself() -> None:
    with lighthouse() as address, replicas() as start:
        a, b = together(start, address, DILOCO, {}, names="ab", two=True)
        c = start(train, address, "c", 5, DILOCO, two=True)
        results = [replica.hear() for replica in (a, b, c)]
    assert equal_but_for_steps(results)


class _Training:
    """One replica's unit, whose weights grow in each step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.Linear(5, 3)
        named = list(self.module.named_parameters())
        sync = methods.sbc(density=0.2, every=3, momentum_masking=False, delay=2).syncs[0]
        assert isinstance(sync, DeltaSync)
        share = sync.start(SGD(self.module.parameters(), lr=0.1), named, MirrorWire(2))
        assert isinstance(share, StreamedShare)
        self.share, self.made = share, 0

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([each.detach().flatten() for each in self.module.parameters()])

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.share.before_step()
            with torch.no_grad():
                for each in self.module.parameters():
                    each.add_(torch.linspace(0.1, 1 + self.made, each.numel()).view(each.shape))
            self.share.after_step()
            self.made += 1


def test_what_was_taken_back_in_flight_starts_again_with_all_that_was_trained() -> None:
    training = _Training()
    training.step(3)
    start = Turn("weights", 2)
    assert training.share.due(start)
    training.share.prepare(start)
    training.step(2)
    weights, residual = training.weights, training.share.residual_norm()
    assert (training.share.steps, training.share.trained) == (2, 5)
    training.share.take_back()
    assert torch.equal(training.weights, weights)
    assert (training.share.steps, training.share.trained) == (5, 5)
    assert not training.share.under_way
    assert training.share.residual_norm() == residual == 0
    # Fragments, too, are due again at once, and not at their next time.
    assert training.share.due(Turn("weights", 4))
    training.share.sync.every = 1000
    assert training.share.due(Turn("weights", 4))
    training.share.prepare(Turn("weights", 4))
    assert not training.share.due(Turn("weights", 4))
    training.share.land()
    held = torch.cat([part.flatten() for part in training.share.state_dict()["DeltaSync.ErrorFeedback"].values()])
    anchors = torch.cat([anchor.flatten() for _, anchor in training.share.in_common()])
    torch.testing.assert_close(anchors + held, weights)


@pytest.fixture
def round_wire(wire: Wire) -> ElasticWire:
    return ElasticWire()


@pytest.mark.parametrize("confirmed", [True, False])
def test_works_of_a_round_bring_nothing_before_all_have_confirmed_it(round_wire: ElasticWire, confirmed: bool) -> None:
    closed: list[str] = []
    flight = RoundInFlight(round_wire, lambda: confirmed, lambda: closed.append("all"))
    parts = [flight.start(lambda wire, number=number: number) for number in range(2)]
    flight.depart()
    if confirmed:
        assert [part.wait() for part in parts] == [0, 1]
    else:
        for part in parts:
            with pytest.raises(LostPeerError, match="could not finish"):
                part.wait()
    assert closed == ([] if confirmed else ["all"])
    assert flight.ended
    assert not flight.in_doubt


def test_an_error_in_a_round_in_flight_ends_its_later_works(round_wire: ElasticWire) -> None:
    flight, made = RoundInFlight(round_wire, lambda: True, lambda: None), list[int]()

    def fail(wire: Wire) -> None:
        made.append(1)
        raise ZeroDivisionError

    parts = [flight.start(fail), flight.start(lambda wire: made.append(2))]
    flight.depart()
    for part in parts:
        with pytest.raises(ZeroDivisionError):
            part.wait()
    assert made == [1]
    assert not flight.in_doubt


def test_a_round_that_is_called_off_keeps_nobody_waiting(round_wire: ElasticWire) -> None:
    flight = RoundInFlight(round_wire, lambda: True, lambda: None)
    part = flight.start(lambda wire: None)
    flight.call_off(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        part.wait()
