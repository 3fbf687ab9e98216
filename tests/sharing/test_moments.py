"""Averages of an optimizer's own state. A whole training is compared in tests/distributed/test_delta_reference.py."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sparsecomm.basis import PARAMETERS, Wire
from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.exchange import DenseAllReduce
from lightning_sparsecomm.methods import des_loc
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import DeltaSync
from lightning_sparsecomm.sharing.moments import Moments, kept_by
from lightning_sparsecomm.testing import run_ranks

ADAM = {"exp_avg": 1, "exp_avg_sq": 2}


def _held(rank: int, holders: list[bool]) -> tuple[list[list[float]], list[int]]:
    """What a rank holds of two parameters' state after each of two exchanges, and the bytes that it has handed over."""
    wire = Wire()
    parameters = [("one", nn.Parameter(torch.zeros(2))), ("two", nn.Parameter(torch.zeros(3)))]
    optimizer = torch.optim.Adam([weight for _, weight in parameters])
    for (_, weight), has in zip(parameters, (holders[rank], True), strict=True):
        if has:
            optimizer.state[weight] = {
                "step": torch.tensor(1.0),
                "exp_avg": torch.full_like(weight, rank + 1.0),
                "exp_avg_sq": torch.full_like(weight, 10.0 * (rank + 1)),
            }
    moments, found, handed = Moments(ADAM), [], []
    for _ in range(2):
        moments.start(optimizer, parameters, later=False)
        moments.average(parameters, wire)
        moments.commit(optimizer, parameters)
        states = [optimizer.state.get(weight, {}) for _, weight in parameters]
        found.append([state[kind][0].item() if state else -1.0 for kind in ADAM for state in states])
        handed.append(wire.ledger.handed_bytes(PARAMETERS))
    return found, handed


@pytest.mark.parametrize("holders", [[True, True, True], [True, False, True], [False, False, False]])
def test_who_never_had_a_gradient_neither_counts_nor_gets_any(holders: list[bool]) -> None:
    own = [rank + 1.0 for rank, has in enumerate(holders) if has]
    mean = sum(own) / len(own) if own else -1.0
    for rank, (found, handed) in enumerate(run_ranks(3, _held, holders)):
        first, second = (mean, 10.0 * (rank + 1)) if holders[rank] else (-1.0, -1.0)
        assert found[0] == pytest.approx([first, 2.0, second, 10.0 * (rank + 1)])
        second = 10 * mean if holders[rank] else -1.0
        assert found[1] == pytest.approx([first, 2.0, second, 20.0])
        # Five elements and two flags; in the second exchange for both moments.
        assert handed == [4 * 7, 3 * 4 * 7]


def _without_dimensions(rank: int) -> float:
    """What a rank holds of a scalar parameter's state after an exchange."""
    weight = nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.Adam([weight])
    optimizer.state[weight] = {"exp_avg": torch.tensor(rank + 1.0)}
    moments = Moments({"exp_avg": 1})
    moments.exchange(optimizer, [("scale", weight)], Wire())
    moments.commit(optimizer, [("scale", weight)])
    return float(optimizer.state[weight]["exp_avg"])


def test_parameters_without_dimensions() -> None:
    assert run_ranks(2, _without_dimensions) == [1.5, 1.5]


def test_what_is_aborted_changes_nothing(wire: Wire) -> None:
    wire.world_size = 2  # Half the state is missing.
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([weight])
    optimizer.state[weight] = {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    moments = Moments(ADAM)
    moments.start(optimizer, [("weight", weight)], later=False)
    moments.average([("weight", weight)], wire)
    moments.abort()
    moments.commit(optimizer, [("weight", weight)])
    assert optimizer.state[weight]["exp_avg"].tolist() == [1.0, 1.0]
    assert moments.exchanges == 1


KINDS: dict[str, Any] = {
    "Adam": partial(torch.optim.Adam, betas=(0.8, 0.99)),
    "Adam, bfloat16": partial(torch.optim.Adam, betas=(0.8, 0.99)),
    "SGD": partial(torch.optim.SGD, momentum=0.7, dampening=0.2),
}
if hasattr(torch.optim, "Muon"):  # Since torch 2.9.
    KINDS["Muon"] = partial(torch.optim.Muon, momentum=0.7)


CHANGING = {"momentum": lambda step: 0.5 + 0.05 * step, "betas": lambda step: (0.5 + 0.05 * step, 0.9 + 0.01 * step)}


def _late(rank: int, name: str, steps: int, changing: bool, skips: bool) -> list[torch.Tensor]:
    """A rank's moments where a mean came so many steps late, and what they would be had it been there at once."""
    dtype = torch.bfloat16 if "bfloat16" in name else torch.float64
    drawn = torch.Generator().manual_seed(rank)
    gradients = [torch.randn(3, 2, generator=drawn, dtype=torch.float64) for _ in range(3 + steps)]
    late, prompt = [nn.Parameter(torch.ones(3, 2, dtype=dtype)) for _ in range(2)]
    optimizers = [KINDS[name]([weight], lr=0.1) for weight in (late, prompt)]
    moments = Moments({"exp_avg": 1, "exp_avg_sq": 1, "momentum_buffer": 1})
    for step, gradient in enumerate(gradients):
        for weight, optimizer in zip((late, prompt), optimizers, strict=True):
            weight.grad = None if skips and step == 3 else gradient.to(dtype)
            for group in optimizer.param_groups:
                # As a scheduler changes them.
                group |= {key: later(step) for key, later in CHANGING.items() if key in group and changing}
            optimizer.step()
        moments.stepped(optimizers[0], [("weight", late)])
        if step == 2:
            moments.start(optimizers[0], [("weight", late)], later=True)
            other = Moments({"exp_avg": 1, "exp_avg_sq": 1, "momentum_buffer": 1})
            other.start(optimizers[1], [("weight", prompt)], later=False)
            other.average([("weight", prompt)], Wire())
            other.commit(optimizers[1], [("weight", prompt)])
    moments.average([("weight", late)], Wire())
    moments.commit(optimizers[0], [("weight", late)])
    found = [optimizer.state[weight] for weight, optimizer in zip((late, prompt), optimizers, strict=True)]
    return [torch.stack([state[kind].double() for kind in sorted(state) if kind != "step"]) for state in found]


def _all_late(rank: int) -> dict[str, list[torch.Tensor]]:
    settings = (1, False, True), (5, False, True), (5, True, False)
    return {f"{name}, {each}": _late(rank, name, *each) for name in KINDS for each in settings}


def test_a_mean_that_comes_late_counts_as_if_it_had_been_there_from_the_start() -> None:
    """Also where a scheduler changes the decay, and where a step has no gradient."""
    for found in run_ranks(3, _all_late):
        for name, (late, prompt) in found.items():
            tolerance = 0.02 if "bfloat16" in name else 1e-12
            torch.testing.assert_close(late, prompt, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("steps", [1, 400])
def test_a_second_moment_never_falls_below_zero(wire: Wire, steps: int) -> None:
    """Where gradients have vanished, this rank's own part of it is nothing but round-off."""
    weight = nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.Adam([weight], betas=(0.9, 0.95))
    torch.manual_seed(0)
    weight.grad = torch.randn(1000)
    optimizer.step()
    moments = Moments({"exp_avg_sq": 1})
    moments.start(optimizer, [("weight", weight)], later=True)
    moments.average([("weight", weight)], wire)
    for mean in moments._means["exp_avg_sq"].values():
        mean.div_(1000)  # As of a thousand ranks, of which no other has ever had a gradient.
    for _ in range(steps):
        weight.grad = torch.zeros(1000)
        optimizer.step()
        moments.stepped(optimizer, [("weight", weight)])
    moments.commit(optimizer, [("weight", weight)])
    assert optimizer.state[weight]["exp_avg_sq"].min() >= 0


def test_state_whose_decay_is_not_known_becomes_the_mean(wire: Wire) -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adagrad([weight], lr=0.1)
    optimizer.state[weight]["sum"].fill_(3.0)
    moments = Moments({"sum": 1})
    moments.start(optimizer, [("weight", weight)], later=True)
    moments.average([("weight", weight)], wire)
    weight.grad = torch.ones(2)
    optimizer.step()
    moments.stepped(optimizer, [("weight", weight)])
    moments.commit(optimizer, [("weight", weight)])
    assert optimizer.state[weight]["sum"].tolist() == [3.0, 3.0]


class Own(torch.optim.Optimizer):
    """An optimizer of the user's, whose state nobody knows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("nobody but the user makes steps")


def test_what_an_optimizer_keeps() -> None:
    weights = [nn.Parameter(torch.zeros(2))]
    wanted = ADAM | {"momentum_buffer": 3}
    assert kept_by(torch.optim.AdamW(weights), wanted) == ADAM
    # Which a CPU does not know; other optimizers are tried there.
    assert kept_by(torch.optim.Adam(weights, capturable=True), wanted) == ADAM
    rate = torch.tensor(0.1)
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        assert kept_by(kind(weights, lr=rate, foreach=True, capturable=True), wanted) == ADAM
    assert kept_by(torch.optim.SGD(weights, lr=0.1, momentum=0.9), wanted) == {"momentum_buffer": 3}
    assert kept_by(Own(weights), wanted) == wanted
    assert kept_by(torch.optim.SGD(weights, lr=0.1), wanted) == {}
    assert kept_by(torch.optim.SGD(weights, lr=0.1), {}) == {}
    groups = [{"params": weights}, {"params": [nn.Parameter(torch.zeros(2))], "momentum": 0.9}]
    assert kept_by(torch.optim.SGD(groups, lr=0.1), wanted) == {"momentum_buffer": 3}
    # Of other shapes than the weights: a rank that has none could not know them.
    assert kept_by(torch.optim.Adafactor(weights), {"row_var": 1}) == {}


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.LBFGS,
        torch.optim.SparseAdam,
    ],
)
def test_it_is_found_for_all_of_torchs(kind: Any) -> None:
    kept_by(kind([nn.Parameter(torch.zeros(2))]), {"exp_avg": 1, "d": 1})


def test_an_optimizer_with_other_state_is_refused(wire: Wire) -> None:
    module = nn.Linear(2, 2)
    engine = Engine(des_loc(every=2), wire)
    engine.registry.add_module(module)
    text = (
        "the method is not defined for Adagrad: moments must name state that it keeps; got exp_avg, momentum_buffer,"
        " exp_avg_sq, and it keeps sum. Use torch.optim.AdamW, or"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(text)}"):
        engine.register(torch.optim.Adagrad(module.parameters(), lr=0.1))
    engine.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"moments": {"exp_avg": 0}}, r"moments\['exp_avg'\] must be a whole number, at least 1"),
    ],
)
def test_refuses(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}"):
        DeltaSync(Channel(DenseAllReduce()), **options)


@pytest.mark.parametrize("name", ["first_every", "second_every"])
def test_the_recipe_refuses(name: str) -> None:
    options: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match=f"^{name} must be a whole number, at least 1"):
        des_loc(**options)


def test_a_parameter_may_leave_the_optimizer_meanwhile_and_steps_may_be_skipped(wire: Wire) -> None:
    """As a frozen layer does, and as a loss scaler skips them: then the mean is what both have."""
    weight, frozen = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = torch.optim.SGD([weight, frozen], lr=0.1, momentum=0.9)
    named = [("weight", weight), ("frozen", frozen)]
    for parameter in (weight, frozen):
        parameter.grad = torch.ones(2)
    optimizer.step()
    moments = Moments({"momentum_buffer": 1})
    moments.start(optimizer, named, later=True)
    moments.average(named, wire)
    optimizer.param_groups[0]["params"] = [weight]
    moments.stepped(optimizer, named[1:])
    moments.commit(optimizer, named)
    for parameter in (weight, frozen):
        assert optimizer.state[parameter]["momentum_buffer"].tolist() == [1.0, 1.0]
