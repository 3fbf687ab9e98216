"""A run that switches between methods loses nothing: with any sequence of them it ends where ddp would."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import Optimizer

from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.methods import (
    auto,
    default,
    dense,
    dgc,
    gradient_dropping,
    local_adam,
    onebit_adam,
    sbc,
    sketched_sgd,
)
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.switching import switch
from lightning_sparsecomm.sharing import Method
from tests.distributed.launch import run_ranks
from tests.distributed.test_following_the_rate import RATES, _ddp
from tests.distributed.test_reference import SIZES, STEPS, WORLD_SIZE, Parameters, flat, gradients_of, starting_weights
from tests.run.training import backward, chain, step


class Summing(Optimizer):
    """Adds up what it is given: no rate, and no momentum."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad)


def _train(rank: int, methods: list[Method], rates: list[float], kind: str, save: bool) -> Any:
    """Trains with each of the methods in turn, equally long."""
    module = Parameters()
    for parameter, part in zip(module.parameters(), torch.from_numpy(starting_weights()).split(SIZES)):
        parameter.data.copy_(part.view(parameter.shape))
    engine = Engine(auto(), Wire())
    engine.registry.add_module(module)
    optimizer: Optimizer = Summing(module.parameters())
    if kind == "sgd":
        optimizer = torch.optim.SGD(module.parameters(), 1.0, 0.9, weight_decay=0.0)
    engine.register(optimizer)
    each = len(rates) // len(methods)
    for number, (rate, gradient) in enumerate(zip(rates, gradients_of(rank), strict=True)):
        if number % each == 0 and number // each < len(methods):
            switch(engine, methods[number // each])
            if save:
                state = engine.state.state_dict()
                for tracked in engine.registry.optimizers:
                    tracked.owed = {}
                engine.state.load_state_dict(state, as_many_ranks=True)
        optimizer.param_groups[0]["lr"] = rate
        for parameter, part in zip(module.parameters(), torch.from_numpy(gradient).split(SIZES)):
            parameter.grad = part.clone().view(parameter.shape)
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            optimizer.step()
    engine.settle()
    weights = flat(p.detach() for p in module.parameters())
    engine.close()
    return weights


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:.* values beyond")
@pytest.mark.parametrize(
    "methods",
    [
        [dense(), dgc(0.02), dense()],
        [dgc(0.05, warmup_steps=0), dense(), sketched_sgd(0.05), default(), dense()],
        [dgc(0.05, warmup_steps=0, every=2), dense(), default(every=4), default(every=2, residual_in_weights=True)],
    ],
    ids=["sparse between", "five", "local steps"],
)
@pytest.mark.parametrize("save", [False, True])
def test_the_weights_end_where_ddp_would_put_them(tmp_path: Path, methods: list[Method], save: bool) -> None:
    """A switch from local steps comes amid them, as 3 ranks train with each method for a number of steps of its own."""
    found = run_ranks(tmp_path, WORLD_SIZE, _train, methods, RATES, "sgd", save)
    for weights in found:
        np.testing.assert_array_equal(weights, found[0])
        np.testing.assert_allclose(weights, _ddp(RATES, 0.9), rtol=1e-4, atol=3e-3)


@pytest.mark.parametrize("save", [False, True])
def test_what_no_rate_scales_comes_with_the_next_gradient(tmp_path: Path, save: bool) -> None:
    """Also where a checkpoint was saved between the switch and that gradient."""
    methods: list[Method] = [gradient_dropping(0.02), dense(), gradient_dropping(0.1), dense()]
    for weights in run_ranks(tmp_path, WORLD_SIZE, _train, methods, [1.0] * STEPS, "plain", save):
        np.testing.assert_allclose(weights, _ddp([1.0] * STEPS, 0.0), rtol=1e-4, atol=2e-3)


def test_without_the_residual_it_would_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_sparsecomm.run.switching._deliver", lambda engine, tracked: None)
    methods: list[Method] = [dgc(0.02), dense()]
    weights, *_ = run_ranks(tmp_path, WORLD_SIZE, _train, methods, RATES, "sgd", False)
    assert np.abs(weights - _ddp(RATES, 0.9)).max() > 1


@pytest.mark.parametrize("maximize", [False, True])
def test_momentum_goes_on_as_it_was(wire: Wire, maximize: bool) -> None:
    """As for Adam, below; with weight decay, whose momentum is the optimizer's own."""
    ours, theirs = chain(), chain()
    theirs.load_state_dict(ours.state_dict())
    engine = Engine(auto(), wire)
    engine.registry.add_module(ours)
    options: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "maximize": maximize}
    optimizer, other = (torch.optim.SGD(each.parameters(), **options) for each in (ours, theirs))
    engine.register(optimizer)
    local_steps = dgc(1.0, warmup_steps=0, every=2)
    for method in (None, dgc(1.0, warmup_steps=0), dense(), sketched_sgd(1.0), dense(), local_steps, dense()):
        if method is not None:
            switch(engine, method)
        for _ in range(3):
            for module in (ours, theirs):
                for number, parameter in enumerate(module.parameters()):
                    parameter.grad = parameter.detach().cos() * (number + 1)
            with engine.stepping(optimizer):
                engine.synchronize(optimizer)
                optimizer.step()
            other.step()
    engine.settle()
    for mine, other_s in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(mine, other_s, rtol=1e-4, atol=1e-4)
    engine.close()


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_goes_on_as_it_was(wire: Wire, kind: type[torch.optim.Adam], decay: float) -> None:
    """On one rank and at density 1 all methods are torch's Adam, so a switch must not be seen.

    Local steps without decay only: it is that of the shared weights, from which a rank is some steps ahead.
    """
    ours, theirs = chain(), chain()
    theirs.load_state_dict(ours.state_dict())
    engine = Engine(auto(), wire)
    engine.registry.add_module(ours)
    optimizer, other = (kind(each.parameters(), lr=0.01, weight_decay=decay) for each in (ours, theirs))
    engine.register(optimizer)
    local_steps = [] if decay else [local_adam(1.0, every=2), dense()]
    for method in (None, local_adam(1.0), dense(), local_adam(1.0), *local_steps):
        if method is not None:
            switch(engine, method)
        for _ in range(3):
            optimizer.zero_grad()
            other.zero_grad()
            backward(engine, ours)
            theirs(torch.ones(1, 2)).sum().backward()
            step(engine, optimizer)
            other.step()
    for mine, torchs in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(mine, torchs)
    engine.close()


def test_what_waits_of_a_shared_moment_enters_it(wire: Wire) -> None:
    module = chain()
    engine = Engine(auto(), wire)
    engine.registry.add_module(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    engine.register(optimizer)
    switch(engine, onebit_adam(warmup_steps=2))
    for _ in range(5):
        optimizer.zero_grad()
        backward(engine, module)
        step(engine, optimizer)
    share = next(iter(engine.registry.optimizers[0].shares.values()))
    _, moments, residual = share.channel.memories
    held = [moments.held["exp_avg"], moments.held["exp_avg_sq"], residual.held["residual"]]
    before = [[part.clone() for part in each.parts] for each in held]
    weights = [weight for _, weight in share.parameters]
    switch(engine, dense())
    assert any(bool(part.any()) for part in before[2])
    for weight, first, second, waiting in zip(weights, *before, strict=True):
        torch.testing.assert_close(optimizer.state[weight]["exp_avg"], first + waiting / 0.9)
        torch.testing.assert_close(optimizer.state[weight]["exp_avg_sq"], second, rtol=0, atol=0)
    engine.close()


def _moments(rank: int) -> Any:
    module = Parameters()
    engine = Engine(auto(), Wire())
    engine.registry.add_module(module)
    optimizer = torch.optim.Adam(module.parameters(), betas=(0.9, 0.99))
    engine.register(optimizer)
    switch(engine, local_adam(1.0))
    torch.manual_seed(0)
    steady = [torch.randn(parameter.shape) for parameter in module.parameters()]
    noise = torch.Generator().manual_seed(rank + 1)
    squares = [torch.zeros_like(each) for each in steady]
    for _ in range(400):
        for parameter, mean, square in zip(module.parameters(), steady, squares):
            parameter.grad = mean + 0.5 * torch.randn(mean.shape, generator=noise)
            shared = Wire().all_reduce_(parameter.grad.clone()) / WORLD_SIZE
            square.mul_(0.99).add_(shared.square(), alpha=0.01)
        step(engine, optimizer)  # type: ignore[arg-type]
    switch(engine, dense())
    found = flat(optimizer.state[parameter]["exp_avg_sq"] for parameter in module.parameters())
    engine.close()
    return found, flat(squares)


@pytest.mark.slow
def test_second_moments_become_those_of_the_mean_gradient(tmp_path: Path) -> None:
    """Those of a rank's own gradient hold its noise, which is W times that of the mean."""
    found = run_ranks(tmp_path, WORLD_SIZE, _moments)
    for moments, _ in found:
        np.testing.assert_array_equal(moments, found[0][0])
    moments, of_mean = found[0]
    assert abs(float(np.mean(moments / of_mean)) - 1) < 0.1


def _average_of_own_weights(rank: int) -> Any:
    module = Parameters()
    module.register_parameter("average", torch.nn.Parameter(torch.zeros(3), requires_grad=False))
    engine = Engine(auto(), Wire())
    engine.registry.add_module(module)
    weights = [each for each in module.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(weights, 0.1, 0.9)
    engine.register(optimizer)
    averages, saved = [], []
    for method in (dgc(0.05, warmup_steps=0, every=3), dgc(0.05, warmup_steps=0, every=2), dense()):
        switch(engine, method)
        averages.append(float(module.average[0]))
        for _ in range(2):
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            step(engine, optimizer)  # type: ignore[arg-type]
            module.average.data += rank + 1
        saved.append("0.average" in engine.state.state_dict()["weights"])
    engine.settle()
    engine.close()
    return averages, saved, float(module.average[0])


def test_what_ranks_have_changed_by_themselves_is_averaged_after_local_steps(tmp_path: Path) -> None:
    """As a moving average of a rank's own weights, which no optimizer trains. Until then each rank saves its own."""
    for rank, (averages, saved, last) in enumerate(run_ranks(tmp_path, WORLD_SIZE, _average_of_own_weights)):
        # Of 1, 2 and 3, twice.
        assert averages == [0, 4, 8]
        assert saved == [True, True, False]
        assert last == 8 + 2 * (rank + 1)


def _changed_after_the_run(rank: int, saves: str) -> Any:
    module = chain()
    engine = Engine(auto(), Wire())
    engine.registry.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, 0.9)
    engine.register(optimizer)
    for method, when in ((dgc(0.5, warmup_steps=0, every=2), "amid local steps"), (dense(), "after them")):
        switch(engine, method)
        for _ in range(2):
            for weight in module.parameters():
                weight.grad = torch.ones_like(weight)
            step(engine, optimizer)
        if saves == when:
            state, engine.state.have_drifted = engine.state.state_dict(), False
            if when == "amid local steps":
                # As in a checkpoint of an older version.
                del state["have_drifted"]
            engine.state.load_state_dict(state, as_many_ranks=True)
    engine.settle()
    for weight in module.parameters():
        weight.data += rank
    engine.reunite()
    engine.close()
    return flat(weight.detach() for weight in module.parameters())


@pytest.mark.parametrize("saves", ["", "amid local steps", "after them"])
def test_what_callbacks_make_of_weights_that_have_drifted_is_averaged(tmp_path: Path, saves: str) -> None:
    """As where each rank's moving average becomes the model in the end, though the last steps were ddp's."""
    found = run_ranks(tmp_path, 2, _changed_after_the_run, saves)
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("before", range(4))
def test_local_steps_that_begin_amid_a_run_leave_unused_parameters_alone(wire: Wire, before: int) -> None:
    """Weight decay does not reach them, as under ddp."""
    module = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    unused = module[1].weight.detach().clone()
    engine = Engine(auto(), wire)
    engine.registry.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, 0.9, weight_decay=0.1)
    engine.register(optimizer)
    for number in range(before + 6):
        if number == before:
            switch(engine, dgc(0.5, warmup_steps=0, every=4))
        module[0].weight.grad = torch.ones(2, 2)
        step(engine, optimizer)
    torch.testing.assert_close(module[1].weight.detach(), unused, rtol=0, atol=0)
    engine.close()


@pytest.mark.parametrize(
    "method",
    [sbc(), gradient_dropping(local="sum", average_every=10), dgc(0.01, delay=1)],
    ids=["weights", "local mode", "delay"],
)
def test_methods_that_do_not_share_gradients_in_their_turn_are_no_candidates(method: Method) -> None:
    with pytest.raises(ValueError, match="candidates must share gradients, in each step or with `every`: without a"):
        auto(candidates=[method])


def test_candidates_deliver_what_residuals_hold() -> None:
    with pytest.raises(
        ValueError, match=r"must deliver it to the weights.*: follow_rate=True and finish=True; got dgc"
    ):
        auto(candidates=[dgc(0.01, follow_rate=False)])
    assert len(auto("exact", [gradient_dropping(0.01)]).choices) == 2


def test_local_steps_are_a_candidate() -> None:
    assert "dgc(density=0.01, every=4)" in auto(candidates=[dgc(0.01, every=4)]).choices


@pytest.mark.parametrize("candidate", [dgc, "dgc", auto()])
def test_candidates_are_methods(candidate: Any) -> None:
    with pytest.raises(TypeError, match="candidates must be methods, such as"):
        auto(candidates=[candidate])


def test_an_unknown_quality_is_refused() -> None:
    with pytest.raises(ValueError, match="quality must be one of exact, rounded, trained; got 'best'"):
        auto(quality="best")  # type: ignore[arg-type]
