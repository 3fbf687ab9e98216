"""Weights that another than the optimizer has changed are found; what is done with them is in tests/distributed."""

import pytest
import torch
from torch import Tensor, nn

from lightning_sparsecomm.sharing.set_weights import SetWeights


@pytest.mark.parametrize("shape", [(3,), (200, 50), (8, 16, 5, 5)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_what_changes_between_steps_is_found(shape: tuple[int, ...], layout: torch.memory_format) -> None:
    data = torch.randn(shape)
    weight = nn.Parameter(data.contiguous(memory_format=layout) if len(shape) == 4 else data)
    other, weights = nn.Parameter(torch.zeros(5)), SetWeights()
    named = [("weight", weight), ("other", other)]
    weights.look(named, trained=False)
    weights.note(named)
    weights.look(named, trained=True)
    assert weights.found == {}
    weight.data.clamp_(-0.1, 0.1)
    weights.look(named, trained=True)
    assert weights.found == {"weight": -1}
    # It is noted then, and found once.
    weights.forget()
    weights.look(named, trained=True)
    assert weights.found == {}
    weight.data.zero_()
    weights.look(named, trained=False)
    assert weights.found["weight"] > 0


def test_what_training_has_made_nan_was_not_set() -> None:
    weight, weights = nn.Parameter(torch.tensor([1.0, float("nan"), float("inf")])), SetWeights()
    weights.note([("weight", weight)])
    weights.look([("weight", weight)], trained=True)
    assert weights.found == {}
    weight.data[0] = 2.0
    weights.look([("weight", weight)], trained=True)
    assert weights.found == {"weight": -1}


def _number(value: Tensor) -> int:
    weight, weights = nn.Parameter(torch.randn(40)), SetWeights()
    weights.note([("weight", weight)])
    weight.data.copy_(value)
    weights.look([("weight", weight)], trained=False)
    return weights.found["weight"]


def test_equal_weights_have_equal_numbers() -> None:
    assert _number(torch.ones(40)) == _number(torch.ones(40)) != _number(torch.full((40,), 2.0))


def test_what_was_found_is_saved() -> None:
    weights, resumed = SetWeights(), SetWeights()
    weights.found = {"a": -1, "b": 2**31}
    resumed.load_state_dict(weights.state_dict())
    assert resumed.found == weights.found
