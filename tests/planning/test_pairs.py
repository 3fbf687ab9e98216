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


def links(ranks: int = 4, **slow: float) -> list[Pair]:
    """The last rank is slow."""
    usual = {"rtt": 0.001, "bandwidth": 1e9}
    pairs = itertools.combinations(range(ranks), 2)
    return [Pair(pair, **(usual | slow if ranks - 1 in pair else usual)) for pair in pairs]


@pytest.mark.parametrize("ranks", [3, 4, 5, 8])
@pytest.mark.parametrize("slow", [{"rtt": 0.1}, {"bandwidth": 1e8}])
def test_the_links_of_a_slow_rank_are_named(ranks: int, slow: dict[str, float]) -> None:
    """Of three ranks, two links of three are those of the slow one."""
    assert slow_links(links(ranks)) == []
    assert [pair.ranks for pair in slow_links(links(ranks, **slow))] == [(rank, ranks - 1) for rank in range(ranks - 1)]


def test_one_slow_link_is_named() -> None:
    pairs = [Pair((0, 1), 0.1, 1e9), *links()[1:]]
    assert [pair.ranks for pair in slow_links(pairs)] == [(0, 1)]


def test_between_two_nodes_no_rank_is_slow() -> None:
    """Links inside are faster, and all ranks have as many of each."""
    fast = [(0, 1), (2, 3)]
    pairs = [Pair(pair, 0.0001 if pair in fast else 0.01, 1e9) for pair in itertools.combinations(range(4), 2)]
    assert slow_links(pairs) == []


def test_of_one_link_none_is_slow() -> None:
    assert slow_links(links(2, rtt=1.0)) == []
