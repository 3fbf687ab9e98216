"""What collectives take."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from lightning_sparsecomm.basis.far import straight
from lightning_sparsecomm.basis.ledger import link_bytes
from lightning_sparsecomm.commands.probe import _as_dict
from lightning_sparsecomm.planning import MeasuredLink, Network

EXACT = {"call": 0.0, "copying": 0.0}


def test_a_large_sum_takes_its_bytes_by_the_rate() -> None:
    network = Network(100e6, **EXACT)
    taken = network.seconds("all_reduce", 44e6, 4)
    assert taken == pytest.approx(8 * link_bytes("all_reduce", 44e6, 4) / 100e6, rel=0.07)
    # Headers: 90 bytes in each packet of 1,448.
    assert taken > 8 * link_bytes("all_reduce", 44e6, 4) / 100e6


def test_a_small_collective_takes_its_hops() -> None:
    """Each takes a round trip; over a high-latency link, ours goes straight to all, in one."""
    far, near = Network(1e12, rtt=0.1, **EXACT), Network(1e12, rtt=0.001, **EXACT)
    for kind, count in (("all_reduce", 6), ("all_gather", 3), ("all_to_all", 1), ("send", 1)):
        assert near.seconds(kind, 8, 4) == pytest.approx(count * 0.001)
        assert far.seconds(kind, 8, 4, ring=True) == pytest.approx(count * 0.1)
        assert far.seconds(kind, 8, 4) == pytest.approx(0.1)


def test_nothing_is_sent_on_one_rank() -> None:
    assert Network(1e6, rtt=1.0).seconds("all_reduce", 1e9, 1) == 0


def test_length_costs_more_than_its_hops_while_tcp_opens_its_window() -> None:
    near, far = Network(100e6, **EXACT), Network(100e6, rtt=0.1, **EXACT)
    more = far.seconds("all_gather", 1e6, 2) - near.seconds("all_gather", 1e6, 2)
    # A round trip, and six doublings from 14 kB to 1 MB.
    assert more == pytest.approx(0.1 + 0.1 * math.log2(1e6 / 14480))
    small = far.seconds("all_gather", 1e4, 2) - near.seconds("all_gather", 1e4, 2)
    assert small == pytest.approx(0.1)


def test_a_window_is_halved_for_each_timeout_that_the_connection_was_idle() -> None:
    """RFC 2861, as in Linux: a time-out is a round trip and 200 ms, and each halving costs a round trip."""
    network = Network(100e6, rtt=0.1, **EXACT)
    closed, opened = (network.seconds("all_gather", 1e6, 2, idle=idle) for idle in (math.inf, 0.0))
    assert closed - opened == pytest.approx(0.1 * math.log2(1e6 / 14480))
    for timeouts in (1, 3):
        assert network.seconds("all_gather", 1e6, 2, idle=timeouts * 0.3) - opened == pytest.approx(timeouts * 0.1)
    assert network.seconds("all_gather", 1e6, 2, idle=3600.0) == closed
    near = Network(1e9, rtt=0.02, **EXACT)
    more = near.seconds("all_gather", 1e6, 2, idle=0.22) - near.seconds("all_gather", 1e6, 2, idle=0.0)
    assert more == pytest.approx(0.02)


def test_a_sum_around_the_ring_finds_the_window_too_small_only_at_first() -> None:
    network = Network(1e9, rtt=0.1, **EXACT)
    first, later, at_once = (
        network.seconds("all_reduce", 44e6, 2, ring=True, idle=idle) for idle in (math.inf, 0.6, 0.0)
    )
    assert later == at_once
    assert first - later == pytest.approx(0.1 * math.log2(2 * 44e6 / 42 / 14480), rel=0.05)


def test_the_fastest_gather_tells_the_rate_where_the_window_slows_down_a_larger_one() -> None:
    """Measured over 1 Gbit/s: 8 MiB waited for two round trips more than 2 MiB."""
    gathers = [(256.0, 0.1006), (131_072.0, 0.1378), (2_097_152.0, 0.1423), (8_388_608.0, 0.3284)]
    link = MeasuredLink(2, {"all_reduce": [(256.0, 0.1005)], "all_gather": gathers}, around=0.2004)
    assert link.rate_is_known
    assert link.bandwidth == pytest.approx(427e6, rel=0.01)
    # Where the largest took longer than any window, a smaller one is faster by chance.
    slow = [*gathers[:2], (2_097_152.0, 0.24), (8_388_608.0, 1.2)]
    link = MeasuredLink(2, {"all_reduce": [(256.0, 0.1005)], "all_gather": slow}, around=0.2004)
    assert link.bandwidth == pytest.approx(8 * 8_388_608 * 1538 / 1448 / 1.0994, rel=0.01)


def test_a_ring_passes_two_segments_in_a_round_trip_whatever_its_rate() -> None:
    """Of 1 MiB each, as Gloo's sums do."""
    for ranks, passed in ((2, 21), (4, 33)):
        network = Network(math.inf, rtt=0.1, **EXACT)
        sums = network.seconds("all_reduce", 42 * 2**20, ranks, ring=True, idle=0.0)
        # Once to add up, and once to pass on the sums.
        assert sums == pytest.approx(2 * 0.1 * math.ceil(passed / 2))
    # A slower link is filled by them, but for the last of an odd number.
    network = Network(10e6, rtt=0.1, **EXACT)
    taken = network.seconds("all_reduce", 44e6, 2, ring=True, idle=0.0)
    assert taken == pytest.approx(8 * 44e6 / 10e6 * 1538 / 1448 + 2 * 0.1)


@pytest.mark.parametrize(
    ("ranks", "rate", "rtt", "size", "measured"),
    [
        (2, 1e8, 0.02, 6e6, 0.5625),
        (2, 1e8, 0.1, 6e6, 0.8021),
        (2, 1e9, 0.02, 6e6, 0.1125),
        (2, 1e9, 0.1, 6e5, 0.2375),
        (2, 1e9, 0.1, 6e6, 0.4349),
        (4, 1e8, 0.1, 6e5, 0.6499),
        (4, 1e9, 0.02, 6e6, 0.1725),
    ],
)
def test_sums_around_the_ring_take_what_was_measured(
    ranks: int, rate: float, rtt: float, size: float, measured: float
) -> None:
    """Rows of docs/network.md, section "High-latency links": calls that follow one another."""
    predicted = Network(rate, rtt).seconds("all_reduce", size, ranks, ring=True, idle=0.0)
    assert predicted == pytest.approx(measured, rel=0.15)


def test_a_step_that_round_trips_alone_explain_tells_how_low_the_rate_cannot_be() -> None:
    sizes = (8.0, 131_072.0)
    points = {kind: [(size, Network(1e8, 0.1).seconds(kind, size, 2)) for size in sizes] for kind in POINTS}
    link = MeasuredLink(2, points, around=0.2)  # type: ignore[arg-type]

    def predicted(each: MeasuredLink) -> float:
        return each.seconds("all_reduce", 44e6, 2, ring=True, idle=0.0)

    # By a gather that a lost packet has held up, it would take far longer.
    assert predicted(link) > 10
    fitted = link.fitted(predicted, 1.9)
    round_trips = Network(1e12, 0.1).seconds("all_reduce", 44e6, 2, ring=True, idle=0.0)
    assert predicted(fitted) == pytest.approx(max(1.9, round_trips) / 0.9, rel=0.01)
    assert fitted.bandwidth > 5 * link.bandwidth
    # A faster link may be as fast as it seems.
    faster = replace(link, rate=1e10)
    assert faster.fitted(predicted, 1.9) == faster
    assert predicted(link.fitted(predicted, 4.0)) == pytest.approx(4.0, rel=0.01)


def test_without_length_or_limit_there_is_no_window() -> None:
    for network in (Network(math.inf, **EXACT), Network(1e9, **EXACT)):
        assert network.seconds("all_gather", 1e6, 2) == network.seconds("all_gather", 1e6, 2, idle=0.0) < 0.01
    far = Network(math.inf, rtt=0.1, **EXACT)
    assert far.seconds("all_gather", 1e6, 2, idle=0.0) == pytest.approx(0.1)
    assert far.seconds("all_gather", 1e6, 2) == pytest.approx(0.1 + 0.1 * math.log2(1e6 / 14480))


def test_the_second_call_of_a_straight_sum_finds_the_window_open() -> None:
    network = Network(1e9, rtt=0.1, **EXACT)
    assert [kind for kind, _ in straight("all_reduce", 1e6, 4, far=0.128)] == ["all_to_all", "all_gather"]
    more = network.seconds("all_reduce", 1e6, 4) - network.seconds("all_reduce", 1e6, 4, idle=0.0)
    # A quarter to each of the others.
    assert more == pytest.approx(0.1 * math.log2(250e3 / 14480))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bandwidth", 0.0),
        ("bandwidth", math.nan),
        ("bandwidth", "100mbit"),
        ("rtt", -1.0),
        ("rtt", "20ms"),
        ("call", -1e-4),
        ("copying", math.inf),
    ],
)
def test_impossible_networks_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .*; got {value!r}"):
        Network(**{"bandwidth": 1e8, name: value})


def test_a_network_is_straight_or_not() -> None:
    with pytest.raises(TypeError, match="straight must be True or False; got 1"):
        Network(1e8, straight=1)  # type: ignore[arg-type]


POINTS = {
    "all_reduce": [(8.0, 0.006), (1e5, 0.02), (1e6, 0.12)],
    "all_gather": [(8.0, 0.003), (1e6, 0.25)],
}


def test_a_measured_link_is_straight_between_its_points() -> None:
    link = MeasuredLink(4, POINTS)
    assert link.seconds("all_reduce", 1e5, 4) == pytest.approx(0.02)
    assert link.seconds("all_reduce", 5.5e5, 4) == pytest.approx(0.07)
    # The last line goes on.
    assert link.seconds("all_reduce", 1e7, 4) == pytest.approx(0.02 + 0.1 * (1e7 - 1e5) / 9e5)
    assert link.latency == pytest.approx(0.001)
    assert link.bandwidth == pytest.approx(8 * (1e6 - 8) * 1.5 / 0.114)


def test_an_all_to_all_takes_as_long_as_a_gather_of_a_part() -> None:
    for link in (MeasuredLink(4, POINTS), Network(1e9, 0.1)):
        assert link.seconds("all_to_all", 4e4, 4) == pytest.approx(link.seconds("all_gather", 1e4, 4))
    assert MeasuredLink(4, POINTS).seconds("send", 3e4, 4) == MeasuredLink(4, POINTS).seconds("all_gather", 1e4, 4)


def test_software_takes_its_time_for_each_message() -> None:
    network = Network(1e12, rtt=0.001, call=0.01)
    assert network.seconds("send", 8, 4) == pytest.approx(0.031)


def test_noise_never_makes_more_bytes_cheaper() -> None:
    link = MeasuredLink(2, {"all_reduce": [(8.0, 0.001), (1000.0, 0.0005)], "all_gather": POINTS["all_gather"]})
    assert link.seconds("all_reduce", 1e9, 2) >= 0.0005
    assert link.bandwidth == math.inf


def test_a_link_measured_with_other_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="measured with 4 ranks and all_reduce, all_gather; got 8 ranks"):
        MeasuredLink(4, POINTS).seconds("all_reduce", 1, 8)


@pytest.mark.parametrize("rate", [1e8, 1e9])
def test_a_far_links_rate_is_fitted_to_something_large(rate: float) -> None:
    """What can be measured in a second over 100 ms fits into TCP's opening window, and tells little of the rate."""
    network, sizes = Network(rate, rtt=0.1), (8.0, 131_072.0)
    link = MeasuredLink(
        2,
        {
            "all_reduce": [(size, network.seconds("all_reduce", size, 2)) for size in sizes],
            "all_gather": [(size, network.seconds("all_gather", size, 2)) for size in sizes],
        },
        around=network.seconds("all_reduce", 8, 2, ring=True),
    )
    assert link.is_far
    large = network.seconds("all_reduce", 44e6, 2)
    assert link.seconds("all_reduce", 44e6, 2) > 1.5 * large
    fitted = link.fitted(lambda each: each.seconds("all_reduce", 44e6, 2), large)
    assert fitted.rate_is_known
    assert fitted.bandwidth == pytest.approx(rate, rel=0.05)
    for size in (131_072, 22e6):
        assert fitted.seconds("all_reduce", size, 2) == pytest.approx(network.seconds("all_reduce", size, 2), rel=0.05)
        opening, expected = (
            each.seconds("all_reduce", size, 2, idle=0.6) - each.seconds("all_reduce", size, 2, idle=0.0)
            for each in (fitted, network)
        )
        assert opening == pytest.approx(expected, abs=0.01)
        assert expected == pytest.approx(0.2)
    # Two of DDP's buckets at a time, over a measured link too.
    ours, expected = (each.buckets_seconds([30e6, 30e6], 2) for each in (fitted, network))
    assert ours == pytest.approx(expected, rel=0.05)


def test_a_wire_that_was_far_when_the_run_began_is_measured_on_a_way_that_is_near() -> None:
    gathers = [(256.0, 2e-4), (65_536.0, 6e-4)]
    link = MeasuredLink(2, {"all_reduce": [(256.0, 2e-4)], "all_gather": gathers}, around=4e-4)
    assert link.latency < 1e-3
    assert link.is_far
    assert 1e8 < link.bandwidth < 1e11
    for kind in ("all_reduce", "all_gather", "all_to_all", "send"):
        assert 0 < link.seconds(kind, 1e6, 2) < 1


def test_a_rate_that_was_not_found_is_null_in_json() -> None:
    """JSON has no infinity. A large sum may happen to take no longer than a small one."""
    link = MeasuredLink(2, {"all_reduce": [(8.0, 0.001), (1000.0, 0.001)], "all_gather": POINTS["all_gather"]})
    assert link.bandwidth == math.inf
    described = _as_dict(["a", "b"], link, [], 0.01)
    assert json.loads(json.dumps(described, allow_nan=False))["bandwidth"] is None
