"""At full density, dgc replaces the momentum of torch's SGD exactly, whatever its options: as SGD under ddp."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.methods import dgc, gradient_dropping
from lightning_sparsecomm.run.engine import Engine
from tests import laws
from tests.distributed.launch import run_ranks
from tests.distributed.scenarios import Classifier, Scenario, fit

# Long together, and seldom touched: `pytest -m slow` has them.
pytestmark = pytest.mark.slow

FULL = {"density": 1.0, "warmup_steps": 0, "momentum_masking": False}


class Configured(Classifier):
    """Has any optimizer, and notes the groups' momentum in hooks, where users would see it."""

    def __init__(self, configure: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.configure = configure
        self.seen: list[float] = []

    def configure_optimizers(self) -> Any:
        return self.configure(self)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.append(optimizer.param_groups[0]["momentum"])

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(self.optimizers().param_groups[0]["momentum"])


def sgd(**options: Any) -> Callable[[nn.Module], Any]:
    return lambda module: torch.optim.SGD(module.parameters(), **{"lr": 0.1, **options})


def groups(module: nn.Module) -> Any:
    body = {"params": module.body.parameters(), "momentum": 0.5, "weight_decay": 0.1, "nesterov": True}
    side = {"params": module.side.parameters(), "momentum": 0.0, "weight_decay": 0.02}
    head = {"params": module.head.parameters(), "dampening": 0.3, "lr": 0.03}
    return torch.optim.SGD([body, side, head], lr=0.1, momentum=0.9)


def cyclic(module: nn.Module) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
    scheduler = OneCycleLR(optimizer, max_lr=0.2, total_steps=25, base_momentum=0.6, max_momentum=0.95)
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Descent(torch.optim.SGD):
    """Overrides step(), so that torch's hooks run for both its step() and SGD's."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return super().step(closure)


OPTIMIZERS = {
    "plain": sgd(),
    "momentum": sgd(momentum=0.9),
    "dampening": sgd(momentum=0.9, dampening=0.5),
    "nesterov": sgd(momentum=0.9, nesterov=True),
    "decay": sgd(momentum=0.9, weight_decay=0.1),
    "decay_dampening": sgd(momentum=0.9, weight_decay=0.1, dampening=0.5),
    "decay_nesterov": sgd(momentum=0.9, weight_decay=0.1, nesterov=True),
    "decay_only": sgd(weight_decay=0.1),
    "groups": groups,
    "cyclic_momentum": cyclic,
    "for_loop": sgd(momentum=0.9, weight_decay=0.1, foreach=False),
    "foreach": sgd(momentum=0.9, weight_decay=0.1, foreach=True),
    "fused": sgd(momentum=0.9, weight_decay=0.1, fused=True),
    "tensor_lr": sgd(lr=torch.tensor(0.1), momentum=0.9, weight_decay=0.1, foreach=False),
    "maximize": sgd(lr=0.01, momentum=0.9, weight_decay=0.1, nesterov=True, maximize=True),
    "subclass": lambda module: Descent(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1),
}


# Each of these is covered by another case.
SIMPLE = ("plain", "momentum", "dampening", "nesterov", "decay", "decay_only", "foreach")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SIMPLE else ()) for name in OPTIMIZERS]
)
def test_full_density_equals_sgd_under_ddp(tmp_path: Path, name: str) -> None:
    scenario = Scenario(lambda: Configured(OPTIMIZERS[name]))
    ddp = fit(tmp_path / "ddp", scenario, 2)
    ours = fit(tmp_path / "dgc", scenario, 2, dgc(**FULL))
    laws.trained(scenario.model().state_dict(), ours[0])
    laws.replicas_are_equal(ours)
    laws.equal_to_round_off(ours[0], ddp[0], 5e-6)


class Seen(pl.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        torch.save(pl_module.seen, self.folder / f"seen-{trainer.global_rank}.pt")


def test_users_see_their_own_momentum(tmp_path: Path) -> None:
    """Outside of step(), the groups hold what the user put there."""
    scenario = Scenario(lambda: Configured(sgd(momentum=0.9)), steps=3)
    fit(tmp_path, scenario, 2, dgc(**FULL), callbacks=(Seen(tmp_path),))
    assert torch.load(tmp_path / "seen-0.pt") == [0.9] * 6


class Resumed(Configured):
    """Starts with momentum buffers, as after loading a checkpoint of ddp."""

    def __init__(self, configure: Callable[[nn.Module], Any], buffers: list[Tensor]) -> None:
        super().__init__(configure)
        self.buffers = buffers

    def on_train_start(self) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        for parameter, buffer in zip(self.parameters(), self.buffers, strict=True):
            optimizer.state[parameter]["momentum_buffer"] = buffer.clone()


@pytest.mark.parametrize("name", ["momentum", "decay_dampening", "decay_nesterov"])
def test_momentum_of_a_ddp_run_goes_on(tmp_path: Path, name: str) -> None:
    buffers = [torch.randn(p.shape) for p in Classifier().parameters()]
    scenario = Scenario(lambda: Resumed(OPTIMIZERS[name], buffers))
    ddp = fit(tmp_path / "ddp", scenario, 2)
    ours = fit(tmp_path / "dgc", scenario, 2, dgc(**FULL))
    laws.equal_to_round_off(ours[0], ddp[0], 1e-5)


class Failing(torch.optim.SGD):
    """Raises inside its third step, after the closure."""

    steps = 0

    def _init_group(self, group: Any, *others: Any) -> Any:
        self.steps += 1
        if self.steps == 3:
            assert group["momentum"] == group["weight_decay"] == 0
            raise ZeroDivisionError("inside of step")
        return super()._init_group(group, *others)


def test_an_error_inside_of_step_gives_momentum_back(tmp_path: Path) -> None:
    (found,) = run_ranks(tmp_path, 1, _fail)
    assert found == [0.9, 0.1, 0.9, 0.1, "inside of step", 0.9, 0.1]


def _fail(rank: int) -> list[Any]:
    module = nn.Linear(2, 2)
    engine = Engine(dgc(**FULL), Wire())
    engine.registry.add_module(module)
    optimizer = Failing(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    found: list[Any] = []
    for _ in range(3):
        with engine.guards.backward():
            module(torch.ones(1, 2)).sum().backward()
        try:
            with engine.stepping(optimizer):
                engine.synchronize(optimizer)
                optimizer.step()
        except ZeroDivisionError as error:
            found.append(str(error))
        found += [optimizer.param_groups[0]["momentum"], optimizer.param_groups[0]["weight_decay"]]
        optimizer.zero_grad()
    engine.close()
    return found


class Evaluating(torch.optim.SGD):
    """Always gives SGD's step() a closure, also where it was given none."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return super().step(lambda: None if closure is None else closure())


def test_a_step_within_a_step_is_one(tmp_path: Path) -> None:
    (found,) = run_ranks(tmp_path, 1, _step_within_step)
    assert found == [[0.0, 0.9]] * 2


def _step_within_step(rank: int) -> list[list[float]]:
    # Once an SGD has been made, SGD's own step() runs hooks too.
    torch.optim.SGD([torch.zeros(1)], lr=0.1)
    module = nn.Linear(2, 2)
    engine = Engine(dgc(**FULL), Wire())
    engine.registry.add_module(module)
    optimizer = Evaluating(module.parameters(), lr=0.1, momentum=0.9)
    found: list[list[float]] = []
    for closure in ([], [lambda: None]):
        with engine.guards.backward():
            module(torch.ones(1, 2)).sum().backward()
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            optimizer.step(*closure)
            within = optimizer.param_groups[0]["momentum"]
        found.append([within, optimizer.param_groups[0]["momentum"]])
        optimizer.zero_grad()
    engine.close()
    return found


class Moments(pl.Callback):
    """Notes whether momentum is zero wherever the last gradient is not, and how much of it is not zero."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 4:
            state = [optimizer.state[p] for p in pl_module.parameters()]
            name = "exp_avg" if "exp_avg" in state[0] else "momentum_buffer"
            masked = [((s[name] == 0) | (p.grad == 0)).all().item() for s, p in zip(state, pl_module.parameters())]
            kept = sum(int((s[name] != 0).sum()) for s in state)
            torch.save((all(masked), kept), self.folder / f"moments-{trainer.global_rank}.pt")


@pytest.mark.parametrize("optimizer", [sgd(momentum=0.9), lambda module: torch.optim.Adam(module.parameters(), 0.01)])
@pytest.mark.parametrize("masking", [False, True])
def test_masking_of_the_optimizers_own_momentum(tmp_path: Path, optimizer: Any, masking: bool) -> None:
    scenario = Scenario(lambda: Unseen(optimizer), steps=5)
    method = gradient_dropping(0.05, momentum_masking=masking)
    ranks = fit(tmp_path, scenario, 2, method, callbacks=(Moments(tmp_path),))
    laws.replicas_are_equal(ranks)
    for rank in range(2):
        masked, kept = torch.load(tmp_path / f"moments-{rank}.pt")
        assert masked == masking
        assert kept > 0


class Unseen(Configured):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def on_train_batch_end(self, *_: Any) -> None:
        pass
