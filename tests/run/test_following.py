"""Methods that depend on the run's length; here of one rank."""

import copy
import math
import pickle
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, RMSprop

from lightning_sparsecomm.basis import ByLength, Wire
from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.exchange import CompressedAllReduce, QuantizedAllReduce
from lightning_sparsecomm.methods import default, dense, dgc
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.following import follow
from lightning_sparsecomm.run.nodes import Nodes
from lightning_sparsecomm.sharing import GradientSync, Method

FOLLOWING = dgc(0.5, warmup_steps=0).following(
    lambda steps, ranks: dgc(0.5, warmup_steps=0, every=2 if steps > 10 else 1)
)


def engine_of(method: Method, *kinds: Any, length: float = 100, **options: Any) -> tuple[Engine, nn.Module]:
    engine, module = Engine(method, Wire()), nn.Linear(3, 4)
    engine.registry.add_module(module)
    for kind in kinds:
        engine.register(kind(module.parameters(), lr=0.1, **options))
    engine.expect(length)
    return engine, module


def every(engine: Engine) -> set[object]:
    methods = [tracked.method for tracked in engine.registry.optimizers]
    return {sync.every for sync in parts_in(methods, GradientSync) if not sync.takes_few_rows}


def train(engine: Engine, module: nn.Module, steps: int) -> None:
    (tracked,) = engine.registry.optimizers
    for _ in range(steps):
        generator = torch.Generator().manual_seed(tracked.steps)
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        with engine.stepping(tracked.optimizer):
            engine.synchronize(tracked.optimizer)
            tracked.optimizer.step()


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize(
    ("kind", "length", "expected"),
    [
        (SGD, 300, 1),
        (SGD, 1999, 1),
        (SGD, 2000, 2),
        (SGD, 5000, 2),
        (SGD, 5001, 4),
        (SGD, math.inf, 2),
        (AdamW, 562, 1),
        (AdamW, 563, 2),
        (AdamW, 1e6, 2),
        (RMSprop, 1e4, 1),
    ],
)
def test_steps_between_exchanges_follow_the_length(kind: Any, length: float, expected: int) -> None:
    engine, module = engine_of(default(), kind, length=length)
    assert every(engine) == {1}
    assert engine.follow_length() == length
    assert every(engine) == {expected}
    used = [tracked.method for tracked in engine.registry.optimizers]
    in_weights = {sync.residual_in_weights for sync in parts_in(used, GradientSync) if not sync.takes_few_rows}
    assert in_weights == {(length <= 5000 or length == math.inf) and (kind is SGD or expected == 2)}
    train(engine, module, 1)
    assert every(engine) == {expected}


class Sign(torch.optim.Optimizer):
    """A rule of the user's own."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(self.param_groups[0]["lr"] * parameter.grad.sign())


class Scaled(SGD):
    """A rule of the user's own, derived from torch's."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            torch._foreach_mul_([each.grad for each in group["params"]], 0.5)
        return super().step(closure)


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("kind", [RMSprop, Sign, Scaled])
@pytest.mark.parametrize("length", [300, 10_000, math.inf])
def test_other_optimizers_are_given_the_whole_gradient(kind: Any, length: float) -> None:
    """Also one with a step of its own, in which ranks could not step by themselves."""
    engine, module = engine_of(default(), kind, length=length)
    engine.follow_length()
    for steps in range(2):
        (tracked,) = engine.registry.optimizers
        assert any(parts_in(tracked.method, QuantizedAllReduce))
        assert not any(parts_in(tracked.method, CompressedAllReduce))
        train(engine, module, steps + 1)


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize(
    ("kind", "ranks", "expected"), [(AdamW, 4, 2), (AdamW, 5, 1), (AdamW, 64, 1), (SGD, 4, 2), (SGD, 64, 2)]
)
def test_many_ranks_exchange_in_each_step_by_adam(kind: Any, ranks: int, expected: int) -> None:
    engine, _ = engine_of(default(), kind)
    follow(engine.registry, (3000, ranks))
    assert every(engine) == {expected}
    used = [tracked.method for tracked in engine.registry.optimizers]
    assert all(sync.residual_in_weights for sync in parts_in(used, GradientSync) if not sync.takes_few_rows)


@pytest.mark.usefixtures("wire")
def test_a_run_that_may_end_sooner_has_a_likely_length() -> None:
    engine, module = engine_of(default(), SGD, length=1e6)
    engine.expect(1e6, may_end_sooner=True)
    assert engine.follow_length() == 5000
    train(engine, module, 1)
    (tracked,) = engine.registry.optimizers
    turns = [engine._turn(tracked, "gradients", step) for step in (0, 10_000)]
    contexts = [share._context(turn) for turn in turns for share in tracked.shares.values()]
    found = {context.density(ByLength()) for context in contexts}
    assert found == {ByLength().for_length(1000), ByLength().for_length(5000)}


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("method", [default(every=3), default(delay=1), dgc(0.1), dense()], ids=repr)
def test_what_was_given_stays(method: Method) -> None:
    engine, _ = engine_of(method, SGD)
    before = every(engine)
    engine.follow_length()
    assert every(engine) == before
    assert engine.registry.followed is None


@pytest.mark.usefixtures("wire")
def test_a_run_that_has_begun_keeps_its_method() -> None:
    engine, module = engine_of(FOLLOWING, SGD)
    train(engine, module, 1)
    engine.follow_length()
    assert every(engine) == {1}


@pytest.mark.usefixtures("wire")
def test_where_ranks_cannot_step_by_themselves_each_step_exchanges() -> None:
    engine, _ = engine_of(FOLLOWING, SGD, SGD)
    engine.follow_length()
    assert every(engine) == {1}
    engine, _ = engine_of(FOLLOWING, SGD)
    engine.registry.work_between(cast(Nodes, SimpleNamespace(between=engine.wire)))
    engine.follow_length()
    assert every(engine) == {1}


class Scaled(SGD):
    """Changes gradients in its step, as LARS does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad.mul_(0.1)
        return super().step(closure)


@pytest.mark.filterwarnings("ignore:Scaled changes gradients")
@pytest.mark.usefixtures("wire")
def test_with_an_optimizer_that_changes_gradients_each_step_exchanges() -> None:
    engine, _ = engine_of(FOLLOWING, Scaled)
    engine.follow_length()
    assert every(engine) == {1}


@pytest.mark.usefixtures("wire")
def test_a_run_that_starts_over_follows_its_length() -> None:
    """After a search for a learning rate, for example."""
    engine, module = engine_of(FOLLOWING, SGD)
    train(engine, module, 2)
    engine.restart()
    engine.follow_length()
    assert every(engine) == {2}


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_run_that_resumes_keeps_its_method_whatever_its_length(momentum: float) -> None:
    whole, module = engine_of(FOLLOWING, SGD, momentum=momentum)
    whole.follow_length()
    train(whole, module, 4)
    saved, weights = copy.deepcopy(whole.state.state_dict()), copy.deepcopy(module.state_dict())
    of_optimizer = copy.deepcopy(whole.registry.optimizers[0].optimizer.state_dict())
    train(whole, module, 3)

    resumed, again = engine_of(FOLLOWING, SGD, momentum=momentum)
    again.load_state_dict(weights)
    resumed.registry.optimizers[0].optimizer.load_state_dict(of_optimizer)
    resumed.restart()
    assert not resumed.state.load_state_dict(saved, as_many_ranks=True)
    # Eight in all, for which a new run would exchange in each.
    resumed.expect(4)
    resumed.follow_length()
    assert every(resumed) == {2}
    train(resumed, again, 3)
    for one, other in zip(module.parameters(), again.parameters()):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("ranks_were_saved", [True, False])
def test_a_run_that_resumes_on_other_ranks_keeps_its_method(ranks_were_saved: bool) -> None:
    method = dgc(0.5).following(lambda steps, ranks: dgc(0.5, every=3 if ranks == 8 or not ranks_were_saved else 2))
    saving, module = engine_of(method, SGD)
    follow(saving.registry, (100, 8))
    train(saving, module, 1)
    saved = copy.deepcopy(saving.state.state_dict())
    if not ranks_were_saved:
        # As files were before ranks counted.
        saved["for_length"] = saved.pop("followed")[0]
    resumed, _ = engine_of(method, SGD)
    resumed.state.load_state_dict(saved, as_many_ranks=False)
    resumed.follow_length()
    assert every(resumed) == {3}


def test_methods_that_follow_the_length_travel_to_other_processes() -> None:
    method = pickle.loads(pickle.dumps(default()))
    assert repr(method.for_run(1000, 4)) == repr(default().for_run(1000, 4))
    assert repr(method) == repr(default())
    assert default(every=2).for_run(4000, 4).syncs[0].every == 2


def test_the_parts_of_a_method_do_not_follow_the_length() -> None:
    method = dgc(0.1).following(lambda steps, ranks: dgc(0.2))
    assert method.with_syncs(method.syncs).by_run is None
    assert dgc(0.1).for_run(10, 4).by_run is None
