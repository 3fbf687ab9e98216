"""Adam's update is made with the shared direction, and hidden from torch; its state and settings are the user's."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.channel import AdamRule, Channel, ErrorFeedback, LocalAdam
from lightning_sparsecomm.exchange import DenseAllReduce
from lightning_sparsecomm.sharing import GradientSync, Turn
from lightning_sparsecomm.sharing.adam import AdamTakeover, adam_rules
from lightning_sparsecomm.sharing.gradient_share import GradientShare


def taken_over(optimizer: Adam, *weights: nn.Parameter) -> AdamTakeover:
    takeover = AdamTakeover(optimizer)
    takeover.direct(weights)
    takeover.armed = True
    return takeover


@pytest.mark.parametrize("with_closure", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}, {"lr": torch.tensor(0.1), "foreach": False}]
)
def test_the_shared_direction_moves_the_weights_and_torch_moves_the_rest(
    options: dict[str, Any], with_closure: bool
) -> None:
    ours, theirs, alike = (nn.Parameter(torch.ones(3)) for _ in range(3))
    optimizer = AdamW([ours, theirs], **{"lr": 0.1, "weight_decay": 0.5, **options})
    other = AdamW([alike], lr=0.1, weight_decay=0.5)
    takeover = taken_over(optimizer, ours)
    direction = torch.tensor([1.0, -2.0, 0.0])
    ours.grad, theirs.grad, alike.grad = direction, torch.ones(3), torch.ones(3)
    seen = []
    optimizer.step((lambda: seen.append(ours.grad is direction)) if with_closure else None)
    assert seen == [True] * with_closure
    assert ours.grad is None
    takeover.release()
    assert ours.grad is direction
    torch.testing.assert_close(ours.detach(), 0.95 - 0.1 * direction)
    assert not optimizer.state[ours]
    other.step()
    torch.testing.assert_close(theirs, alike)
    takeover.close()


def test_adams_own_decay_is_in_the_direction_and_groups_have_their_own_rates() -> None:
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = Adam([{"params": [first], "lr": 1.0, "weight_decay": 0.5}, {"params": [second], "lr": 0.25}], lr=1.0)
    takeover = taken_over(optimizer, first, second)
    first.grad = second.grad = torch.ones(2)
    optimizer.step()
    assert (first.tolist(), second.tolist()) == ([0.0] * 2, [0.75] * 2)
    takeover.close()


def test_narrow_weights_are_rounded_once() -> None:
    weight = nn.Parameter(torch.randn(1000).bfloat16())
    before, direction = weight.detach().clone(), torch.randn(1000).bfloat16()
    optimizer = AdamW([weight], lr=0.01, weight_decay=0.1)
    takeover = taken_over(optimizer, weight)
    weight.grad = direction
    optimizer.step()
    takeover.close()
    expected = before.double() * (1 - 0.001) - 0.01 * direction.double()
    assert torch.equal(weight.detach(), expected.float().bfloat16())


class Twice(AdamW):
    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


def test_a_closure_that_is_evaluated_twice_is_refused() -> None:
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    optimizer = Twice([weight])
    taken_over(optimizer, weight)
    with pytest.raises(RuntimeError, match=r"Twice.step\(\) evaluates its closure more than once"):
        optimizer.step(lambda: None)


def test_rules_are_those_of_the_groups_at_this_moment() -> None:
    first, second = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = Adam([{"params": [first], "weight_decay": 0.5}, {"params": [second], "betas": (0.5, 0.6)}], eps=0.1)
    named = [("b", second), ("a", first)]
    rules = adam_rules(optimizer, named)
    assert rules[0] == AdamRule(0.5, 0.6, 0.1)
    assert rules[1][:5] == (0.9, 0.999, 0.1, 1.0, 0.5)
    assert rules[1].weights is not None
    first.grad = torch.ones(1)
    optimizer.step()
    assert adam_rules(optimizer, named)[1].begun["step"] == 1
    (rule,) = adam_rules(AdamW([first], weight_decay=0.5, maximize=True), [("a", first)])
    assert rule == AdamRule(sign=-1.0)


def test_settings_that_cannot_be_followed_are_refused() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = AdamW([weight])
    optimizer.param_groups[0]["betas"] = (0.9, 1.0)
    with pytest.raises(ValueError, match=r"betas of AdamW must be in \[0, 1\).*got \(0.9, 1.0\)"):
        adam_rules(optimizer, [])
    with pytest.raises(ValueError, match="amsgrad must be False"):
        adam_rules(AdamW([weight], amsgrad=True), [])


@pytest.mark.parametrize("options", [{"local": "sum"}, {"mask_momentum": True}])
def test_what_needs_gradients_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="local must be 'none' and mask_momentum False with LocalAdam"):
        GradientSync(Channel(DenseAllReduce(), [LocalAdam(), ErrorFeedback()]), **options)


def test_a_replica_counts_by_its_weight(wire: Wire) -> None:
    """Though Adam's direction has the same scale for all gradients."""
    directions = []
    for factor in (1.0, 1.5):
        weight = nn.Parameter(torch.zeros(3))
        share = GradientSync(Channel(DenseAllReduce(), [LocalAdam()])).start(Adam([weight]), [("weight", weight)], wire)
        assert isinstance(share, GradientShare)
        share.weight = factor
        for step in range(3):
            weight.grad = torch.tensor([1.0, -2.0, 0.5]) * (step + 1)
            share.prepare(Turn("gradients", step))
            share.exchange()
            share.commit()
        directions.append(weight.grad)
    torch.testing.assert_close(directions[1], 1.5 * directions[0])
