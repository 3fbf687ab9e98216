"""Work beside the training: in order, on a group of its own, entered in the ledger when it is waited for."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.basis.stream import Stream
from tests.distributed.launch import run_ranks


def _beside(rank: int) -> Any:
    wire = Wire(row="weight updates")
    stream, may_go = Stream(wire), threading.Event()
    wire.step = 7

    def work(beside: Wire) -> list[float]:
        may_go.wait(60)
        return beside.all_reduce_(torch.tensor([1.0, rank])).tolist()

    first, second = (
        stream.start(work),
        stream.start(lambda beside: (beside.step, beside.row), stream.wire("parameters")),
    )
    # The training's own calls go on, also in another order than the stream's.
    meanwhile = wire.all_reduce_(torch.ones(3)).tolist()
    before = wire.ledger.handed_bytes("weight updates")
    may_go.set()
    found = first.wait(), second.wait()
    after = wire.ledger.handed_bytes("weight updates")
    assert first.wait() == found[0] and wire.ledger.handed_bytes("weight updates") == after
    wire.close()
    return meanwhile, before, found, after


def test_it_communicates_beside_the_training(tmp_path: Path) -> None:
    for meanwhile, before, found, after in run_ranks(tmp_path, 2, _beside):
        assert meanwhile == [2.0] * 3
        assert (before, after) == (12, 20)
        assert found == ([2.0, 1.0], (7, "parameters"))


def test_works_follow_one_another_without_gradients(wire: Wire) -> None:
    stream, seen = Stream(wire), []
    weight = torch.ones(1, requires_grad=True)
    flights = [stream.start(lambda beside, i=i: (seen.append(i), (2 * weight).requires_grad)[1]) for i in range(20)]
    assert [flight.wait() for flight in flights] == [False] * 20
    assert seen == list(range(20))
    assert (2 * weight).requires_grad


def test_an_error_comes_where_one_waits(wire: Wire) -> None:
    def fail(beside: Wire) -> None:
        beside.all_reduce_(torch.ones(1))
        raise KeyError("in flight")

    flight = Stream(wire).start(fail)
    for _ in range(2):
        with pytest.raises(KeyError, match="in flight"):
            flight.wait()
    assert wire.ledger.handed_bytes() == 4


def test_a_wire_that_is_closed_has_no_thread_left(wire: Wire) -> None:
    thread = Stream(wire).start(lambda beside: threading.current_thread()).wait()
    assert thread.is_alive() and thread is not threading.current_thread()
    wire.close()
    assert not thread.is_alive()
