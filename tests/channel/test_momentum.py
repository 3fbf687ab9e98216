"""Momentum before or after the exchange is that of torch.optim.SGD."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout, Round, SparseVector
from lightning_sparsecomm.channel import Contribution, Momentum, MomentumCorrection, MomentumRule, StepSettings
from lightning_sparsecomm.channel.momentum import Velocity
from lightning_sparsecomm.exchange import Exchanged

CPU = torch.device("cpu")
LAYOUT = Layout([("a", (2,)), ("b", (3,))])
CONTEXT = Round(LAYOUT)
RULES = [
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.5},
    {"momentum": 0.5, "nesterov": True},
    {"momentum": 0.0},
]


def bound(memory: Velocity) -> Velocity:
    memory.bind(LAYOUT, torch.float32, CPU)
    return memory


def settings(rule: MomentumRule) -> StepSettings:
    return StepSettings([rule] * 2)


def whole(x: Tensor, present: Sequence[bool] = (True, True)) -> Exchanged:
    return Exchanged(x, x, list(present))


def corrected(memory: MomentumCorrection, gradient: Tensor, rule: MomentumRule) -> Tensor:
    """What one step sends, if all of it is sent."""
    given = Contribution(LAYOUT.views(gradient), settings(rule))
    moved = memory.prepare(given, CONTEXT).vector(LAYOUT, torch.float32, CPU).flat
    assert moved is not None
    memory.commit(whole(moved), CONTEXT)
    return moved


def applied(memory: Momentum, gradient: Tensor, rule: MomentumRule) -> Tensor:
    memory.prepare(Contribution(LAYOUT.views(gradient), settings(rule)), CONTEXT)
    moved = memory.commit(whole(gradient), CONTEXT).shared
    assert isinstance(moved, Tensor)
    return moved


@pytest.mark.parametrize("options", RULES)
@pytest.mark.parametrize("before", [True, False])
def test_it_is_the_momentum_of_sgd(before: bool, options: dict[str, float]) -> None:
    memory = bound(MomentumCorrection(mask=False) if before else Momentum())
    weights = torch.nn.Parameter(torch.zeros(LAYOUT.size))
    optimizer = torch.optim.SGD([weights], lr=1.0, **options)
    total = torch.zeros(LAYOUT.size)
    rule = MomentumRule(**options)
    for _ in range(4):
        gradient = torch.randn(LAYOUT.size)
        weights.grad = gradient.clone()
        optimizer.step()
        if isinstance(memory, MomentumCorrection):
            total -= corrected(memory, gradient, rule)
        else:
            assert isinstance(memory, Momentum)
            total -= applied(memory, gradient, rule)
        torch.testing.assert_close(total, weights.detach(), rtol=1e-6, atol=1e-6)


def test_masking_forgets_the_momentum_of_what_was_sent() -> None:
    memory = bound(MomentumCorrection(mask=True))
    memory.prepare(Contribution(LAYOUT.views(torch.ones(5)), settings(MomentumRule(0.9))), CONTEXT).vector(
        LAYOUT, torch.float32, CPU
    )
    sent = SparseVector(torch.tensor([1, 4]), torch.ones(2), 5)
    memory.commit(Exchanged(sent, sent, [True, True]), CONTEXT)
    state = memory.state_dict()["velocity"]
    assert torch.cat([state["a"], state["b"]]).tolist() == [1, 0, 1, 1, 0]


def test_a_parameter_without_a_gradient_has_not_begun() -> None:
    memory = bound(MomentumCorrection(mask=False))
    rule = MomentumRule(0.9, dampening=0.5)
    first, second = LAYOUT.views(torch.ones(5))
    for gradients in ([first, None], [first, second]):
        prepared = memory.prepare(Contribution(gradients, settings(rule)), CONTEXT)
        prepared.vector(LAYOUT, torch.float32, CPU)
        memory.commit(whole(torch.zeros(5), prepared.present), CONTEXT)
    state = memory.state_dict()["velocity"]
    # Dampening applies from the second step on: 0.9 + 0.5 for one, and the gradient itself for the other.
    assert torch.cat([state["a"], state["b"]]).tolist() == pytest.approx([1.4, 1.4, 1, 1, 1])


def test_only_velocities_that_have_begun_are_saved_and_go_on() -> None:
    memory, other = bound(MomentumCorrection(mask=False)), bound(MomentumCorrection(mask=False))
    assert memory.state_dict() == {"velocity": {}}
    rule = MomentumRule(0.9, dampening=0.5)
    assert isinstance(memory, MomentumCorrection)
    assert isinstance(other, MomentumCorrection)
    corrected(memory, torch.ones(5), rule)
    other.load_state_dict({"velocity": {name: held.clone() for name, held in memory.state_dict()["velocity"].items()}})
    assert torch.equal(*(corrected(each, torch.ones(5), rule) for each in (memory, other)))


def test_a_round_that_fails_has_begun_nothing() -> None:
    memory = bound(MomentumCorrection(mask=True))
    prepared = memory.prepare(Contribution(LAYOUT.views(torch.ones(5)), settings(MomentumRule(0.9))), CONTEXT)
    prepared.vector(LAYOUT, torch.float32, CPU)
    prepared.abort()
    memory.abort(prepared, CONTEXT)
    assert memory.state_dict() == {"velocity": {}}
    assert memory.held["velocity"].norm() == 0


def test_it_is_for_sgd_only() -> None:
    parameters = [torch.nn.Parameter(torch.ones(1))]
    for memory in (MomentumCorrection(), Momentum()):
        assert memory.objection(torch.optim.SGD(parameters, lr=0.1)) is None
        objection = memory.objection(torch.optim.Adam(parameters))
        assert objection is not None
        assert "torch.optim.SGD" in objection
        assert "Adam" in objection
        assert "methods.gradient_dropping()" in objection
