"""Misuse that would let replicas drift is refused."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from lightning_sparsecomm.basis import PeerError, Wire
from lightning_sparsecomm.methods import dense, dgc, gradient_dropping, local_adam
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import Method
from tests.run.training import Halving, backward, chain, equal, gradients, ready, step


def test_backward_after_sharing(engine: Engine) -> None:
    module, optimizer, shared = ready(engine)
    engine.synchronize(optimizer)
    with pytest.raises(RuntimeError, match=r"clipping had already\s+shared.*zero_grad\(\) first"):
        backward(engine, module)
    for set_to_none in (True, False):
        optimizer.zero_grad(set_to_none)
        backward(engine, module)
        engine.synchronize(optimizer)
        assert equal(gradients(module), shared)
    assert len(Halving.rounds) == 3


def test_a_backward_pass_elsewhere_does_not_matter(engine: Engine) -> None:
    module, optimizer, shared = ready(engine)
    other = chain()
    engine.registry.add_module(other)
    engine.synchronize(optimizer)
    backward(engine, other)
    engine.synchronize(optimizer)
    assert equal(gradients(module), shared)
    assert len(Halving.rounds) == 1


def test_the_guard_watches_until_close(wire: Wire) -> None:
    engine = Engine(gradient_dropping(1.0), wire)
    module, optimizer, _ = ready(engine)
    other = chain()
    other(torch.ones(1, 2)).sum().backward()
    weights = [p.clone() for p in module.parameters()]
    with pytest.raises(RuntimeError, match=r"SGD.step\(\) was called past the strategy"):
        optimizer.step()
    assert equal([p.detach() for p in module.parameters()], [w.detach() for w in weights])
    # Optimizers of other models are none of our business.
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    engine.close()
    optimizer.step()
    engine.close()


def test_the_guard_rests_between_the_end_and_the_next_backward_pass(wire: Wire) -> None:
    """A Fabric's model goes on to be trained by torch alone, after `settle`."""
    engine = Engine(gradient_dropping(1.0), wire)
    module, optimizer, _ = ready(engine)
    step(engine, optimizer)
    engine.settle()
    optimizer.step()
    backward(engine, module)
    with pytest.raises(RuntimeError, match=r"SGD.step\(\) was called past the strategy"):
        optimizer.step()
    engine.close()


def test_a_step_through_another_run_is_none_of_a_runs_business(wire: Wire) -> None:
    """Nothing closes a Fabric run, whose model another Fabric may train meanwhile."""
    former = Engine(gradient_dropping(1.0), wire)
    module, optimizer, _ = ready(former)
    step(former, optimizer)
    engine = Engine(gradient_dropping(1.0), wire)
    engine.registry.add_module(module)
    another = torch.optim.SGD(module.parameters(), lr=0.1)
    backward(engine, module)
    step(engine, another)
    for each in (engine, former):
        each.close()


def test_a_run_that_is_collected_in_the_middle_of_a_step_does_not_fail_it(wire: Wire) -> None:
    """Nothing closes a Fabric run, and the garbage collector takes it whenever it likes."""
    runs: list[Engine] = []

    def collect(*_: object) -> None:
        del runs[1:]
        gc.collect()

    collects = register_optimizer_step_pre_hook(collect)
    runs += [Engine(gradient_dropping(1.0), wire) for _ in range(3)]
    others = chain()
    others(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(others.parameters(), lr=0.1).step()
    collects.remove()
    assert len(runs) == 1
    runs[0].close()


def test_no_hook_stays_when_the_last_run_is_closed(wire: Wire) -> None:
    before = list(_global_optimizer_pre_hooks)
    runs = [Engine(gradient_dropping(1.0), wire) for _ in range(2)]
    assert len(_global_optimizer_pre_hooks) == len(before) + 1
    for run in runs:
        run.close()
    assert list(_global_optimizer_pre_hooks) == before


def test_a_method_in_buckets_needs_no_guard(wire: Wire) -> None:
    engine = Engine(dense(), wire)
    _, optimizer, _ = ready(engine)
    optimizer.step()
    engine.close()


def test_gradients_that_were_changed_before_they_are_shared_are_warned_of(engine: Engine) -> None:
    module, optimizer, _ = ready(engine)
    step(engine, optimizer)
    optimizer.zero_grad()
    backward(engine, module)
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
    with pytest.warns(UserWarning, match=r"gradients of SGD were changed.*strategy.synchronize\(optimizer\)"):
        engine.synchronize(optimizer)
    step(engine, optimizer)
    optimizer.zero_grad()
    backward(engine, module)
    step(engine, optimizer)


@pytest.mark.parametrize(
    ("method", "make"),
    [
        (dgc(1.0, warmup_steps=0), torch.optim.SGD),
        (dgc(0.5, warmup_steps=0, every=2), torch.optim.SGD),
        (local_adam(0.5), torch.optim.AdamW),
    ],
    ids=repr,
)
def test_gradients_that_a_step_has_left_are_not_taken_for_new_ones(wire: Wire, method: Method, make: Any) -> None:
    """They hold momentum or a direction; with ddp, and where gradients are dropped, they hold the mean gradient."""

    def train(engine: Engine, clear: Callable[[torch.optim.Optimizer], object]) -> None:
        module = chain()
        engine.registry.add_module(module)
        optimizer = make(module.parameters(), lr=0.1)
        for _ in range(3):
            backward(engine, module)
            step(engine, optimizer)
            clear(optimizer)
        engine.close()

    def halve(optimizer: torch.optim.Optimizer) -> None:
        for weight in optimizer.param_groups[0]["params"]:
            weight.grad.mul_(0.5)

    for set_to_none in (True, False):
        train(Engine(method, wire), lambda optimizer, none=set_to_none: optimizer.zero_grad(none))  # type: ignore[misc]
    for leave in (lambda optimizer: None, halve):
        with pytest.raises(
            RuntimeError, match=r"gradient of '0.weight' was not cleared since the last optimizer step.*zero_grad"
        ):
            train(Engine(method, wire), leave)
        train(Engine(gradient_dropping(1.0), wire), leave)


def test_gradients_that_are_cleared_after_a_step_are_freed(wire: Wire) -> None:
    engine = Engine(dgc(1.0, warmup_steps=0), wire)
    module, optimizer, _ = ready(engine)
    step(engine, optimizer)
    gradients = [weakref.ref(weight.grad) for weight in module.parameters()]
    optimizer.zero_grad()
    assert [gradient() for gradient in gradients] == [None, None]


def test_what_a_step_has_left_is_no_gradient_for_another_optimizer(wire: Wire) -> None:
    engine = Engine(dgc(1.0, warmup_steps=0), wire)
    module, optimizer, _ = ready(engine)
    other = torch.optim.SGD(module.parameters(), lr=0.1)
    engine.register(other)
    step(engine, optimizer)
    with pytest.raises(RuntimeError, match="was not cleared since the last optimizer step"):
        step(engine, other)


def test_a_backward_pass_over_what_a_step_has_left_may_be_cleared_later(wire: Wire) -> None:
    """As of a discriminator in the step of its generator."""
    engine = Engine(dgc(1.0, warmup_steps=0), wire)
    module, optimizer, _ = ready(engine)
    for _ in range(2):
        step(engine, optimizer)
        backward(engine, module)
        optimizer.zero_grad(set_to_none=False)
        backward(engine, module)


def test_a_step_that_never_calls_its_closure_is_refused(engine: Engine) -> None:
    _, optimizer, _ = ready(engine)
    unshared = r"SGD.step\(\) did not call the closure.*strategy.synchronize"
    with pytest.raises(RuntimeError, match=unshared), engine.stepping(optimizer):
        optimizer.step()


def test_a_backward_pass_that_fails_for_want_of_a_peer_says_so(wire: Wire) -> None:
    engine = Engine(dense(), wire)
    failure = PeerError("rank 0 waited in vain")
    with pytest.raises(RuntimeError, match="quoted"), engine.guards.backward():
        raise RuntimeError("quoted")
    wire.failures.append(failure)
    with pytest.raises(PeerError, match="in vain"), engine.guards.backward():
        raise RuntimeError("quoted")
    engine.close()
