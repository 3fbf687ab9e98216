"""The links between each two ranks."""

import itertools
from pathlib import Path

import pytest

from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.planning.pairs import Pair, measure_pairs, pairings, slow_links
from tests.distributed.launch import run_ranks


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_each_two_ranks_meet_once(ranks: int) -> None:
    met = [pair for together in pairings(ranks) for pair in together]
    assert sorted(met) == list(itertools.combinations(range(ranks), 2))
    for together in pairings(ranks):
        taking_part = [rank for pair in together for rank in pair]
        assert len(taking_part) == len(set(taking_part))


def test_one_rank_meets_nobody() -> None:
    assert [pair for together in pairings(1) for pair in together] == []


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_know_all_pairs(tmp_path: Path, ranks: int) -> None:
    found = run_ranks(tmp_path, ranks, lambda rank: measure_pairs(Wire()))
    assert all(each == found[0] for each in found)
    assert [pair.ranks for pair in found[0]] == list(itertools.combinations(range(ranks), 2))
    assert all(pair.rtt > 0 and pair.bandwidth > 0 for pair in found[0])


def links(**slow: float) -> list[Pair]:
    """Four ranks, one of which is slow."""
    usual = {"rtt": 0.001, "bandwidth": 1e9}
    return [Pair(pair, **(usual | slow if 3 in pair else usual)) for pair in itertools.combinations(range(4), 2)]


def test_slow_links_are_named() -> None:
    assert slow_links(links()) == []
    # Half of six links are those of the slow rank, which is still no median.
    assert {pair.ranks for pair in slow_links([*links(rtt=0.1), *links()])} == {(0, 3), (1, 3), (2, 3)}
    assert {pair.ranks for pair in slow_links([*links(bandwidth=1e8), *links()])} == {(0, 3), (1, 3), (2, 3)}


def test_of_two_links_none_is_slow() -> None:
    assert slow_links(links(rtt=1.0)[:2]) == []
