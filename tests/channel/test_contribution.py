"""What memories describe is carried out in one pass, and can be taken back."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout, Round
from lightning_sparsecomm.channel import Contribution
from lightning_sparsecomm.channel.contribution import Step
from lightning_sparsecomm.codecs import TopK
from lightning_sparsecomm.kernels import OutOfRangeError

CPU = torch.device("cpu")
LAYOUT = Layout([("a", (2, 2)), ("b", (3,))])
LARGE = Layout([("weight", (200, 300)), ("bias", (4096,))])


def parts(values: Sequence[float] = (1, 2, 3, 4, 5, 6, 7)) -> list[Tensor | None]:
    return list(LAYOUT.views(torch.tensor(values, dtype=torch.float32)))


def test_gradients_alone_become_a_vector() -> None:
    given = parts()
    made = Contribution(given).vector(LAYOUT, torch.float64, CPU)
    assert made.flat is not None
    assert made.flat.dtype == torch.float64
    assert made.flat.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert made.vector(LAYOUT, torch.float64, CPU) is made
    assert made.present == [True, True]


def test_a_segment_without_a_gradient_sends_zeros() -> None:
    given = parts()
    given[0] = None
    for scale in (1.0, 0.5):
        made = Contribution(given, scale=scale).vector(LAYOUT, torch.float32, CPU)
        assert made.flat is not None
        assert made.flat.tolist() == [0, 0, 0, 0, 5 * scale, 6 * scale, 7 * scale]
        assert made.present == [False, True]


def test_what_is_held_for_a_segment_without_a_gradient_is_not_sent() -> None:
    residual = torch.ones(7)
    given = parts()
    given[1] = None
    added = Contribution(given).added_to_(residual, LAYOUT)
    assert residual.tolist() == [2, 3, 4, 5, 1, 1, 1]
    sent = added.vector(LAYOUT, torch.float32, CPU).flat
    assert sent is not None
    assert sent.tolist() == [2, 3, 4, 5, 0, 0, 0]


def test_scale_momentum_and_residual_in_one_pass() -> None:
    residual, velocity = torch.full((7,), 10.0), torch.ones(7)
    a, b = LAYOUT.views(velocity)
    steps = [Step(a, 0.5, 1.0, None), Step(b, 0.5, 1.0, 0.5)]
    made = Contribution(parts(), scale=2.0, steps=steps).added_to_(residual, LAYOUT, keep=0.1)
    moved = [0.5 + 2 * g for g in range(1, 8)]
    assert velocity.tolist() == moved
    # v ← keep·v + u; with Nesterov's momentum v ← keep·v + g + lookahead·u.
    expected = [1 + u for u in moved[:4]] + [1 + 2 * g + 0.5 * u for g, u in zip((5, 6, 7), moved[4:], strict=True)]
    assert residual.tolist() == pytest.approx(expected)
    made.abort()
    torch.testing.assert_close(residual, torch.full((7,), 10.0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(velocity, torch.ones(7), rtol=1e-5, atol=1e-5)
    # Once is enough.
    made.abort()
    torch.testing.assert_close(residual, torch.full((7,), 10.0), rtol=1e-5, atol=1e-5)


def test_gradients_in_any_memory_format_count_in_row_major_order() -> None:
    layout = Layout([("kernel", (2, 3, 2, 2))])
    gradient = torch.randn(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    residual = torch.zeros(layout.size)
    Contribution([gradient]).added_to_(residual, layout)
    assert torch.equal(residual, gradient.flatten())


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_a_checked_gradient_that_is_out_of_range_can_be_taken_back(bad: float) -> None:
    residual = torch.full((7,), 10.0)
    contribution = Contribution(parts([1, 2, 3, 4, 5, bad, 7]), checked=True)
    with pytest.raises(OutOfRangeError):
        contribution.added_to_(residual, LAYOUT)
    contribution.abort()
    torch.testing.assert_close(residual, torch.full((7,), 10.0))


@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_hints_include_all_that_will_be_selected(scope: str) -> None:
    selector, context = TopK(0.01, scope=scope), Round(LARGE)  # type: ignore[arg-type]
    residual = torch.randn(LARGE.size)
    gradients = LARGE.views(torch.randn(LARGE.size))
    made = Contribution(gradients, wanted=selector.wanted(context)).added_to_(residual, LARGE)
    assert made.hints
    assert set(made.hints) <= set(selector.wanted(context))
    plain = selector.select(residual, context)
    assert torch.equal(selector.select_hinted(residual, context, made.hints), plain)
    for hinted in made.hints.values():
        assert hinted.numel() < LARGE.size / 10
