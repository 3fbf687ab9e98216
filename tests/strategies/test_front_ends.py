"""The strategy in every front end: Trainer and Fabric of both packages, and every way to start processes."""

import importlib
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sparsecomm.methods import RECIPES, auto, default, federated_averaging, gradient_dropping
from lightning_sparsecomm.sharing import Method
from lightning_sparsecomm.strategies.registration import START_METHODS
from tests.distributed.launch import QUIET

TRAINERS = ["pytorch_lightning", "lightning.pytorch"]
FABRICS = ["lightning_fabric", "lightning.fabric"]
STEPS = 6


def strategy_of(package: str) -> Any:
    return importlib.import_module(f"lightning_sparsecomm.strategies.{package}").SparseCommStrategy


def ddp_of(package: str) -> Any:
    return importlib.import_module(f"{package}.strategies").DDPStrategy


def network() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 60), nn.Tanh(), nn.Linear(60, 4))


def batches(rank: int = 0) -> list[Tensor]:
    return list(torch.randn(STEPS, 8, 12, generator=torch.Generator().manual_seed(rank)))


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return (module(x) - x[:, :4].sin()).square().mean()


class _Training:
    """What both packages' modules do. Each rank leaves its weights and its bytes in a file."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.network, self.folder = network(), folder

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return loss_of(self.network, batch)

    def configure_optimizers(self: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def on_train_end(self: Any) -> None:
        ledger = self.trainer.strategy.ledger
        harvest = {
            "weights": self.state_dict(),
            "link_bytes": ledger.link_bytes(),
            "ddp_link_bytes": ledger.ddp_link_bytes,
            "steps": ledger.steps,
        }
        torch.save(harvest, self.folder / f"{self.trainer.global_rank}.pt")


class PytorchLightningModel(_Training, pl.LightningModule):
    """At the module's top, for `spawn`."""


def model_of(package: str, folder: Path) -> Any:
    if package == "pytorch_lightning":
        return PytorchLightningModel(folder)
    base = importlib.import_module(package).LightningModule
    return type("Model", (_Training, base), {})(folder)


def fit(package: str, folder: Path, strategy: Any) -> list[dict[str, Any]]:
    train(package, folder, strategy)
    return load(folder)


def train(package: str, folder: Path, strategy: Any) -> None:
    trainer = importlib.import_module(package).Trainer(
        strategy=strategy,
        devices=2,
        max_epochs=1,
        enable_checkpointing=False,
        **QUIET,
    )
    trainer.fit(model_of(package, folder), DataLoader(torch.cat(batches() + batches(1)), batch_size=8))


def load(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def assert_trained_alike(ranks: list[dict[str, Any]], start: dict[str, Tensor]) -> None:
    first, second = (rank["weights"] for rank in ranks)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.numpy().tobytes() == second[name].numpy().tobytes(), name
    assert any(not torch.equal(tensor, start[name]) for name, tensor in first.items())


@pytest.mark.parametrize("package", TRAINERS)
@pytest.mark.filterwarnings("ignore:the warm-up does not end before the training")
def test_trainer(package: str, tmp_path: Path) -> None:
    start = model_of(package, tmp_path).state_dict()
    dense = fit(package, tmp_path, "sparsecomm_dense_fork")
    assert_trained_alike(dense, start)
    assert dense[0]["link_bytes"] == dense[0]["ddp_link_bytes"] == STEPS * 4 * sum(p.numel() for p in start.values())
    made = strategy_of(package)(gradient_dropping(0.01), start_method="fork")
    for strategy in ("sparsecomm_gradient_dropping_fork", made):
        sparse = fit(package, tmp_path, strategy)
        assert_trained_alike(sparse, start)
        for rank in sparse:
            assert rank["steps"] == STEPS
            assert rank["ddp_link_bytes"] == dense[0]["link_bytes"]
            assert 0 < rank["link_bytes"] < dense[0]["link_bytes"] / 20
    warming = fit(package, tmp_path, "sparsecomm_fork")
    assert_trained_alike(warming, start)
    assert 0 < warming[0]["link_bytes"] < dense[0]["link_bytes"] / 2


@pytest.mark.parametrize("strategy", ["ddp_fork", "sparsecomm_gradient_dropping_fork"])
def test_a_checkpoint_is_saved_after_a_fit_in_forks(strategy: str, tmp_path: Path) -> None:
    trainer = pl.Trainer(strategy=strategy, devices=2, max_epochs=1, enable_checkpointing=False, **QUIET)
    model = PytorchLightningModel(tmp_path)
    model.on_train_end = lambda: None  # type: ignore[method-assign]
    trainer.fit(model, DataLoader(torch.cat(batches() + batches(1)), batch_size=8))
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    saved = torch.load(tmp_path / "after.ckpt", weights_only=False)["state_dict"]
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())
    start = network().state_dict()
    assert not all(torch.equal(saved[f"network.{name}"], tensor) for name, tensor in start.items())


@pytest.mark.parametrize("package", TRAINERS[:1] + FABRICS[:1])
def test_forks_make_their_own_pool_of_threads(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there are other threads, such as Gloo's, two of which could make it at once."""
    parent, threads, set_num_threads = os.getpid(), torch.get_num_threads(), torch.set_num_threads

    def noted(count: int) -> None:
        assert os.getpid() != parent and count == threads and not torch.distributed.is_initialized()
        (tmp_path / f"pool of {os.getpid()}").touch()
        set_num_threads(count)

    monkeypatch.setattr(torch, "set_num_threads", noted)
    strategy = strategy_of(package)(gradient_dropping(0.1), start_method="fork")
    if package in TRAINERS:
        train(package, tmp_path, strategy)
    else:
        fabric = importlib.import_module(package).Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch(lambda fabric: None)
    assert len(list(tmp_path.glob("pool of *"))) == 2


@pytest.mark.slow
def test_spawn(tmp_path: Path) -> None:
    ranks = fit("pytorch_lightning", tmp_path, "sparsecomm_gradient_dropping_spawn")
    assert_trained_alike(ranks, model_of("pytorch_lightning", tmp_path).state_dict())
    assert 0 < ranks[0]["link_bytes"] < ranks[0]["ddp_link_bytes"] / 20


POPEN = """
import sys
from pathlib import Path

import lightning.pytorch
import lightning_sparsecomm
from tests.strategies.test_front_ends import train

if __name__ == "__main__":
    train("lightning.pytorch", Path(sys.argv[1]), "sparsecomm_gradient_dropping")
"""


# The README's first command starts its processes so, and CI runs that.
@pytest.mark.slow
def test_popen(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(POPEN)
    root = str(Path(__file__).parents[2])
    subprocess.run([sys.executable, script, tmp_path], env={**os.environ, "PYTHONPATH": root}, check=True, timeout=100)
    ranks = load(tmp_path)
    assert_trained_alike(ranks, model_of("lightning.pytorch", tmp_path).state_dict())
    assert 0 < ranks[0]["link_bytes"] < ranks[0]["ddp_link_bytes"] / 20


@pytest.mark.few(2)
@pytest.mark.parametrize("package", TRAINERS + FABRICS)
def test_every_method_has_a_name_for_every_way_to_start_processes(package: str) -> None:
    strategies = importlib.import_module(f"{package}.strategies")
    registry = strategies.StrategyRegistry if package in TRAINERS else strategies.STRATEGY_REGISTRY
    assert START_METHODS == {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
    assert {"dense", "gradient_dropping", "dgc"} <= RECIPES.keys()
    recipes: dict[str, Callable[[], Method]] = {f"sparsecomm_{name}": recipe for name, recipe in RECIPES.items()}
    recipes |= {"sparsecomm": default, "sparsecomm_auto": auto}
    for name, recipe in recipes.items():
        for suffix, start_method in START_METHODS.items():
            strategy = registry.get(name + suffix)
            assert type(strategy) is strategy_of(package)
            assert strategy._start_method == start_method
            assert repr(strategy.method) == repr(recipe())
            described = registry[name + suffix]["description"]
            assert described.endswith(f"Processes start by {start_method}.")
            assert len(described) > 60
    # Besides those of objects that other tests have made: tests/strategies/test_either.py.
    ours = {name for name in registry.available_strategies() if re.match(r"sparsecomm(?!_strategy_\d+$)", name)}
    elastic = {"sparsecomm_elastic"} if package in TRAINERS else set()
    assert ours == {name + suffix for name in recipes for suffix in START_METHODS} | elastic


def _step_by_closure(fabric: Any, rank: int) -> dict[str, nn.Module]:
    module, optimizer = fabric.setup(module := network(), torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    for x in batches(rank):

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(module, x)
            fabric.backward(loss)
            return loss

        assert optimizer.step(closure).item() > 0
    return {"module": module}


def _without_closure(fabric: Any, rank: int) -> dict[str, nn.Module]:
    module, optimizer = fabric.setup(module := network(), torch.optim.Adam(module.parameters(), lr=0.01))
    for x in batches(rank):
        optimizer.zero_grad()
        fabric.backward(loss_of(module, x))
        optimizer.step()
    return {"module": module}


def _accumulating(fabric: Any, rank: int) -> dict[str, nn.Module]:
    module, optimizer = fabric.setup(module := network(), torch.optim.SGD(module.parameters(), lr=0.1))
    for index, x in enumerate(batches(rank)):
        last = index % 3 == 2
        with fabric.no_backward_sync(module, enabled=not last):
            fabric.backward(loss_of(module, x) / 3)
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return {"module": module}


def _clipping(option: str, value: float) -> Callable[[Any, int], dict[str, nn.Module]]:
    def train(fabric: Any, rank: int) -> dict[str, nn.Module]:
        module, optimizer = fabric.setup(module := network(), torch.optim.SGD(module.parameters(), lr=0.5))
        for x in batches(rank):
            optimizer.zero_grad()
            fabric.backward(loss_of(module, x))
            before = [p.grad.clone() for p in module.parameters()]
            fabric.clip_gradients(module, optimizer, **{option: value})
            assert not all(torch.equal(p.grad, b) for p, b in zip(module.parameters(), before, strict=True))
            optimizer.step()
        return {"module": module}

    return train


def _adversaries(fabric: Any, rank: int) -> dict[str, nn.Module]:
    """Two modules and two optimizers; each loss goes through both modules."""
    generator, of_generator = fabric.setup(g := network(), torch.optim.SGD(g.parameters(), lr=0.1))
    discriminator, of_discriminator = fabric.setup(d := nn.Linear(4, 1), torch.optim.Adam(d.parameters(), lr=0.01))
    for x in batches(rank):
        of_discriminator.zero_grad()
        fabric.backward(discriminator(generator(x).detach()).mean().tanh())
        of_discriminator.step()
        of_generator.zero_grad()
        fabric.backward(-discriminator(generator(x)).mean())
        of_generator.step()
    return {"generator": generator, "discriminator": discriminator}


LOOPS = {
    "closure": _step_by_closure,
    "no_closure": _without_closure,
    "accumulation": _accumulating,
    "clip_norm": _clipping("max_norm", 0.1),
    "clip_value": _clipping("clip_val", 0.01),
    "two_modules": _adversaries,
}


def run_fabric(package: str, folder: Path, loop: Callable[[Any, int], dict[str, nn.Module]], strategy: Any) -> Any:
    fabric = importlib.import_module(package).Fabric(accelerator="cpu", devices=2, strategy=strategy)

    def main(fabric: Any) -> None:
        modules = loop(fabric, fabric.global_rank)
        ledger = getattr(fabric.strategy, "ledger", None)
        harvest = {
            "weights": {f"{n}.{k}": v for n, module in modules.items() for k, v in module.state_dict().items()},
            "link_bytes": ledger.link_bytes() if ledger else None,
            "ddp_link_bytes": ledger.ddp_link_bytes if ledger else None,
        }
        torch.save(harvest, folder / f"{fabric.global_rank}.pt")

    fabric.launch(main)
    return load(folder)


# The two packages' Fabrics are the same code under two names: once is enough for most of it.
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("package", "loop"),
    [
        pytest.param(package, loop, marks=() if package == FABRICS[0] or loop == "closure" else pytest.mark.slow)
        for package in FABRICS
        for loop in LOOPS
    ],
)
def test_fabric(package: str, loop: str, tmp_path: Path) -> None:
    def run(strategy: Any) -> Any:
        return run_fabric(package, tmp_path, LOOPS[loop], strategy)

    ddp = run(ddp_of(package)(start_method="fork"))
    start = {f"module.{name}": tensor for name, tensor in network().state_dict().items()}
    start.update({f"generator.{name}": tensor for name, tensor in network().state_dict().items()})
    start["discriminator.weight"] = start["discriminator.bias"] = torch.zeros(0)
    for density, tolerance in ((1.0, 2e-6), (0.02, None)):
        ours = run(strategy_of(package)(gradient_dropping(density), start_method="fork"))
        assert_trained_alike(ours, start)
        if tolerance is not None:
            for name, tensor in ddp[0]["weights"].items():
                torch.testing.assert_close(ours[0]["weights"][name], tensor, rtol=0, atol=tolerance)
        else:
            assert 0 < ours[0]["link_bytes"] < ours[0]["ddp_link_bytes"] / 5
    dense = run("sparsecomm_dense_fork")
    for name, tensor in ddp[0]["weights"].items():
        assert dense[1]["weights"][name].numpy().tobytes() == tensor.numpy().tobytes()


def _measuring(fabric: Any, rank: int) -> dict[str, nn.Module]:
    """Leaves a partial round to `settle`, and looks at the shared model before every step."""
    module, optimizer = fabric.setup(module := network(), torch.optim.SGD(module.parameters(), lr=0.1))
    seen = []
    for x in batches(rank):
        own = [parameter.detach().clone() for parameter in module.parameters()]
        with fabric.strategy.shared_model():
            seen.append([parameter.detach().clone() for parameter in module.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(own, module.parameters(), strict=True))
        optimizer.zero_grad()
        fabric.backward(loss_of(module, x))
        optimizer.step()
    fabric.strategy.settle()
    seen.append([parameter.detach().clone() for parameter in module.parameters()])
    # Every fourth step is followed by an exchange; so is the sixth, the last.
    assert [torch.equal(a[0], b[0]) for a, b in itertools.pairwise(seen)] == [True, True, True, False, True, False]
    return {"module": module}


@pytest.mark.parametrize("package", FABRICS)
def test_fabric_measures_and_leaves_the_shared_model(package: str, tmp_path: Path) -> None:
    strategy = strategy_of(package)(federated_averaging(every=4), start_method="fork")
    ranks = run_fabric(package, tmp_path, _measuring, strategy)
    assert_trained_alike(ranks, {f"module.{name}": tensor for name, tensor in network().state_dict().items()})
