"""Samples behind steps: of accumulated batches, of several steps in a batch, and where nobody knows."""

import math

from lightning_sparsecomm.run.sample_counts import SampleCounts


def counted(*steps: list[float], keep: int = 10) -> SampleCounts:
    counts = SampleCounts()
    for batches in steps:
        for samples in batches:
            counts.add(samples)
        counts.step(keep)
    return counts


def test_all_batches_since_the_step_before_are_behind_a_step() -> None:
    counts = counted([8, 8, 3], [8])
    assert [counts.behind(steps) for steps in range(3)] == [0, 8, 27]
    counts.add(4)
    counts.add(5)
    assert counts.next == 9


def test_a_second_step_in_a_batch_has_its_samples_again() -> None:
    counts = counted([8], [], [4, 4], [])
    assert [counts.behind(steps) for steps in range(1, 5)] == [4, 12, 20, 28]


def test_what_is_unknown_stays_so_until_it_counts() -> None:
    counts = counted([8], [8, math.nan], [8], [8])
    assert counts.behind(2) == 16
    assert math.isnan(counts.behind(3))
    # Before the first batch, and before the first step that is known.
    assert math.isnan(SampleCounts().next)
    assert math.isnan(counted([8]).behind(2))


def test_no_more_is_kept_than_may_still_count() -> None:
    counts = counted([1], [2], [3], keep=2)
    assert counts.state_dict() == [2, 3]
    counts.step(keep=0)
    assert counts.state_dict() == []
    assert counts.behind(0) == 0


def test_a_rank_that_gets_the_state_of_others_has_trained_nothing_of_it() -> None:
    counts = counted([8], [8])
    counts.lack(3)
    assert counts.behind(3) == 0
    counts.add(5)
    counts.step(keep=10)
    assert (counts.behind(4), counts.behind(1)) == (5, 5)


def test_it_is_saved() -> None:
    other = SampleCounts()
    other.load_state_dict(counted([8], [3]).state_dict())
    assert other.behind(2) == 11
