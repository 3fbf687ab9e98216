"""Local moments are those of torch's Adam, and know with whom to share."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Adam, AdamW

from lightning_sparsecomm.basis import Layout, Round
from lightning_sparsecomm.channel import AdamRule, Channel, Contribution, ErrorFeedback, LocalAdam, StepSettings
from lightning_sparsecomm.exchange import DenseAllReduce, Exchanged
from lightning_sparsecomm.testing import check_memory

CPU = torch.device("cpu")
LAYOUT = Layout([("a", (2,)), ("b", (3,))])
GAP = (True, False)


def bound() -> LocalAdam:
    memory = LocalAdam()
    memory.bind(LAYOUT, torch.float32, CPU)
    return memory


def direction(
    memory: LocalAdam, gradient: Tensor, rule: AdamRule, world_size: int = 1, present: tuple[bool, bool] = (True, True)
) -> Tensor:
    parts = [view if here else None for view, here in zip(LAYOUT.views(gradient), present)]
    context = Round(LAYOUT, world_size=world_size)
    prepared = memory.prepare(Contribution(parts, StepSettings(adam=[rule] * 2)), context)
    x = prepared.vector(LAYOUT, torch.float32, CPU).flat
    assert x is not None
    memory.commit(Exchanged(x, x, list(present)), context)
    return x


def test_the_laws() -> None:
    check_memory(LocalAdam)


@pytest.mark.parametrize("options", [{}, {"betas": (0.5, 0.9), "eps": 0.1}, {"betas": (0.0, 0.9)}, {"maximize": True}])
def test_alone_it_is_torchs_adam(options: dict[str, Any]) -> None:
    memory, weights, total = bound(), torch.nn.Parameter(torch.zeros(5)), torch.zeros(5)
    optimizer = Adam([weights], lr=1.0, **options)
    group = optimizer.param_groups[0]
    rule = AdamRule(*group["betas"], group["eps"], -1.0 if group["maximize"] else 1.0)
    for _ in range(5):
        gradient = torch.randn(5)
        weights.grad = gradient.clone()
        optimizer.step()
        total -= direction(memory, gradient, rule)
        torch.testing.assert_close(total, weights.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("common", "factor"), [(True, 1.0), (False, 4.0)])
def test_noise_is_averaged_over_ranks_and_what_is_common_is_not(common: bool, factor: float) -> None:
    """With 16 ranks: as on one rank, or in steps that are 4 times as large, as noise in their mean is a quarter."""
    memory, alone, generator = bound(), bound(), torch.Generator().manual_seed(1)
    for _ in range(300):
        gradient = torch.randn(5, generator=generator)
        parts, context = LAYOUT.views(gradient), Round(LAYOUT, world_size=16)
        prepared = memory.prepare(Contribution(parts, StepSettings(adam=[AdamRule()] * 2)), context)
        x = prepared.vector(LAYOUT, torch.float32, CPU).flat
        assert x is not None
        aside = memory.aside(context)
        assert aside is not None
        # Of each of the two tensors 8 elements, and the sum of their squares.
        total = 16 * aside.view(2, 9)
        if not common:
            # Sums of 16 independent numbers.
            total[:, :-1] = 4 * torch.randn(total[:, :-1].shape, generator=generator)
        memory.take_aside(total.view(-1))
        memory.commit(Exchanged(x, x, [True, True]), context)
        expected = direction(alone, gradient, AdamRule())
    ratio = float((x / expected).median())
    assert ratio == pytest.approx(factor, rel=0.15)


def test_a_weight_counts_once_and_not_in_squares() -> None:
    """Two ranks whose gradients have weights: the mean of directions is that of weighted first moments."""
    generator, settings = torch.Generator().manual_seed(1), [AdamRule()] * 2
    memories, plain = {0.5: bound(), 1.5: bound()}, {0.5: bound(), 1.5: bound()}
    for _ in range(4):
        for weight, memory in memories.items():
            gradient = torch.randn(5, generator=generator)
            alone = direction(plain[weight], gradient, AdamRule())
            parts, context = LAYOUT.views(gradient * weight), Round(LAYOUT)
            given = Contribution(parts, StepSettings(adam=settings, weight=weight))
            x = memory.prepare(given, context).vector(LAYOUT, torch.float32, CPU).flat
            assert x is not None
            memory.commit(Exchanged(x, x, [True, True]), context)
            torch.testing.assert_close(x, weight * alone, rtol=1e-5, atol=1e-6)


def test_squares_that_ranks_sum_are_without_a_weight() -> None:
    memory, plain = bound(), bound()
    sums = []
    for each, weight in ((memory, 0.25), (plain, 1.0)):
        gradient, context = torch.arange(5.0) - 1, Round(LAYOUT, world_size=2)
        given = Contribution(LAYOUT.views(gradient * weight), StepSettings(adam=[AdamRule()] * 2, weight=weight))
        each.prepare(given, context).vector(LAYOUT, torch.float32, CPU)
        aside = each.aside(context)
        assert aside is not None
        sums.append(aside.view(2, 9))
    torch.testing.assert_close(sums[0][:, :-1], 0.25 * sums[1][:, :-1])
    torch.testing.assert_close(sums[0][:, -1], sums[1][:, -1])


def test_a_gap_leaves_moments_and_steps_alone() -> None:
    memory = bound()
    direction(memory, torch.ones(5), AdamRule())
    before = memory.held["exp_avg"].parts[1].clone()
    assert direction(memory, torch.ones(5), AdamRule(), present=GAP)[2:].tolist() == [0, 0, 0]
    assert torch.equal(memory.held["exp_avg"].parts[1], before)
    assert {name: int(t) for name, t in memory.state_dict()["step"].items()} == {"a": 2, "b": 1}


def test_it_goes_on_from_the_optimizers_state_once() -> None:
    memory, weights = bound(), torch.nn.Parameter(torch.zeros(5))
    optimizer = Adam([weights], lr=1.0)
    for _ in range(3):
        weights.grad = torch.randn(5)
        optimizer.step()
    state = {name: value.clone() for name, value in optimizer.state[weights].items()}
    begun = [
        AdamRule(begun={**state, **{name: LAYOUT.views(state[name])[i] for name in ("exp_avg", "exp_avg_sq")}})
        for i in range(2)
    ]
    for _ in range(2):
        before = weights.detach().clone()
        weights.grad = torch.randn(5)
        prepared = memory.prepare(Contribution(LAYOUT.views(weights.grad), StepSettings(adam=begun)), Round(LAYOUT))
        x = prepared.vector(LAYOUT, torch.float32, CPU).flat
        assert x is not None
        memory.commit(Exchanged(x, x, [True, True]), Round(LAYOUT))
        optimizer.step()
        torch.testing.assert_close(before - x, weights.detach(), rtol=1e-5, atol=1e-6)


def test_a_round_that_fails_has_made_no_step() -> None:
    memory = bound()
    direction(memory, torch.ones(5), AdamRule())
    before = {name: vector.flat.clone() for name, vector in memory.held.items()}
    weights = torch.ones(5)
    rules = [AdamRule(decay=0.1, weights=view) for view in LAYOUT.views(weights)]
    prepared = memory.prepare(Contribution(LAYOUT.views(torch.randn(5)), StepSettings(adam=rules)), Round(LAYOUT))
    carried = prepared.vector(LAYOUT, torch.float32, CPU)
    assert not torch.equal(memory.held["exp_avg"].flat, before["exp_avg"])
    carried.abort()
    memory.abort(prepared, Round(LAYOUT))
    for name, flat in before.items():
        torch.testing.assert_close(memory.held[name].flat, flat, rtol=1e-6, atol=1e-9)
    assert {name: int(t) for name, t in memory.state_dict()["step"].items()} == {"a": 1, "b": 1}


def test_it_is_for_adam_and_adamw_only() -> None:
    parameters = [torch.nn.Parameter(torch.ones(1))]
    memory = LocalAdam()
    for optimizer in (Adam(parameters), AdamW(parameters), AdamW(parameters, maximize=True, foreach=True)):
        assert memory.objection(optimizer) is None
    for other in (torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.SGD):
        objection = memory.objection(other(parameters))
        assert objection is not None
        assert f"torch.optim.Adam and AdamW; {other.__name__} has" in objection
        assert "methods.gradient_dropping()" in objection
    for option in ("amsgrad", "differentiable"):
        objection = memory.objection(Adam(parameters, **{option: True}))
        assert objection is not None
        assert f"{option} must be False with local moments" in objection
        assert f"leave out {option}" in objection


def test_groups_that_go_in_two_directions_are_refused() -> None:
    with pytest.raises(ValueError, match="maximize must be the same in all parameter groups"):
        bound().prepare(
            Contribution(LAYOUT.views(torch.ones(5)), StepSettings(adam=[AdamRule(), AdamRule(sign=-1.0)])),
            Round(LAYOUT),
        )


def test_it_comes_before_the_residual() -> None:
    with pytest.raises(ValueError, match="MomentumCorrection or LocalAdam, ErrorFeedback"):
        Channel(DenseAllReduce(), [ErrorFeedback(), LocalAdam()])
