"""A run's state is saved and taken over again; what finds no place is named."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.methods import dense, dgc, diloco, gradient_dropping, sbc
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import Method
from tests.run.training import backward, step

Start = Callable[..., tuple[Engine, nn.Module, torch.optim.Optimizer]]

METHODS: list[Callable[[], Method]] = [
    lambda: gradient_dropping(0.3),
    lambda: dgc(0.3, warmup_steps=0),
    lambda: sbc(0.3, every=3),
    lambda: sbc(0.3, every=3, residual_in_weights=True),
    lambda: diloco(every=3),
    lambda: gradient_dropping(0.3, local="partial", average_every=3),
]


@pytest.fixture
def start(wire: Wire) -> Iterator[Start]:
    engines = []

    def started(method: Method, weights: dict[str, Tensor] | None = None) -> Any:
        module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        if weights is not None:
            module.load_state_dict(weights)
        engine = Engine(method, wire)
        engines.append(engine)
        engine.registry.add_module(module)
        engine.begin()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
        engine.register(optimizer)
        return engine, module, optimizer

    yield started
    for engine in engines:
        engine.close()


def train(engine: Engine, module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        backward(engine, module)
        step(engine, optimizer)


def bits(module: nn.Module) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in module.state_dict().values()]


@pytest.mark.parametrize("make", METHODS)
def test_a_resumed_run_goes_on_as_if_never_stopped(start: Start, make: Callable[[], Method]) -> None:
    engine, module, optimizer = start(make())
    train(engine, module, optimizer, 4)
    state = copy.deepcopy(engine.state.state_dict())
    weights, of_optimizer = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    train(engine, module, optimizer, 4)
    resumed, other, its_optimizer = start(make(), weights)
    its_optimizer.load_state_dict(of_optimizer)
    resumed.restart()
    assert resumed.state.load_state_dict(state, as_many_ranks=True) == []
    assert resumed.registry.optimizers[0].steps == 4
    train(resumed, other, its_optimizer, 4)
    assert bits(other) == bits(module)
    assert resumed.residual_norm() == engine.residual_norm()


def test_it_says_what_a_method_does_to_replicas(start: Start) -> None:
    for method, drifts, broadcasts in (
        (gradient_dropping(), False, True),
        (dense(), False, True),
        (gradient_dropping(local="sum"), True, True),
        (sbc(), True, False),
        (sbc(buffers="broadcast"), True, True),
    ):
        engine, _, _ = start(method)
        assert (engine.state.drifts, engine.state.broadcasts_buffers) == (drifts, broadcasts)


def test_what_another_method_has_no_place_for_is_named(start: Start) -> None:
    engine, module, optimizer = start(dgc(0.3, warmup_steps=0))
    train(engine, module, optimizer, 2)
    state = copy.deepcopy(engine.state.state_dict())
    other, _, _ = start(gradient_dropping())
    dropped = other.state.load_state_dict(copy.deepcopy(state), as_many_ranks=True)
    assert dropped == ["GradientSync.MomentumCorrection of 2 parameters", "GradientSync.Momentum of 2 parameters"]
    # The residual has the same place in both.
    kept = "GradientSync.ErrorFeedback"
    (share,) = other.registry.optimizers[0].shares.values()
    residual = state["streams"][0]["held"][kept]
    assert residual.keys() == share.state_dict()[kept].keys() == {"0.weight", "1.weight"}
    assert all(torch.equal(share.state_dict()[kept][name], part) for name, part in residual.items())
    assert engine.residual_norm() > 0


def test_own_weights_and_optimizers_that_are_gone_are_named(start: Start) -> None:
    engine, module, optimizer = start(diloco(every=3))
    train(engine, module, optimizer, 2)
    state = copy.deepcopy(engine.state.state_dict())
    state["streams"].append(copy.deepcopy(state["streams"][0]))
    other, _, _ = start(gradient_dropping())
    dropped = other.state.load_state_dict(state, as_many_ranks=False)
    assert "each rank's own weights" in dropped
    assert "all of optimizer 1" in dropped
    assert "DeltaSync.anchor of 4 parameters" in dropped
    # In a world of another size, what was sent there says nothing of this one.
    ledger = engine.wire.ledger.state_dict()
    assert other.wire.ledger.state_dict() == ledger


def test_the_ledger_goes_on_in_a_world_of_the_same_size(start: Start) -> None:
    engine, module, optimizer = start(gradient_dropping())
    train(engine, module, optimizer, 2)
    state = copy.deepcopy(engine.state.state_dict())
    before = engine.wire.ledger.steps
    for _ in range(2):
        engine.state.load_state_dict(copy.deepcopy(state), as_many_ranks=True)
        assert engine.wire.ledger.state_dict() == state["ledger"]
    assert engine.wire.ledger.steps == before == 2
    train(engine, module, optimizer, 1)
    assert engine.wire.ledger.steps == 3
