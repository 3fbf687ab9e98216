"""The local modes of the paper, divided by W as a whole."""

import pytest

from lightning_sparsecomm.sharing.local_mode import LOCAL_MODES, LocalMode


def seen(mode: LocalMode, own: float, sent: float, mean_sent: float, ranks: int) -> float:
    return mode.own * own / ranks + mode.shared * mean_sent + mode.sent * sent / ranks


@pytest.mark.parametrize("mode", LOCAL_MODES)
def test_it_is_the_papers_sum_over_ranks_divided_by_their_number(mode: str) -> None:
    own, sent, of_others, ranks = 7.0, 5.0, 11.0, 4
    total = sent + of_others
    # Section 3, for the sum G of what all sent: G, (G + g) / 2 since each counts once, and G − S + g.
    paper = {"none": total, "sum": (total + own) / 2, "partial": total - sent + own}[mode]
    assert seen(LOCAL_MODES[mode], own, sent, total / ranks, ranks) == pytest.approx(paper / ranks)


def test_replicas_drift_where_the_optimizer_sees_the_ranks_own_gradient() -> None:
    assert {name: mode.drifts for name, mode in LOCAL_MODES.items()} == {"none": False, "sum": True, "partial": True}


def test_a_rank_alone_that_sends_all_sees_its_gradient() -> None:
    for name in LOCAL_MODES:
        assert seen(LOCAL_MODES[name], own=6, sent=6, mean_sent=6, ranks=1) == 6
