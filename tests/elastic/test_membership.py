"""The log of members."""

from lightning_sparsecomm.elastic.membership import Membership, short


def test_only_changes_are_noted() -> None:
    membership = Membership()
    assert membership.meet(["a:1", "b:2"], 0) is not None
    assert membership.meet(["a:1", "b:2"], 1) is None
    change = membership.meet(["a:1"], 2)
    assert change is not None
    assert (change.round, change.members, change.joined, change.gone) == (2, ("a:1",), (), ("b:2",))
    assert len(membership.changes) == 2


def test_a_change_is_one_line() -> None:
    membership = Membership()
    first = membership.meet(["a:1", "b:2"], 0)
    assert str(first) == "sparsecomm: after round 0, a, b joined; 2 replicas from now on"
    membership.fail()
    second = membership.meet(["a:1", "c:3"], 5)
    assert str(second) == "sparsecomm: after round 5, c joined and b left (lost in an exchange); 2 replicas from now on"
    assert second is not None
    assert second.why == "lost in an exchange"
    third = membership.meet(["a:1"], 6, steps=30)
    assert str(third).endswith(
        "c left (did not come to the next round), with about 30 steps since the last exchange; 1 replica from now on"
    )
    assert third is not None
    assert third.lost_steps == 30
    fourth = membership.meet(["a:1", "d:4"], 7, steps=30)
    assert fourth is not None and fourth.lost_steps == 0


def test_one_that_joins_amid_a_run_does_not_say_that_all_have_joined() -> None:
    change = Membership().meet(["a:1", "b:2", "c:3", "d:4"], 37, joining=["b:2", "d:4"], own="d:4")
    assert str(change) == "sparsecomm: after round 37, d, b joined; 4 replicas from now on"


def test_one_that_joins_before_the_first_exchange_does_not_either() -> None:
    change = Membership().meet(["a:1", "b:2"], 0, joining=["b:2"], own="b:2")
    assert str(change) == "sparsecomm: after round 0, b joined; 2 replicas from now on"


def test_one_that_was_away_says_so_though_the_same_replicas_are_there() -> None:
    membership = Membership()
    membership.meet(["a:1", "b:2", "c:3"], 4, own="b:2")
    change = membership.meet(["a:1", "b:2", "d:4"], 9, joining=["b:2", "d:4"], own="b:2", own_rounds=5)
    assert str(change) == (
        "sparsecomm: after round 9, b joined again (away since round 5) and d joined and c left"
        " (did not come to the next round); 3 replicas from now on"
    )
    again = membership.meet(["a:1", "b:2", "d:4"], 12, joining=["b:2"], own="b:2")
    assert again is not None
    assert (again.joined, again.gone, again.behind_since) == (("b:2",), (), 9)
    assert str(again) == "sparsecomm: after round 12, b joined again (away since round 9); 3 replicas from now on"


def test_the_end_says_how_many_took_part() -> None:
    membership = Membership()
    assert membership.summary == "1 replica"
    membership.meet(["a:1", "b:2"], 0)
    assert membership.summary == "2 replicas at the end; 0 changes of members, 0 exchanges repeated"
    membership.fail()
    membership.meet(["a:1"], 3)
    assert membership.summary == "1 replica at the end, 1 to 2 in the run; 1 change of members, 1 exchange repeated"


def test_names_may_have_colons() -> None:
    assert [short(name) for name in ("node:1:3f2a", "a:3f2a", "a")] == ["node:1", "a", "a"]
