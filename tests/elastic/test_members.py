"""Plans of meetings: who exchanges, who joins, and what becomes of an exchange that some replicas have committed."""

import math
from typing import cast

import pytest

from lightning_sparsecomm.elastic.joining import Joining
from lightning_sparsecomm.elastic.lead import Lead
from lightning_sparsecomm.elastic.members import NOTHING, Member, Offer, pace_of, plan_of, successor, weights_of

OFFER = Offer(0, [0], "weights", 9, 0.5, 100)


def member(name: str, state: str = "s", round_: int = 3, pending: str = NOTHING, **options: object) -> Member:
    fields = {"steps": 10, "setup": {"method": "m"}, "offer": OFFER, **options}
    return Member(name, state, round_, pending, **fields)  # type: ignore[arg-type]


def test_members_travel_as_text() -> None:
    for each in (member("a"), member("b", offer=None), member("c", offer=OFFER._replace(length=math.inf))):
        assert Member.from_json(each.to_json()) == each


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "a"}', '{"offer": null}'])
def test_text_that_is_no_member_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be read|Expecting value"):
        Member.from_json(text)


def test_those_that_share_a_state_exchange() -> None:
    plan = plan_of([member("a"), member("b"), member("c")], 1)
    assert (plan.healthy, plan.joining, plan.leader, plan.offer) == ([0, 1, 2], [], 0, OFFER)


def test_new_ones_join_and_do_not_lead() -> None:
    plan = plan_of([member("a", NOTHING, 0, steps=0, offer=None), member("b"), member("c")], 1)
    assert (plan.healthy, plan.joining, plan.leader, plan.state) == ([1, 2], [0], 1, "s")


def test_the_one_whose_run_has_come_furthest_leads() -> None:
    assert plan_of([member("a", behind=4), member("b"), member("c")], 1).leader == 1
    assert plan_of([member("a", steps=9), member("b", behind=3), member("c", steps=8)], 1).leader == 0


def test_among_equals_the_one_that_has_led_goes_on() -> None:
    assert plan_of([member("a"), member("b", leads=True), member("c")], 1).leader == 1
    assert plan_of([member("a", leads=True), member("b", leads=True), member("c")], 1).leader == 0
    assert plan_of([member("a"), member("b", leads=True), member("c", behind=-1)], 1).leader == 2
    back = member("a", NOTHING, 0, steps=9, leads=True)
    assert plan_of([back, member("b"), member("c")], 1).leader == 1


@pytest.mark.parametrize(("behind", "slower", "short"), [(0, 0, 0), (4, 0, 4), (0, 3, 6)])
def test_one_that_is_behind_the_leader_and_takes_its_place_knows_how_far(behind: int, slower: int, short: int) -> None:
    """The leader has made 10 steps, and may make 5 more before the next meeting; a slower one makes 2."""
    lead = Lead(cast(Joining, None))
    offer = OFFER._replace(trained=5)
    both = [member("a", offer=offer), member("b", steps=10 - slower, behind=behind, offer=offer)]
    alone = [member("b", steps=15 - 2 * slower, behind=behind, offer=offer)]
    assert lead.note(plan_of(both, 1), both, 1) is False
    assert lead.note(plan_of(alone, 2), alone, 0) is True
    assert lead.short == short
    assert lead.note(plan_of(alone, 3), alone, 0) is True
    assert lead.short == short


@pytest.mark.parametrize(("steps", "behind", "short"), [(15, 0, 0), (15, 8, 8)])
def test_one_that_has_joined_and_takes_the_leaders_place_knows_how_far(steps: int, behind: int, short: int) -> None:
    """It gets the leader's counts, and goes on by them, or by its own where its Trainer has been amid the training."""
    lead, offer = Lead(cast(Joining, None)), OFFER._replace(trained=5)
    joins = [member("a", offer=offer), member("b", NOTHING, 0, steps=2)]
    alone = [member("b", steps=steps, behind=behind, offer=offer)]
    assert lead.note(plan_of(joins, 1), joins, 1) is False
    assert lead.note(plan_of(alone, 2), alone, 0) is True
    assert lead.short == short


def test_one_that_takes_the_lead_from_one_that_is_still_there_goes_on_at_once() -> None:
    """Replicas that exchange fragments meet more often than once in the steps behind one's change."""
    lead, offer = Lead(cast(Joining, None)), OFFER._replace(trained=6)
    ahead = [member("a", steps=9, offer=offer), member("b", steps=12, offer=offer)]
    level = [member("a", steps=12, offer=offer), member("b", steps=12, offer=offer)]
    assert lead.note(plan_of(ahead, 1), ahead, 0) is False
    assert lead.note(plan_of(level, 2), level, 0) is True
    assert lead.short == 0


def test_the_one_with_most_steps_begins_a_run() -> None:
    new = [member(name, NOTHING, 0, steps=steps, offer=None) for name, steps in (("a", 0), ("b", 50), ("c", 50))]
    plan = plan_of(new, 7)
    assert (plan.healthy, plan.joining, plan.round, plan.offer) == ([1], [0, 2], 0, None)
    assert plan.state == successor(NOTHING, ["b"], 7) != NOTHING


def test_one_that_has_fallen_behind_joins() -> None:
    plan = plan_of([member("a", "old", 2), member("b", "new", 3)], 1)
    assert (plan.state, plan.healthy, plan.joining) == ("new", [1], [0])


def test_of_two_states_of_equally_many_rounds_the_more_frequent_counts() -> None:
    plan = plan_of([member("a", "x"), member("b", "y"), member("c", "y")], 1)
    assert (plan.state, plan.healthy, plan.joining) == ("y", [1, 2], [0])
    assert plan_of([member("a", "x"), member("b", "y")], 1).state == "x"


def test_an_exchange_that_one_has_committed_all_commit() -> None:
    """a and c do not know whether others have; b does. So they commit, and take part in what b has to exchange."""
    behind = OFFER._replace(step=9)
    ahead = OFFER._replace(step=19)
    plan = plan_of(
        [
            member("a", "s", 3, "t", offer=behind),
            member("b", "t", 4, offer=ahead),
            member("c", "s", 3, "t", offer=behind),
        ],
        1,
    )
    assert (plan.state, plan.round, plan.healthy, plan.joining, plan.offer) == ("t", 4, [0, 1, 2], [], ahead)


def test_an_exchange_that_nobody_has_committed_is_repeated() -> None:
    plan = plan_of([member("a", pending="t"), member("c", pending="t")], 1)
    assert (plan.state, plan.healthy, plan.offer) == ("s", [0, 1], OFFER)


def _after(steps: int, seconds: float = 0.0, **options: object) -> Member:
    return member("a", offer=OFFER._replace(trained=steps, step_seconds=seconds), **options)  # type: ignore[arg-type]


def test_changes_count_by_the_steps_behind_them() -> None:
    members = [_after(10), _after(30), member("c", NOTHING, 0, offer=None)]
    assert weights_of(members, plan_of(members, 1)) == {0: 0.5, 1: 1.5}
    alike = [_after(7), _after(7), _after(7)]
    assert weights_of(alike, plan_of(alike, 1)) == dict.fromkeys(range(3), 1.0)
    nothing = [_after(0), _after(0)]
    assert weights_of(nothing, plan_of(nothing, 1)) == {0: 1.0, 1: 1.0}


def test_changes_count_by_the_samples_behind_them() -> None:
    def trained(steps: int, samples: int | None, **options: object) -> Member:
        return _after(steps, **options)._replace(offer=OFFER._replace(trained=steps, samples=samples))  # type: ignore[arg-type]

    new = member("c", NOTHING, 0, offer=None)
    members = [trained(10, 80), trained(10, 240), new]
    assert weights_of(members, plan_of(members, 1)) == {0: 0.5, 1: 1.5}
    # Three times as many steps with a third of the batch.
    alike = [trained(30, 7 * 30), trained(10, 7 * 30), trained(15, 7 * 30)]
    assert weights_of(alike, plan_of(alike, 1)) == dict.fromkeys(range(3), 1.0)
    # It knows that it has trained nothing, though others do by now.
    joined = [trained(10, 0), trained(10, 30), trained(10, 60)]
    assert weights_of(joined, plan_of(joined, 1)) == {0: 0.0, 1: 1.0, 2: 2.0}
    nothing = [trained(3, 0), trained(3, 0)]
    assert weights_of(nothing, plan_of(nothing, 1)) == {0: 1.0, 1: 1.0}
    assert Member.from_json(members[1].to_json()) == members[1]
    # Of those that exchange, one does not know its samples: steps count for all.
    unknown = [trained(10, 80), trained(30, None), trained(20, 10_000)]
    assert weights_of(unknown, plan_of(unknown, 1)) == {0: 0.5, 1: 1.5, 2: 1.0}


def test_gradients_count_by_the_samples_of_the_step() -> None:
    offer = OFFER._replace(kind="gradients", trained=1)
    counts: list[tuple[int, int | None]] = [(0, 0), (1, 8), (1, 24)]
    members = [member("a", offer=offer._replace(trained=each, samples=samples)) for each, samples in counts]
    assert weights_of(members, plan_of(members, 1)) == {0: 0.0, 1: 0.75, 2: 2.25}
    members[2] = member("c", offer=offer)
    assert weights_of(members, plan_of(members, 1)) == {0: 0.0, 1: 1.5, 2: 1.5}


def test_with_several_optimizers_all_count_alike() -> None:
    members = [_after(10), member("b", offer=OFFER._replace(trained=30, optimizer=1))]
    assert weights_of(members, plan_of(members, 1)) == {0: 1.0, 1: 1.0}


def test_one_that_commits_only_now_has_trained_nothing_since() -> None:
    members = [_after(10, pending="t"), _after(10, state="t", round_=4)]
    assert weights_of(members, plan_of(members, 1)) == {0: 0.0, 1: 2.0}


def test_one_that_commits_only_now_counts_by_what_it_has_trained_in_flight() -> None:
    in_doubt = member("a", pending="t", offer=OFFER._replace(trained=12, since=2))
    plan = plan_of([in_doubt, _after(10, state="t", round_=4)], 1)
    assert weights_of([in_doubt, _after(10, state="t", round_=4)], plan) == {0: 2 / 6, 1: 10 / 6}
    numbered = in_doubt._replace(offer=OFFER._replace(trained=12, since=2, samples=96, samples_since=16))
    other = member("b", "t", 4, offer=OFFER._replace(trained=2, samples=48))
    assert weights_of([numbered, other], plan_of([numbered, other], 1)) == {0: 0.5, 1: 1.5}
    # If nobody has committed to its exchange, all of it counts.
    both = [in_doubt, _after(10)]
    assert weights_of(both, plan_of(both, 1)) == {0: 12 / 11, 1: 10 / 11}
    assert Member.from_json(in_doubt.to_json()) == in_doubt


def test_the_pace_is_that_of_the_fastest() -> None:
    members = [_after(10, 0.1), _after(10, 0.4), _after(10, 0.105), _after(10)]
    plan = plan_of(members, 1)
    assert [pace_of(rank, members, plan) for rank in range(4)] == [1.0, 0.25, 1.0, 1.0]


def test_those_set_up_otherwise_are_refused() -> None:
    other = member("b", NOTHING, 0, setup={"method": "n"}, offer=None)
    plan = plan_of([other, member("a")], 1)
    assert (plan.refused, plan.healthy, plan.joining) == ({0: "method"}, [1], [])
    # What only some can say yet is not compared.
    new = member("c", NOTHING, 0, setup={"method": "m"}, offer=None)
    assert plan_of([member("a", setup={"method": "m", "more": "x"}), new], 1).refused == {}


def test_one_that_is_set_up_otherwise_and_has_yet_to_commit_is_refused() -> None:
    """It comes first. It has no gradients of the state that the other has, which is not refused by its word."""
    gradients = OFFER._replace(kind="gradients")
    late = member("a", "before", 2, pending="s", setup={"method": "other"}, offer=gradients)
    plan = plan_of([late, member("b", offer=gradients)], 1)
    assert (plan.refused, plan.healthy, plan.exchanging, plan.leader) == ({0: "method"}, [1], [1], 1)


def test_states_have_names_of_their_own() -> None:
    names = {
        successor("s", ["a", "b"], 1),
        successor("s", ["a"], 1),
        successor("s", ["a", "b"], 2),
        successor("t", ["a", "b"], 1),
    }
    assert len(names) == 4


def test_offers_tell_the_end() -> None:
    last = OFFER._replace(last=True)
    assert plan_of([member("a"), member("b", offer=last)], 1).ends
    assert not plan_of([member("a"), member("b")], 1).ends


def test_gradients_are_exchanged_by_those_that_have_made_the_step_before() -> None:
    """One that commits only now has its own step to make: it stays out, and falls behind."""
    offer = OFFER._replace(kind="gradients", trained=1)
    late = member("a", "s", 3, pending="t", offer=offer)
    plan = plan_of([late, member("b", "t", 4, offer=offer), member("c", "t", 4, offer=offer)], 1)
    assert (plan.healthy, plan.exchanging, plan.joining, plan.leader) == ([0, 1, 2], [1, 2], [], 1)


def test_gradients_of_another_optimizer_are_of_no_use() -> None:
    first, second = (OFFER._replace(kind="gradients", optimizer=number, trained=1) for number in (0, 1))
    plan = plan_of([member("a", offer=first), member("b", offer=second), member("c", offer=second)], 1)
    assert (plan.offer, plan.exchanging, plan.joining) == (second, [1, 2], [0])


def test_the_settings_of_one_that_has_come_as_far_as_any_count() -> None:
    away = OFFER._replace(kind="gradients", trained=0, epoch=0.9, settings=({"lr": 3.0},))
    behind = OFFER._replace(kind="gradients", trained=1, epoch=0.2, settings=({"lr": 2.0},))
    leading = OFFER._replace(kind="gradients", trained=1, epoch=0.5, settings=({"lr": 1.0},))
    members = [member("a", offer=away), member("b", offer=behind), member("c", offer=leading)]
    plan = plan_of(members, 1)
    assert plan.offer == leading
    assert weights_of(members, plan) == {0: 0.0, 1: 1.5, 2: 1.5}
    assert Member.from_json(members[2].to_json()) == members[2]


def test_weights_that_differ_are_replaced_by_those_of_most() -> None:
    members = [member("a", weights="x"), member("b", weights="y"), member("c", weights="y"), member("d")]
    plan = plan_of(members, 1)
    assert (plan.differing, plan.joining, plan.healthy) == ([0], [0], [1, 2, 3])


def test_one_that_stops_early_does_not_take_the_meeting_over() -> None:
    ending, training = OFFER._replace(kind="end"), OFFER._replace(kind="gradients", trained=1)
    plan = plan_of([member("a", offer=ending), member("b", offer=training)], 1)
    assert (plan.offer, plan.exchanging, plan.joining) == (training, [1], [0])


def test_one_with_a_step_to_make_stays_out_of_the_last_exchange() -> None:
    ending, training = OFFER._replace(kind="end"), OFFER._replace(kind="gradients", trained=1)
    late = member("a", "s", 3, pending="t", offer=training)
    plan = plan_of([late, member("b", "t", 4, offer=ending), member("c", "t", 4, offer=ending)], 1)
    assert (plan.offer, plan.exchanging, plan.joining) == (ending, [1, 2], [])


def test_gradients_of_old_weights_alone_count_for_nothing() -> None:
    members = [member("a", offer=OFFER._replace(kind="gradients", trained=0))]
    assert weights_of(members, plan_of(members, 1)) == {0: 0.0}
