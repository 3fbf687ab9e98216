"""Each collective gives its result, enters one call, and names a peer that is gone; here with one rank."""

import pytest
import torch

from lightning_sparsecomm.basis import wire as basis_wire
from lightning_sparsecomm.basis.ledger import PARAMETERS, SETUP, Ledger
from lightning_sparsecomm.basis.wire import PeerError, Wire


def calls(wire: Wire) -> dict[str, dict[str, tuple[int, int]]]:
    return {
        row: {kind: (traffic.calls, traffic.handed_bytes) for kind, traffic in kinds.items()}
        for row, kinds in wire.ledger.rows.items()
    }


def test_results_in_a_world_of_one(wire: Wire) -> None:
    x = torch.tensor([1.0, 2.0])
    assert (wire.rank, wire.world_size, wire.backend) == (0, 1, "gloo")
    assert wire.all_reduce_(x.clone()).tolist() == [1, 2]
    later = x.clone()
    wire.all_reduce_later_(later)()
    assert later.tolist() == [1, 2]
    assert wire.all_reduce_or_(torch.tensor([5], dtype=torch.uint8)).tolist() == [5]
    assert wire.all_to_all(torch.tensor([[1, 2, 3]])).tolist() == [[1, 2, 3]]
    assert wire.all_gather(torch.ones(2, 3)).shape == (1, 2, 3)
    assert wire.all_gather(torch.tensor([[1, 2], [3, 4]]).t()).tolist() == [[[1, 3], [2, 4]]]


def test_each_call_is_entered_once_in_its_row(wire: Wire) -> None:
    x = torch.ones(3)
    wire.all_reduce_(x)
    wire.all_reduce_later_(x, PARAMETERS)()
    wire.all_reduce_later_(x, PARAMETERS)()
    wire.all_reduce_or_(torch.zeros(5, dtype=torch.uint8))
    wire.all_gather(torch.zeros(2, 2, dtype=torch.float64), SETUP)
    wire.all_to_all(torch.zeros(1, 9, dtype=torch.uint8))
    with wire.calling("broadcast", 7):
        pass
    assert calls(wire) == {
        "gradients": {"all_reduce": (2, 17), "all_to_all": (1, 9), "broadcast": (1, 7)},
        PARAMETERS: {"all_reduce": (2, 24)},
        SETUP: {"all_gather": (1, 32)},
    }


def test_a_wire_under_another_row_is_the_same_wire(wire: Wire) -> None:
    other = wire.under(PARAMETERS)
    other.all_reduce_(torch.ones(1))
    assert wire.row == "gradients"
    assert other.ledger is wire.ledger
    assert other.failures is wire.failures
    assert calls(wire) == {PARAMETERS: {"all_reduce": (1, 4)}}


def test_a_ledger_may_be_given(wire: Wire) -> None:
    ledger = Ledger(1)
    assert Wire(ledger).ledger is ledger


def test_without_or_the_bits_are_gathered(wire: Wire) -> None:
    wire.backend = "nccl"
    assert wire.all_reduce_or_(torch.tensor([5], dtype=torch.uint8)).tolist() == [5]
    assert calls(wire) == {"gradients": {"all_gather": (1, 1)}}


@pytest.mark.parametrize("text", ["Connection reset by peer", "Timed out waiting", "ncclSystemError: 3"])
def test_a_peer_that_is_gone_is_named_once_and_for_all(wire: Wire, text: str) -> None:
    first = r"rank 0 waited .* all_gather of 100 bytes \(gradients\) before the first"
    with pytest.raises(PeerError, match=first), wire.calling("all_gather", 100):
        raise RuntimeError(text)
    wire.step = 7
    # A later call fails for the first reason.
    with pytest.raises(PeerError, match="before the first") as caught, wire.calling("all_reduce", 1):
        raise RuntimeError("Broken pipe")
    assert caught.value is wire.failures[0]
    assert str(caught.value.__cause__) == text
    assert len(wire.failures) == 1


def test_the_step_is_named(wire: Wire) -> None:
    wire.step = 7
    with pytest.raises(PeerError, match="in optimizer step 7"), wire.calling("all_gather", 100):
        raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("error", [RuntimeError("Tensors must be contiguous"), KeyError("connection")])
def test_other_errors_stay_what_they_are(wire: Wire, error: Exception) -> None:
    with pytest.raises(type(error)) as caught, wire.calling("all_gather", 100):
        raise error
    assert caught.value is error
    assert wire.failures == []


def test_a_backend_without_our_collectives_is_refused(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(basis_wire.dist, "get_backend", lambda group=None: "mpi")
    with pytest.raises(ValueError, match=r"process_group_backend must be one of gloo, nccl.*got 'mpi'. Use gloo on"):
        Wire()
