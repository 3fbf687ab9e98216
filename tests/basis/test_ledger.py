"""What the ledger counts, and what bytes on the link follow from it."""

import math
import re

import pytest

from lightning_sparsecomm.basis.ledger import DDP_BUFFERS, GRADIENTS, PARAMETERS, UPDATES, Ledger, link_bytes


@pytest.mark.parametrize(
    ("collective", "ranks", "link"),
    [
        ("all_reduce", 2, 1000),
        ("all_reduce", 4, 1500),
        ("all_gather", 2, 1000),
        ("all_gather", 4, 3000),
        ("all_to_all", 2, 500),
        ("all_to_all", 4, 750),
        ("all_to_all", 1, 0),
        ("broadcast", 2, 500),
        ("broadcast", 4, 750),
        ("all_reduce", 1, 0),
        ("all_gather", 1, 0),
        ("broadcast", 1, 0),
    ],
)
def test_link_bytes_follow_the_published_algorithms(collective: str, ranks: int, link: float) -> None:
    assert link_bytes(collective, 1000, ranks) == link  # type: ignore[arg-type]
    ledger = Ledger(ranks)
    ledger.record(GRADIENTS, collective, 400)  # type: ignore[arg-type]
    ledger.record(GRADIENTS, collective, 600)  # type: ignore[arg-type]
    assert ledger.link_bytes() == link
    assert ledger.handed_bytes() == 1000


@pytest.mark.parametrize("collective", ["reduce_scatter", "gossip", "", None])
def test_an_unknown_collective_is_refused_and_never_priced_as_another(collective: str) -> None:
    known = "all_reduce, all_gather, all_to_all, broadcast, send"
    text = rf"collective must be one of {known}, .*got {re.escape(repr(collective))}\."
    with pytest.raises(ValueError, match=text):
        link_bytes(collective, 1000, 4)  # type: ignore[arg-type]
    ledger = Ledger(4)
    with pytest.raises(ValueError, match=text):
        ledger.record(GRADIENTS, collective, 1000)  # type: ignore[arg-type]
    assert ledger.rows == {}


def test_ratios_count_what_the_method_sends_and_nothing_else() -> None:
    ledger = Ledger(2)
    assert math.isnan(ledger.compression_ratio())
    assert math.isnan(ledger.density())
    for row, handed in ((GRADIENTS, 100), (UPDATES, 20), (PARAMETERS, 5), (DDP_BUFFERS, 7_000)):
        ledger.record(row, "all_gather", handed)
    ledger.ddp_bytes, ledger.ddp_gathered_bytes = 1_000, 250
    ledger.sent_elements, ledger.elements = 10, 400
    assert ledger.sent_bytes == ledger.sent_link_bytes == 125
    # 1,000 in a ring of two, and 250 to the one other.
    assert ledger.ddp_link_bytes == 1_250
    assert ledger.compression_ratio() == 10
    assert ledger.density() == 0.025
    assert ledger.handed_bytes(DDP_BUFFERS) == 7_000
    assert ledger.handed_bytes("never used") == ledger.link_bytes("never used") == 0


def test_time_adds_up_over_exchanges() -> None:
    ledger = Ledger(2)
    with ledger.exchanging():
        pass
    once = ledger.exchange_seconds
    with ledger.exchanging():
        pass
    assert ledger.exchange_seconds > once > 0


def test_a_resumed_ledger_goes_on_where_the_saved_one_was() -> None:
    ledger, resumed = Ledger(2), Ledger(2)
    for each in (ledger, resumed):
        each.record(GRADIENTS, "all_gather", 100)
    ledger.record(PARAMETERS, "all_reduce", 40)
    ledger.steps, ledger.ddp_bytes, ledger.clock.seconds["wait"] = 3, 1_000, 1.5
    resumed.steps = 1
    state = ledger.state_dict()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert resumed.handed_bytes() == 100
    assert resumed.rows[GRADIENTS]["all_gather"].calls == 1
    assert resumed.handed_bytes(PARAMETERS) == 40
    assert (resumed.steps, resumed.ddp_bytes, resumed.exchange_seconds) == (3, 1_000, 1.5)
    assert resumed.clock.seconds["wait"] == 1.5
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    resumed.add_rows(state)
    assert resumed.handed_bytes() == 200
    assert resumed.rows[GRADIENTS]["all_gather"].calls == 2
    assert resumed.steps == 3
    # What was saved stays as it was.
    ledger.record(GRADIENTS, "all_gather", 1)
    assert state["rows"][GRADIENTS]["all_gather"] == [1, 100]


def test_a_world_that_changes_its_size() -> None:
    """What was sent before keeps its link bytes; so does what ddp would have sent."""
    ledger = Ledger(3)
    ledger.record(UPDATES, "all_gather", 100)
    ledger.ddp_bytes = 300
    ledger.resize(2)
    ledger.record(UPDATES, "all_gather", 10)
    ledger.record(PARAMETERS, "all_reduce", 40)
    ledger.record(PARAMETERS, "send", 7)
    ledger.ddp_bytes += 100
    assert ledger.link_bytes(UPDATES) == 200 + 10
    assert ledger.link_bytes(PARAMETERS) == 40 + 7
    assert ledger.ddp_link_bytes == 400 + 100
    ledger.resize(2)
    ledger.resize(1)
    ledger.record(UPDATES, "all_gather", 1_000)
    assert (ledger.link_bytes(UPDATES), ledger.handed_bytes(UPDATES)) == (210, 1_110)

    resumed = Ledger(4)
    resumed.load_state_dict(ledger.state_dict())
    assert (resumed.link_bytes(UPDATES), resumed.link_bytes(PARAMETERS)) == (210, 47)
    assert resumed.ddp_link_bytes == 500
    resumed.record(UPDATES, "all_gather", 10)
    assert resumed.link_bytes(UPDATES) == 240
