"""The log of members."""

from lightning_sparsecomm.elastic.membership import Membership


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
