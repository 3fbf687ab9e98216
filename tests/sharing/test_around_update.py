"""The moments around an optimizer's update: after the closure, and before any other hook."""

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from lightning_sparsecomm.sharing.around_update import AroundUpdate


class Watch:
    """Notes when it is called, and the weight's value then."""

    def __init__(self, optimizer: Optimizer, weight: nn.Parameter, calls: list[tuple[str, float]]) -> None:
        self.weight, self.calls = weight, calls
        self.around = AroundUpdate(optimizer, self.before, self.after)

    def before(self) -> None:
        self.calls.append(("before", self.weight.item()))

    def after(self) -> None:
        self.calls.append(("after", self.weight.item()))


def set_to(weight: nn.Parameter, value: float) -> None:
    with torch.no_grad():
        weight.fill_(value)


def made(calls: list[tuple[str, float]]) -> tuple[nn.Parameter, SGD, Watch]:
    weight = nn.Parameter(torch.tensor(1.0))
    weight.grad = torch.tensor(1.0)
    optimizer = SGD([weight], lr=0.25)
    optimizer.register_step_post_hook(lambda *_: set_to(weight, 8.0))
    return weight, optimizer, Watch(optimizer, weight, calls)


@pytest.mark.parametrize("as_keyword", [False, True])
def test_what_closures_and_hooks_set_is_not_between(as_keyword: bool) -> None:
    calls: list[tuple[str, float]] = []
    weight, optimizer, _watch = made(calls)

    def closure() -> float:
        calls.append(("closure", weight.item()))
        set_to(weight, 4.0)
        return 7.0

    loss: Any = optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)
    assert loss == 7.0
    assert calls == [("closure", 1.0), ("before", 4.0), ("after", 3.75)]
    assert weight.item() == 8.0
    calls.clear()
    optimizer.step()
    assert calls == [("before", 8.0), ("after", 7.75)]


def test_a_closure_that_runs_several_times_begins_once() -> None:
    calls: list[tuple[str, float]] = []
    weight = nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.LBFGS([weight], max_iter=3)
    _watch = Watch(optimizer, weight, calls)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight - 2).square()
        loss.backward()
        # torch 2.8's LBFGS warns of any other.
        return loss.detach()

    optimizer.step(closure)
    assert [name for name, _ in calls] == ["before", "after"]


def test_nothing_is_called_when_the_watcher_is_gone() -> None:
    calls: list[tuple[str, float]] = []
    _, optimizer, watch = made(calls)
    del watch
    gc.collect()
    optimizer.step(lambda: 0.0)
    assert calls == []


class _Shrinking(SGD):
    """Changes weights after its parent's step."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        (weight,) = self.param_groups[0]["params"]
        set_to(weight, weight.item() / 2)
        return loss


@pytest.mark.parametrize("with_closure", [False, True])
def test_a_step_within_a_subclass_s_step_is_the_same_update(with_closure: bool) -> None:
    calls: list[tuple[str, float]] = []
    # Torch calls hooks around the parent's step once an optimizer of that class exists.
    made([])
    weight = nn.Parameter(torch.tensor(1.0))
    weight.grad = torch.tensor(1.0)
    optimizer = _Shrinking([weight], lr=0.5)
    _watch = Watch(optimizer, weight, calls)
    for _ in range(2):
        set_to(weight, 1.0)
        calls.clear()
        optimizer.step((lambda: 0.0) if with_closure else None)
        assert calls == [("before", 1.0), ("after", 0.25)]


def test_a_step_that_an_error_has_ended_is_forgotten() -> None:
    calls: list[tuple[str, float]] = []
    weight, optimizer, watch = made(calls)

    def fail() -> float:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        optimizer.step(fail)
    watch.around.forget()
    optimizer.step()
    assert calls == [("before", 1.0), ("after", 0.75)]
    assert weight.item() == 8.0
