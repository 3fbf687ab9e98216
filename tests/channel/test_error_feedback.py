"""The residual: what was not sent is added to the next gradient."""

import math

import pytest
import torch

from lightning_sparsecomm.basis import Layout, Round, SparseVector
from lightning_sparsecomm.channel import Contribution, ErrorFeedback
from lightning_sparsecomm.exchange import Exchanged

CPU = torch.device("cpu")
LAYOUT = Layout([("a", (2, 3)), ("empty", (0, 4)), ("scalar", ()), ("b", (4,))])


def ones(layout: Layout) -> Contribution:
    return Contribution(layout.views(torch.ones(layout.size)))


def sent(indices: list[int], values: list[float], layout: Layout) -> Exchanged:
    vector = SparseVector(torch.tensor(indices), torch.tensor(values), layout.size)
    return Exchanged(vector, vector, [True] * len(layout.segments))


def test_it_keeps_what_was_not_sent_when_the_layout_grows() -> None:
    small, large = Layout([("b", (4,))]), LAYOUT
    memory = ErrorFeedback()
    memory.bind(small, torch.float32, CPU)
    memory.prepare(ones(small), Round(small))
    memory.commit(sent([1, 2], [1.0, 0.25], small), Round(small))
    assert memory.state_dict()["residual"]["b"].tolist() == [1, 0, 0.75, 1]
    memory.bind(large, torch.float64, CPU)
    prepared = memory.prepare(ones(large), Round(large))
    assert prepared.flat is not None
    assert prepared.flat.tolist() == [1] * 7 + [2, 1, 1.75, 2]
    assert memory.norm() == pytest.approx(math.sqrt(7 + 4 + 1 + 1.75**2 + 4))


@pytest.mark.parametrize("bound_first", [True, False])
def test_it_takes_over_a_state(bound_first: bool) -> None:
    memory, other = ErrorFeedback(decay=0.5), ErrorFeedback(decay=0.5)
    for each in (memory, other) if bound_first else (memory,):
        each.bind(LAYOUT, torch.float32, CPU)
    memory.prepare(ones(LAYOUT), Round(LAYOUT))
    state = {
        group: {name: tensor.clone() for name, tensor in held.items()} for group, held in memory.state_dict().items()
    }
    other.load_state_dict(state)
    other.bind(LAYOUT, torch.float32, CPU)
    results = [each.prepare(ones(LAYOUT), Round(LAYOUT)).flat for each in (memory, other)]
    assert results[0] is not None
    assert results[1] is not None
    assert results[0].tolist() == results[1].tolist() == [1.5] * 11


def test_a_state_of_another_shape_is_refused() -> None:
    memory = ErrorFeedback()
    memory.load_state_dict({"residual": {"b": torch.zeros(5)}})
    with pytest.raises(ValueError, match=r"'b' has shape \(5,\), but the parameter has \(4,\)"):
        memory.bind(LAYOUT, torch.float32, CPU)


@pytest.mark.parametrize("decay", [0, -1, 1.5, True, "1", float("nan")])
def test_decay_outside_its_range_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=rf"decay must be in \(0, 1\].*got {decay!r}. Use 1 to keep all"):
        ErrorFeedback(decay)
