"""Which parameters are trained, under which names, and by which optimizer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.exchange import DenseAllReduce
from lightning_sparsecomm.methods import default, dgc, federated_averaging, gradient_dropping, sbc
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.registry import Registry
from lightning_sparsecomm.sharing import GradientSync, Method
from tests.run.training import Halving, backward, chain, gradients, ready


def test_unfrozen_parameters_join_in_the_modules_order(engine: Engine) -> None:
    module = chain()
    module[0].requires_grad_(False)
    engine.registry.add_module(module)
    # In an order of its own, as add_param_group gives it.
    optimizer = torch.optim.SGD(module[1].parameters(), lr=0.1)
    engine.register(optimizer)
    for step in range(3):
        if step == 1:
            module[0].requires_grad_(True)
            optimizer.add_param_group({"params": module[0].parameters()})
        if step == 2:
            module[0].requires_grad_(False)
        optimizer.zero_grad()
        backward(engine, module)
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            optimizer.step()
    # What is frozen again stays in the layout, so that its residual has a place.
    assert Halving.rounds == [(["1.weight"], 0), (["0.weight", "1.weight"], 1), (["0.weight", "1.weight"], 2)]


def test_a_module_that_grows_is_looked_at_again(engine: Engine) -> None:
    module, optimizer, _ = ready(engine)
    module.append(nn.Linear(1, 1, bias=False))
    optimizer.add_param_group({"params": module[2].parameters()})
    optimizer.zero_grad()
    backward(engine, module)
    engine.synchronize(optimizer)
    assert Halving.rounds == [(["0.weight", "1.weight", "2.weight"], 0)]


def test_a_tied_parameter_has_one_place(engine: Engine) -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight
    engine.registry.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    backward(engine, module)
    before = gradients(module)
    engine.synchronize(optimizer)
    assert Halving.rounds == [(["0.weight"], 0)]
    assert torch.equal(gradients(module)[0], before[0] / 2)


def test_names_of_a_second_module_differ(engine: Engine) -> None:
    first, second = chain(), chain()
    for module in (first, second):
        engine.registry.add_module(module)
        backward(engine, module)
    engine.synchronize(torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1))
    names = ["0.weight", "1.weight", "module_1.0.weight", "module_1.1.weight"]
    assert Halving.rounds == [(names, 0)]


def registry(method: Method, wire: Wire, *modules: nn.Module) -> Registry:
    made = Registry(method, wire, None)
    for module in modules:
        made.add_module(module)
    return made


def dense(*parameters: str) -> GradientSync:
    return GradientSync(Channel(DenseAllReduce()), parameters=parameters or ("*",))


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def table() -> nn.Module:
    return nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


def test_methods_and_their_fallbacks(wire: Wire) -> None:
    method = default()
    made = registry(method, wire)
    adam = method.fallback
    assert adam is not None and adam.fallback is not None
    assert made.methods == [method, adam, adam.fallback]
    assert made.syncs == [*method.syncs, *adam.syncs, *adam.fallback.syncs]
    assert made.named == []


@pytest.mark.parametrize(
    ("method", "module", "error", "text"),
    [
        (
            gradient_dropping(exclude=["*.bais"]),
            linear,
            ValueError,
            r"exclude: the pattern '\*.bais' matches no parameter.*0.weight, 0.bias, 1.weight, 1.bias",
        ),
        (Method([dense("head.*")]), linear, ValueError, r"parameters: the pattern 'head.\*' matches no parameter"),
        (Method([dense().limited(inside=["2.*"])]), linear, ValueError, r"parameters: the pattern '2.\*' matches no"),
        (Method([dense(), dense("*.bias")]), linear, ValueError, "'0.bias' belongs to 2. Change the `parameters` and"),
        (Method([dense("*.weight")]), linear, ValueError, "'0.bias' belongs to 0. Change the `parameters` and"),
        (gradient_dropping(), table, TypeError, r"gradient of '0.weight' is sparse.*methods.split\(\['0.weight'\]"),
        (gradient_dropping(), Complex, TypeError, "parameter 'weight' is complex, which no method can take"),
    ],
)
def test_modules_that_a_method_cannot_take_are_refused(
    wire: Wire, method: Method, module: Callable[[], nn.Module], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        registry(method, wire, module()).check()


def test_a_frozen_parameter_is_refused_once_it_trains(wire: Wire) -> None:
    module = table()
    module[0].requires_grad_(False)  # type: ignore[index]
    made = registry(gradient_dropping(), wire, module)
    made.check()
    tracked = made.register(torch.optim.SGD(module.parameters(), lr=0.1))
    made.admit(tracked)
    assert [name for name, _ in tracked.parameters] == ["1.weight", "1.bias"]
    module[0].requires_grad_(True)  # type: ignore[index]
    with pytest.raises(TypeError, match=r"gradient of '0.weight' is sparse"):
        made.admit(tracked)


def test_parameters_that_no_module_holds_are_refused(wire: Wire) -> None:
    module = linear()
    made = registry(gradient_dropping(), wire, module)
    stranger = nn.Parameter(torch.zeros(5, 2))
    tracked = made.register(torch.optim.SGD([*module.parameters(), stranger], lr=0.1))
    with pytest.raises(ValueError, match=r"holds 1 parameter\(s\) that the model lacks, of shapes \(5, 2\)"):
        made.admit(tracked)
    # A module may have grown since.
    module.register_parameter("late", stranger)
    made.admit(tracked)
    assert "late" in [name for name, _ in tracked.parameters]


def test_what_ddp_ignores_is_left_alone(wire: Wire) -> None:
    module: Any = linear()
    module._ddp_params_and_buffers_to_ignore = ["1.bias"]
    made = registry(gradient_dropping(), wire, module)
    tracked = made.register(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    made.admit(tracked)
    assert (
        [name for name, _ in made.named]
        == [name for name, _ in tracked.parameters]
        == ["0.weight", "0.bias", "1.weight"]
    )
    refusing = registry(dgc(), wire, module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    # Whoever catches the refusal and steps the optimizer is refused again.
    for refused in (refusing.register, lambda each: refusing.admit(refusing.find(each))):
        with pytest.raises(ValueError, match="parameters which DDP is told to ignore"):
            refused(optimizer)
    assert refusing.optimizers[0].takeover is refusing.optimizers[0].method is None


def test_weights_have_one_owner_where_they_are_exchanged(wire: Wire) -> None:
    for method, refused in ((federated_averaging(), True), (sbc(), True), (gradient_dropping(), False)):
        module = linear()
        made = registry(method, wire, module)
        first, second = (made.register(torch.optim.SGD(module.parameters(), lr=0.1)) for _ in range(2))
        made.admit(first)
        if refused:
            with pytest.raises(ValueError, match=r"parameter '0.weight' belongs to two optimizers"):
                made.admit(second)
        else:
            made.admit(second)


def test_optimizers_are_known_by_identity(wire: Wire) -> None:
    module = linear()
    made = registry(gradient_dropping(), wire, module)
    optimizer, other = (torch.optim.SGD(module.parameters(), lr=0.1) for _ in range(2))
    tracked = made.register(optimizer)
    assert made.find(optimizer) is tracked
    assert made.find(other) is None
    assert made.register(other).number == 1


def test_a_method_is_chosen_when_the_module_is_known(wire: Wire) -> None:
    module = linear()
    made = registry(dgc(), wire)
    tracked = made.register(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    assert tracked.method is None
    made.add_module(module)
    made.choose(tracked)
    assert tracked.method is not None
    assert tracked.takeover is not None
    tracked.takeover.close()
    with pytest.raises(TypeError, match="the method is not defined for Adam"):
        made.register(torch.optim.Adam(module.parameters()))


def test_a_share_is_kept_when_its_parameters_grow_and_made_anew_by_a_restart(wire: Wire) -> None:
    module = linear()
    module[0].requires_grad_(False)  # type: ignore[index]
    made = registry(gradient_dropping(), wire, module)
    tracked = made.register(torch.optim.SGD(module.parameters(), lr=0.1))
    made.admit(tracked)
    (share,) = tracked.shares.values()
    module[0].requires_grad_(True)  # type: ignore[index]
    made.admit(tracked)
    assert list(tracked.shares.values()) == [share]
    assert [segment.name for segment in share.layout.segments] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    tracked.steps, tracked.shared = 5, True
    made.restart()
    (anew,) = tracked.shares.values()
    assert anew is not share
    assert anew.layout == share.layout
    assert (tracked.steps, tracked.shared) == (0, False)
