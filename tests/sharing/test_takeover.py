"""SGD's momentum is off while it steps, and its weight decay keeps a momentum of its own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from lightning_sparsecomm.basis import Layout, SparseVector
from lightning_sparsecomm.channel import MomentumRule
from lightning_sparsecomm.sharing.takeover import MomentumTakeover, mask_momentum_, momentum_rules

RULES: list[dict[str, Any]] = [
    {"momentum": 0.9},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.5},
    {"momentum": 0.5, "weight_decay": 0.1, "nesterov": True},
    {"weight_decay": 0.1},
    {"momentum": 0.9, "weight_decay": 0.1, "lr": torch.tensor(0.3)},
]


def velocity_step(velocity: Tensor | None, gradient: Tensor, rule: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The velocity of a gradient that carries momentum, and what the optimizer is given."""
    momentum, gain = rule.get("momentum", 0), 1 - rule.get("dampening", 0)
    velocity = gradient.clone() if velocity is None else momentum * velocity + gain * gradient
    return velocity, gradient + momentum * velocity if rule.get("nesterov") else velocity


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("with_closure", [True, False])
def test_with_momentum_of_ones_own_it_is_torchs_sgd(rule: dict[str, Any], with_closure: bool) -> None:
    ours, theirs = (nn.Parameter(torch.ones(5)) for _ in range(2))
    optimizers = [SGD([parameter], **{"lr": 0.3, **rule}) for parameter in (ours, theirs)]
    takeover = MomentumTakeover(optimizers[0], {id(ours)})
    velocity = None
    for _ in range(4):
        gradient = torch.randn(5)
        velocity, carried = velocity_step(velocity, gradient, rule)
        ours.grad, theirs.grad = carried if rule.get("momentum") else gradient.clone(), gradient
        takeover.armed = True
        optimizers[0].step((lambda: None) if with_closure else None)
        takeover.armed = False
        takeover.release()
        optimizers[1].step()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    # The groups are as the user made them.
    for name in ("momentum", "dampening", "nesterov", "weight_decay"):
        assert optimizers[0].param_groups[0][name] == optimizers[1].param_groups[0][name]
    assert takeover.has_begun(ours) == bool(rule.get("momentum"))
    takeover.close()


def test_unarmed_or_closed_it_leaves_the_step_alone() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = SGD([weight], lr=1.0, momentum=0.5)
    takeover = MomentumTakeover(optimizer, {id(weight)})
    weight.grad = torch.ones(1)
    optimizer.step()
    takeover.close()
    takeover.armed = True
    optimizer.step()
    assert weight.item() == -1 - 1.5


def test_momentum_is_off_only_once_the_closure_has_run() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = SGD([weight], lr=1.0, momentum=0.5)
    takeover = MomentumTakeover(optimizer, {id(weight)})
    takeover.armed = True
    seen = []

    def closure() -> str:
        seen.append(optimizer.param_groups[0]["momentum"])
        weight.grad = torch.ones(1)
        return "loss"

    assert optimizer.step(closure) == "loss"
    assert seen == [0.5]
    assert optimizer.param_groups[0]["momentum"] == 0
    takeover.release()
    assert optimizer.param_groups[0]["momentum"] == 0.5


def test_a_closure_that_is_evaluated_twice_is_refused() -> None:
    class Twice(SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            return super().step(closure)

    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    optimizer = Twice([weight], lr=1.0, momentum=0.5)
    takeover = MomentumTakeover(optimizer, {id(weight)})
    takeover.armed = True
    with pytest.raises(RuntimeError, match=r"Twice.step\(\) evaluates its closure more than once.*methods.dense\(\)"):
        optimizer.step(lambda: None)


def test_what_has_begun_can_be_loaded_and_restarted() -> None:
    first, second = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    takeover = MomentumTakeover(SGD([first, second], lr=1.0, momentum=0.5), {id(first)})
    takeover.load_begun([first])
    assert (takeover.has_begun(first), takeover.has_begun(second)) == (True, False)
    takeover.restart()
    assert not takeover.has_begun(first)


def test_rules_are_those_of_the_groups_at_this_moment() -> None:
    first, second = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = SGD([{"params": [first], "momentum": 0.9, "dampening": 0.5}, {"params": [second]}], lr=1.0)
    named = [("b", second), ("a", first)]
    assert momentum_rules(optimizer, named) == [MomentumRule(), MomentumRule(0.9, 0.5)]
    first.grad = torch.ones(1)
    optimizer.step()
    optimizer.param_groups[1]["momentum"] = 0.25
    assert momentum_rules(optimizer, named) == [MomentumRule(0.25), MomentumRule(0.9, 0.5, begun=True)]


@pytest.mark.parametrize("momentum", [1.5, float("nan")])
def test_a_momentum_that_grows_without_bound_is_refused(momentum: float) -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    optimizer.param_groups[0]["momentum"] = momentum
    with pytest.raises(ValueError, match=rf"the momentum of SGD must be in \[0, 1\].*got {momentum}"):
        momentum_rules(optimizer, [])


@pytest.mark.parametrize("as_sparse", [True, False])
@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1, momentum=0.9), Adam], ids=["SGD", "Adam"])
def test_momentum_is_masked_where_something_was_sent(make: Any, as_sparse: bool) -> None:
    plain = nn.Parameter(torch.zeros(2, 3))
    turned = nn.Parameter(torch.zeros(1, 2, 2, 2).contiguous(memory_format=torch.channels_last))
    idle = nn.Parameter(torch.zeros(2))
    optimizer = make([plain, turned, idle])
    plain.grad, turned.grad = torch.ones_like(plain), torch.ones_like(turned)
    optimizer.step()
    named = [("plain", plain), ("turned", turned), ("idle", idle)]
    layout = Layout.of(named)
    sent = torch.zeros(layout.size)
    sent[[1, 5, 6, 13, 14]] = 1.0
    vector = SparseVector(sent.nonzero().view(-1), sent[sent != 0], layout.size) if as_sparse else sent
    mask_momentum_(optimizer, named, vector, layout)
    name = "exp_avg" if isinstance(optimizer, Adam) else "momentum_buffer"
    for parameter, view in ((plain, layout.views(sent)[0]), (turned, layout.views(sent)[1])):
        assert torch.equal(optimizer.state[parameter][name] == 0, view != 0)
    if isinstance(optimizer, Adam):
        assert optimizer.state[plain]["exp_avg_sq"].all()
    assert optimizer.state.get(idle, {}).get(name) is None
