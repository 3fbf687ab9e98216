"""Adam with a shared first moment: torch's in the first steps, then with a second moment that stays."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Adam

from lightning_sparsecomm.basis import Layout, PartOfRun, Round
from lightning_sparsecomm.channel import AdamRule, Contribution, SharedAdam, StepSettings
from lightning_sparsecomm.exchange import Exchanged
from lightning_sparsecomm.testing import check_memory

CPU = torch.device("cpu")
LAYOUT = Layout([("a", (2,)), ("b", (3,))])


def bound(memory: SharedAdam) -> SharedAdam:
    memory.bind(LAYOUT, torch.float32, CPU)
    return memory


def step(memory: SharedAdam, gradient: Tensor, number: int, rule: AdamRule = AdamRule(), length: float = 100) -> Tensor:  # noqa: B008
    """The direction that one rank is given, which sends all."""
    context = Round(LAYOUT, number, length=length)
    contribution = Contribution(LAYOUT.views(gradient), StepSettings(adam=[rule] * 2))
    sent = memory.prepare(contribution, context).vector(LAYOUT, torch.float32, CPU).flat
    assert sent is not None
    x = memory.commit(Exchanged(sent, sent, [True, True]), context).shared
    assert isinstance(x, Tensor)
    return x


def test_the_laws() -> None:
    check_memory(lambda: SharedAdam(steps=2))


@pytest.mark.parametrize("options", [{}, {"betas": (0.5, 0.9), "eps": 0.1}, {"betas": (0.0, 0.9)}, {"maximize": True}])
def test_the_first_steps_are_torchs(options: dict[str, Any]) -> None:
    memory, weights, total = bound(SharedAdam(steps=5)), torch.nn.Parameter(torch.zeros(5)), torch.zeros(5)
    optimizer = Adam([weights], lr=1.0, **options)
    group = optimizer.param_groups[0]
    rule = AdamRule(*group["betas"], group["eps"], -1.0 if group["maximize"] else 1.0)
    for number in range(5):
        gradient = torch.randn(5)
        weights.grad = gradient.clone()
        optimizer.step()
        total -= step(memory, gradient, number, rule)
        torch.testing.assert_close(total, weights.detach(), rtol=1e-5, atol=1e-6)


def test_the_second_moment_stays_and_has_a_floor() -> None:
    gradient, after = torch.tensor([1.0, -2.0, 4.0, 0.0, 1e-6]), []
    for floor in (0.01, 0.0):
        memory = bound(SharedAdam(steps=2, floor=floor))
        for number in range(2):
            step(memory, gradient, number)
        later = [step(memory, gradient * 10, number) for number in (2, 3)]
        torch.testing.assert_close(memory.held["exp_avg_sq"].flat, gradient**2, rtol=1e-5, atol=0)
        after.append(later[-1])
        m = memory.held["exp_avg"].flat / (1 - 0.9**4)
        torch.testing.assert_close(later[-1][:3], m[:3] / gradient[:3].abs(), rtol=1e-5, atol=0)
    typical = (16 / 3) ** 0.5
    m = memory.held["exp_avg"].flat / (1 - 0.9**4)
    torch.testing.assert_close(after[0][4], m[4] / (0.01 * typical + 1e-8), rtol=1e-5, atol=0)
    torch.testing.assert_close(after[1][4], m[4] / (1e-6 + 1e-8), rtol=1e-4, atol=0)


def test_an_element_without_a_gradient_before_counts_as_a_typical_one() -> None:
    memory = bound(SharedAdam(steps=2))
    for number in range(2):
        step(memory, torch.tensor([1.0, -2.0, 3.0, 0.0, 3.0]), number)
    x = step(memory, torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0]), 2)
    assert float(x[3]) == pytest.approx(0.1 / (1 - 0.9**3) / 6**0.5, rel=1e-5)


def test_first_steps_that_become_more_go_on_as_torchs() -> None:
    """A run is resumed with a greater length after its second moment was frozen."""
    memory, other = bound(SharedAdam(PartOfRun(0.5))), bound(SharedAdam(PartOfRun(0.5)))
    gradients = [torch.randn(5) for _ in range(4)]
    for number, gradient in enumerate(gradients[:3]):
        step(memory, gradient, number, length=4)
    second = memory.held["exp_avg_sq"].flat.clone() * (1 - 0.999**3)
    other.load_state_dict(memory.state_dict())
    other = bound(other)
    step(other, gradients[3], 3, length=100)
    expected = 0.999 * second + 0.001 * gradients[3] ** 2
    torch.testing.assert_close(other.held["exp_avg_sq"].flat, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"steps": 0}, "steps must be a whole number of optimizer steps, at least 1; got 0"),
        ({"floor": 2}, r"floor must be in \[0, 1\].*got 2"),
        ({"floor": "0.1"}, r"floor must be in \[0, 1\].*got '0.1'"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SharedAdam(**options)


def test_a_part_of_a_run_is_at_least_one_step() -> None:
    assert [Round(LAYOUT, length=length).steps(PartOfRun(0.15)) for length in (1, 1000, float("inf"))] == [1, 150, 1000]
    for part, text in ((0.0, "part must be in"), (1.5, "part must be in")):
        with pytest.raises(ValueError, match=text):
            PartOfRun(part)
    with pytest.raises(TypeError, match="part must be a number"):
        PartOfRun("15%")  # type: ignore[arg-type]
