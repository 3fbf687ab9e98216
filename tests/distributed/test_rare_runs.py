"""What few runs do: errors that are caught, ranks without gradients, closures evaluated again, frozen parts."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.basis.groups import broadcast_object
from lightning_sparsecomm.basis.ledger import PARAMETERS
from lightning_sparsecomm.basis.schedules import PartOfRun
from lightning_sparsecomm.exchange import NonFiniteGradientError
from lightning_sparsecomm.methods import (
    default,
    dgc,
    diloco,
    federated_averaging,
    gradient_dropping,
    local_adam,
    onebit_adam,
    quantized,
    sbc,
    sketched_sgd,
    split,
)
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import Method
from lightning_sparsecomm.testing import run_ranks

Gradients = Callable[[int], list[Tensor | None]]


class Run:
    """One rank's training of a module, whose gradients are given."""

    def __init__(self, method: Method, module: nn.Module, make: Any = torch.optim.SGD, **options: Any) -> None:
        self.module = module
        self.engine = Engine(method, Wire())
        self.engine.registry.add_module(module)
        self.engine.agreement.on_setup()
        self.engine.begin()
        self.optimizer: Any = make(module.parameters(), **{"lr": 0.1, **options})
        self.engine.register(self.optimizer)
        self.caught = 0

    def step(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self.module.parameters(), gradients, strict=True):
            parameter.grad = gradient if parameter.requires_grad else None
        with self.engine.guards.backward():
            pass
        with self.engine.stepping(self.optimizer):
            self.engine.closure(self.optimizer, lambda: None)()
            self.optimizer.step()

    def like(self, value: float) -> list[Tensor | None]:
        return [torch.full_like(parameter, value) for parameter in self.module.parameters()]

    @contextmanager
    def catching(self) -> Iterator[None]:
        try:
            yield
        except NonFiniteGradientError:
            self.caught += 1


def _without_gradients(rank: int, by_adam: bool) -> list[float]:
    """What waits on a rank after each of four steps. Rank 0 has no gradients after the first, rank 1 only zeros."""
    module = nn.Linear(4, 4, bias=False)
    nn.init.zeros_(module.weight)
    if by_adam:
        run = Run(local_adam(0.25, every=4, warmup_steps=0), module, torch.optim.Adam)
    else:
        run = Run(dgc(0.25, every=4, warmup_steps=0), module)
    waiting = []
    for step, rate in enumerate([0.1, 0.01, 0.001, 0.001]):
        run.optimizer.param_groups[0]["lr"] = rate
        given = torch.arange(1.0, 17).view(4, 4) * (step == 0)
        run.step([given if step == 0 or rank == 1 else None])
        (share,) = run.engine.registry.optimizers[0].shares.values()
        (residual,) = share.channel.residuals
        waiting.append(residual.waiting(share.layout)[0].item())
    run.engine.close()
    return waiting


@pytest.mark.parametrize("by_adam", [False, True])
def test_in_local_steps_no_gradient_is_a_gradient_of_zero(by_adam: bool) -> None:
    without, with_zeros = run_ranks(2, _without_gradients, by_adam)
    assert without == pytest.approx(with_zeros)
    if not by_adam:
        assert without == pytest.approx([0.1] * 4)


def _settled(rank: int) -> tuple[int, float]:
    run = Run(dgc(0.5, warmup_steps=0, every=4), nn.Linear(4, 4))
    start = run.module.weight.detach().clone()
    for step in range(3):
        gradients = run.like(rank + 1.0)
        if step == 2 and rank == 1:
            gradients[0][0, 0] = torch.nan  # type: ignore[index]
        run.step(gradients)
    for _ in range(2):
        with run.catching():
            run.engine.settle()
    run.engine.close()
    return run.caught, (start - run.module.weight.detach()).mean().item()


def test_a_gradient_of_a_local_step_that_is_not_finite_is_refused_once() -> None:
    """The other steps' gradients are delivered afterwards."""
    for caught, moved in run_ranks(2, _settled):
        assert caught == 1
        # Two steps of both ranks, and a third one of rank 0.
        assert moved == pytest.approx(0.1 * (2 * 1.5 + 0.5), rel=0.3)


def _thawed(rank: int, by_onebit_adam: bool) -> tuple[int, list[float]]:
    """A layer thaws, and a gradient that is not finite is met: in flight, or in the same exchange."""
    module = nn.Sequential(nn.Linear(9, 9, bias=False), nn.Linear(9, 9, bias=False))
    for layer in module:
        nn.init.ones_(layer.weight)
    module[1].requires_grad_(False)
    if by_onebit_adam:
        run = Run(onebit_adam(warmup_steps=1), module, torch.optim.Adam)
    else:
        run = Run(dgc(1.0, warmup_steps=0, delay=1), module)
    generator = torch.Generator().manual_seed(rank)
    for step in range(8):
        if step == 3:
            module[1].requires_grad_(True)
        for attempt in range(2):
            gradients: list[Tensor | None] = [torch.randn(9, 9, generator=generator) for _ in range(2)]
            if rank == 1 and not attempt and step == (4 if by_onebit_adam else 2):
                gradients[0][0, 0] = torch.nan  # type: ignore[index]
            before = run.caught
            with run.catching():
                run.step(gradients)
            if run.caught == before:
                break
    # Refuses ranks whose weights differ.
    run.engine.settle()
    run.engine.close()
    return run.caught, [weight.detach().double().sum().item() for weight in module.parameters()]


@pytest.mark.parametrize("by_onebit_adam", [False, True])
def test_a_layer_that_thaws_is_trained_though_a_gradient_is_not_finite(by_onebit_adam: bool) -> None:
    first, second = run_ranks(2, _thawed, by_onebit_adam)
    assert first == second
    caught, sums = first
    assert caught == 1
    assert 81.0 not in sums


class Twice(torch.optim.SGD):
    """Evaluates its closure again where it has moved to, and steps from where it was, as SAM."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        loss = closure()
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for weight in weights:
            weight.add_(weight.grad, alpha=0.05)
        closure()
        for weight in weights:
            weight.sub_(weight.grad, alpha=0.05)
        super().step()
        return loss


def _by_closures(rank: int, kind: str) -> tuple[float, set[str]]:
    """How far the shared weights move, by the mean of what ranks have changed; and what counts as set by the user."""
    torch.manual_seed(0)
    module = nn.Linear(4, 3)
    start = module.weight.detach().clone()
    make = Twice if kind == "twice" else torch.optim.LBFGS
    run = Run(diloco(every=2, outer_lr=0.5, outer_momentum=0.0), module, make)
    torch.manual_seed(10 + rank)
    x, y = torch.randn(16, 4), torch.randn(16, 3)

    def closure() -> Tensor:
        run.optimizer.zero_grad()
        with torch.enable_grad(), run.engine.guards.backward():
            loss = (module(x) - y).square().mean()
            loss.backward()
        return loss

    for _ in range(2):
        with run.engine.stepping(run.optimizer):
            run.optimizer.step(run.engine.closure(run.optimizer, closure))
            own = module.weight.detach().clone()
            (share,) = run.engine.registry.optimizers[0].shares.values()
            found = set(share._set_weights.found)  # type: ignore[attr-defined]
    mean = Wire().all_reduce_(own) / 2
    run.engine.close()
    return ((module.weight - start).norm() / (mean - start).norm()).item(), found


@pytest.mark.parametrize("kind", ["twice", "LBFGS"])
def test_what_an_optimizer_changes_between_two_evaluations_is_training(kind: str) -> None:
    for moved, found in run_ranks(2, _by_closures, kind):
        assert found == set()
        assert moved == pytest.approx(0.5, rel=1e-4)


def _frozen(rank: int) -> tuple[list[int], bool]:
    """Bytes for parameters in three steps, of a run that never stopped and of one that resumed; and whether they end
    with the same bits."""

    def begin() -> Run:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 2))
        module[0].requires_grad_(False)
        return Run(diloco(every=2), module)

    def train(run: Run, steps: range) -> int:
        before = run.engine.wire.ledger.handed_bytes(PARAMETERS)
        for step in steps:
            generator = torch.Generator().manual_seed(100 * rank + step)
            run.step([torch.randn(weight.shape, generator=generator) for weight in run.module.parameters()])
        return run.engine.wire.ledger.handed_bytes(PARAMETERS) - before

    run = begin()
    train(run, range(3))
    state = copy.deepcopy(run.engine.state.state_dict())
    run.engine.replicas.view_shared()
    model, optimizer = copy.deepcopy(run.module.state_dict()), copy.deepcopy(run.optimizer.state_dict())
    run.engine.replicas.view_own()
    plain = train(run, range(3, 6))
    ended = copy.deepcopy(run.module.state_dict())
    run.engine.close()

    run = begin()
    run.module.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    run.engine.restart()
    run.engine.state.load_state_dict(state, True)
    resumed = train(run, range(3, 6))
    run.engine.close()
    return [plain, resumed], all(torch.equal(ended[name], each) for name, each in run.module.state_dict().items())


def test_a_resumed_run_does_not_average_what_is_frozen() -> None:
    for (plain, resumed), alike in run_ranks(3, _frozen):
        assert resumed == plain < 100
        assert alike


def _with_another_method(rank: int, method: Method) -> bool:
    """Whether ranks end alike that resume, with another method, a run of weights that drifted."""

    def begin(method: Method) -> Run:
        torch.manual_seed(0)
        return Run(method, nn.Linear(30, 2), lr=0.1, momentum=0.9, weight_decay=0.1)

    def train(run: Run, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(100 * rank + step)
            run.step([torch.randn(weight.shape, generator=generator) for weight in run.module.parameters()])

    run = begin(federated_averaging(every=4))
    train(run, range(4))
    saved = [run.module.state_dict(), run.optimizer.state_dict()]
    model, optimizer = broadcast_object(copy.deepcopy(saved), 0, run.engine.wire.group)
    state = copy.deepcopy(run.engine.state.state_dict())
    run.engine.close()
    run = begin(method)
    run.module.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    run.engine.restart()
    run.engine.state.load_state_dict(state, True)
    train(run, range(4, 10))
    # Raises where they differ.
    run.engine.settle()
    run.engine.close()
    return True


@pytest.mark.parametrize("method", [dgc(0.1, warmup_steps=0, every=3), dgc(0.1, warmup_steps=0, delay=1)], ids=repr)
def test_momentum_of_ranks_that_drifted_moves_no_shared_weights(method: Method) -> None:
    assert run_ranks(2, _with_another_method, method) == [True, True]


def _in_turns(rank: int) -> float:
    """How far the weights of a critic end from those of ddp, when each optimizer's turn freezes the other's layer."""
    critic, generator = nn.Linear(20, 2, bias=False), nn.Linear(20, 2, bias=False)
    run = Run(dgc(0.1, warmup_steps=0), nn.ModuleList([critic, generator]))
    run.optimizer.param_groups[0]["params"] = [critic.weight]
    other = torch.optim.SGD([generator.weight], lr=0.1)
    run.engine.register(other)
    begun, taken = critic.weight.detach().clone(), torch.zeros(2, 20)
    for turn in range(10):
        for optimizer, trained, frozen in ((run.optimizer, critic, generator), (other, generator, critic)):
            trained.requires_grad_(True)
            frozen.requires_grad_(False)
            gradients = [torch.randn(2, 20, generator=torch.Generator().manual_seed(10 * turn + r)) for r in (0, 1)]
            frozen.weight.grad, trained.weight.grad = None, gradients[rank].clone()
            with run.engine.guards.backward():
                pass
            with run.engine.stepping(optimizer):
                run.engine.closure(optimizer, lambda: None)()
                optimizer.step()
            taken += (gradients[0] + gradients[1]) / 2 * (trained is critic)
    run.engine.settle()
    run.engine.close()
    return float((critic.weight.detach() - (begun - 0.1 * taken)).abs().max())


def test_what_waits_for_a_layer_that_another_turn_freezes_is_used() -> None:
    """As of a critic, frozen while its generator is trained when the training ends."""
    assert all(distance < 1e-5 for distance in run_ranks(2, _in_turns))


def _exchanges(rank: int, method: Method) -> int:
    run = Run(method, nn.Linear(3, 2))
    run.engine.length = 40
    before = run.module.weight.detach().clone()
    changed = 0
    for _ in range(40):
        run.step(run.like(rank + 1.0))
        shared = dict(run.engine.registry.optimizers[0].shares)
        (share,) = shared.values()
        anchor = share.anchors["weight"].clone()  # type: ignore[attr-defined]
        changed += not torch.equal(anchor, before)
        before = anchor
    run.engine.close()
    return changed


@pytest.mark.parametrize("method", [federated_averaging(every=PartOfRun(0.1)), sbc(0.5, every=PartOfRun(0.1))])
def test_schedules_of_weights_follow_the_runs_length(method: Method) -> None:
    assert run_ranks(2, _exchanges, method) == [10, 10]


def _through_small_rates(rank: int) -> list[float]:
    """The largest weight after each step of a run whose rate falls to almost nothing, and rises again."""
    module = nn.Linear(4, 4, bias=False)
    nn.init.zeros_(module.weight)
    run = Run(gradient_dropping(0.25), module, momentum=0.9)
    largest = []
    for rate in (0.1, 0.1, 0.1, 0.0, 0.1, 0.1, 1e-6, 0.1):
        run.optimizer.param_groups[0]["lr"] = rate
        run.step(run.like(1.0))
        largest.append(module.weight.abs().max().item())
    run.engine.close()
    return largest


def test_momentum_after_the_exchange_does_not_blow_up_as_the_rate_rises() -> None:
    """ddp's weights end at 3.5; a buffer that was filled at a thousandth of the rate would take them beyond 100."""
    for largest in run_ranks(2, _through_small_rates):
        assert max(largest) < 12


def test_another_fallback_stays_in_a_run_of_known_length() -> None:
    for method in (default().with_fallback(quantized()).for_run(1000, 2), default().for_run(1000, 2)):
        chain = [str(each.call).partition("(")[0] for each in method.chain]
        assert chain[0] == "dgc"
    chain = [str(each.call).partition("(")[0] for each in default().with_fallback(quantized()).for_run(1000, 2).chain]
    assert chain == ["dgc", "quantized"]


def _joins_late(rank: int, method: Method, held: bool) -> float:
    """Where a parameter ends that is trained from step 2 on, given to the optimizer then or frozen until then."""
    module = nn.ModuleDict({"head": nn.Linear(3, 3, bias=False), "body": nn.Linear(3, 3, bias=False)})
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    module["body"].requires_grad_(False)
    held_now = module.parameters() if held else module["head"].parameters()
    run = Run(method, module, lambda _, **options: torch.optim.SGD(held_now, momentum=0.9, **options))
    for step in range(8):
        if step == 2:
            module["body"].requires_grad_(True)
            if not held:
                run.optimizer.add_param_group({"params": [module["body"].weight]})
        run.step(run.like(1.0))
    run.engine.close()
    return module["body"].weight.detach().mean().item()


SPLIT = [
    split(["body.*"], dgc(1.0, warmup_steps=0), gradient_dropping(1.0)),
    split(["body.*"], gradient_dropping(1.0), dgc(1.0, warmup_steps=0)),
]


@pytest.mark.parametrize("method", SPLIT, ids=["dgc late", "dgc first"])
def test_a_part_that_gets_its_first_parameter_late(method: Method) -> None:
    """Momentum would count twice there, or not at all."""
    velocity = weight = 0.0
    for _ in range(6):
        velocity = 0.9 * velocity + 1
        weight -= 0.1 * velocity
    assert run_ranks(2, _joins_late, method, True) == pytest.approx([weight] * 2)
    with pytest.raises(Exception, match=r"parameter 'body.weight' must belong to its optimizer from the first step on"):
        run_ranks(2, _joins_late, method, False)


def _without_elements(rank: int) -> float:
    """The bias of a model whose only matrix has no rows, after a step."""
    module = nn.ParameterDict({"matrix": nn.Parameter(torch.empty(0, 5)), "bias": nn.Parameter(torch.zeros(3))})
    run = Run(sketched_sgd(recovery="heavymix"), module)
    run.step(run.like(rank + 1.0))
    run.engine.close()
    return module["bias"][0].item()


def test_a_sketch_of_nothing() -> None:
    assert run_ranks(2, _without_elements) == pytest.approx([-0.15, -0.15])
