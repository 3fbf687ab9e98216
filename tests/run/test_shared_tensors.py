"""Tensors of which each rank changes its own: only what has changed is averaged."""

import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.basis import PARAMETERS, Wire
from lightning_sparsecomm.run.shared_tensors import SharedTensors


class Model:
    def __init__(self, wire: Wire) -> None:
        self.tensors: dict[str, Tensor] = {"a": torch.ones(4), "b": torch.ones(20_000), "c": torch.ones(2)}
        self.shared = SharedTensors(lambda: self.tensors, wire)


def averaged_bytes(model: Model, wire: Wire) -> int:
    """What the average itself takes, without a flag for each name."""
    before = wire.ledger.handed_bytes(PARAMETERS)
    model.shared.average()
    return wire.ledger.handed_bytes(PARAMETERS) - before - 4 * len(model.tensors)


@pytest.mark.parametrize("copied", [True, False])
def test_what_nobody_has_changed_is_not_sent(wire: Wire, copied: bool) -> None:
    model = Model(wire)
    # Nothing is known to be equal yet.
    assert averaged_bytes(model, wire) == 4 * 20_006
    model.shared.mark(lambda name: copied)
    assert averaged_bytes(model, wire) == 0
    model.tensors["a"].add_(1)
    assert averaged_bytes(model, wire) == 4 * 4
    assert averaged_bytes(model, wire) == 0


@pytest.mark.parametrize("copied", [True, False])
def test_changes_that_leave_no_version_are_seen(wire: Wire, copied: bool) -> None:
    model = Model(wire)
    model.shared.mark(lambda name: copied)
    model.tensors["a"].data.add_(1)
    model.tensors["b"].data.add_(1)
    assert averaged_bytes(model, wire) == 4 * 20_004


def test_a_tensor_in_the_place_of_another_is_a_change(wire: Wire) -> None:
    model = Model(wire)
    model.shared.mark()
    model.tensors["c"] = torch.ones(2)
    assert averaged_bytes(model, wire) == 4 * 2


def test_the_shared_value_is_that_of_the_last_average(wire: Wire) -> None:
    model = Model(wire)
    model.shared.mark(lambda name: name == "a")
    assert model.shared.shared() == []
    for name in ("a", "b"):
        model.tensors[name].add_(1)
    # Of "b" no copy was kept.
    ((tensor, value),) = model.shared.shared()
    assert tensor.data_ptr() == model.tensors["a"].data_ptr()
    assert value.tolist() == [1] * 4
    wire.world_size = 2  # One addend, divided by two: what a rank of zeros would leave.
    model.shared.average()
    assert model.tensors["a"].tolist() == [1] * 4
    assert (model.tensors["b"] == 1).all()
    # From its first change on there is one.
    model.tensors["b"].add_(1)
    ((tensor, value),) = model.shared.shared()
    assert tensor.data_ptr() == model.tensors["b"].data_ptr()
    assert (value == 1).all()


def test_no_tensors_take_no_collective(wire: Wire) -> None:
    SharedTensors(dict, wire).average()
    assert wire.ledger.rows == {}
