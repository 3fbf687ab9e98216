"""The strategy for Ray's workers without Ray: what it says, what it refuses, and where ranks write their files.

tests/strategies/test_ray.py trains on a real cluster."""

import importlib
import shutil
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import pytorch_lightning as pl
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from pytorch_lightning.strategies import DDPStrategy
from torch.utils.data import DataLoader

import lightning_sparsecomm
from lightning_sparsecomm import methods
from lightning_sparsecomm.frontends.ray import RayTrainerMixin
from tests.distributed.launch import QUIET
from tests.frontends import fitting
from tests.frontends.fitting import Model, fit

OURS = "lightning_sparsecomm.strategies.ray"


class Strategy(RayTrainerMixin, DDPStrategy):
    pass


class RayLightningEnvironment(TorchElasticEnvironment):
    """Goes by the name of Ray's."""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "TorchElasticEnvironment", RayLightningEnvironment)


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray is not installed, and our module not imported yet."""
    for name in [name for name in sys.modules if name.split(".")[0] == "ray" or name == OURS]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    yield
    sys.modules.pop(OURS, None)


@pytest.mark.usefixtures("hidden")
def test_without_ray_the_error_names_the_extra() -> None:
    strategy = lightning_sparsecomm.RaySparseCommStrategy
    words = r"RaySparseCommStrategy needs Ray Train, .*Install it with pip install 'lightning-sparsecomm\[ray\]'"
    with pytest.raises(ModuleNotFoundError, match=words):
        strategy(methods.dgc())


@pytest.mark.usefixtures("hidden")
@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning.pytorch"])
def test_it_is_one_of_rays_own(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`prepare_trainer` accepts RayDDPStrategy and what derives from it, of the package that Ray takes."""
    ddp = importlib.import_module(f"{package}.strategies").DDPStrategy
    rays = type("RayDDPStrategy", (ddp,), {})
    for name in ("ray", "ray.train", "ray.train.lightning"):
        module: Any = ModuleType(name)
        module.__path__ = []
        module.RayDDPStrategy = rays
        monkeypatch.setitem(sys.modules, name, module)
    strategy = lightning_sparsecomm.RaySparseCommStrategy(methods.dgc(density=0.25), seed=3, bucket_cap_mb=7)
    assert isinstance(strategy, rays)
    trainer = importlib.import_module(package).Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False)
    assert trainer.strategy is strategy
    assert (repr(strategy.method), strategy.seed) == (repr(methods.dgc(density=0.25)), 3)
    assert repr(strategy).startswith(f"<SparseCommStrategy of {package}, ")


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("start_method", "fork", "Ray starts the processes. Leave it out."),
        ("process_group_backend", "gloo", r"TorchConfig\(backend=\.\.\.\)"),
        ("timeout", timedelta(seconds=1), r"TorchConfig\(timeout_s=\.\.\.\)"),
    ],
)
def test_what_ray_decides_is_refused(option: str, value: object, remedy: str) -> None:
    with pytest.raises(ValueError, match=rf"{option} must be left out on Ray's workers; got .*{remedy}"):
        Strategy(**{option: value})


def test_defaults_of_a_command_line_are_not() -> None:
    Strategy(start_method="popen", process_group_backend=None, timeout=timedelta(minutes=30))


def test_without_rays_environment_it_is_refused() -> None:
    trainer = pl.Trainer(**QUIET, devices=1, strategy=Strategy(), max_epochs=1, enable_checkpointing=False)
    with pytest.raises(ValueError, match=r"plugins must have RayLightningEnvironment\(\).*got LightningEnvironment"):
        trainer.fit(Model(), DataLoader([0.0]))


class Reporting(Model):
    """At the end of each epoch saves into a folder of each rank's own. Copies it, as Ray does with what is reported.

    Rank 0 has always the same folder, and the other rank new ones. Each removes the last checkpoint.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_train_epoch_end(self) -> None:
        folder = self.path / f"rank {self.global_rank}" / str(self.current_epoch * self.global_rank)
        self.trainer.save_checkpoint(folder / "checkpoint.ckpt")
        if self.current_epoch == 0:
            shutil.copytree(folder, self.path / "merged", dirs_exist_ok=True)
        else:
            self.trainer.strategy.remove_checkpoint(folder / "checkpoint.ckpt")


def found_in(folder: Path) -> list[str]:
    files = [each.relative_to(folder) for each in folder.rglob("*") if each.is_file()]
    return sorted(str(each.parent / each.name.split(".")[0]) for each in files)


def strategy() -> Strategy:
    return Strategy(methods.dgc(0.1, warmup_steps=0))


@pytest.mark.usefixtures("environment")
def test_each_rank_writes_into_its_own_folder_and_all_folders_together_resume(tmp_path: Path) -> None:
    whole = fit(tmp_path, Reporting(tmp_path), strategy(), max_epochs=2)
    # No rank waited for another, though only one knew its folder; and the files of the last save are removed.
    assert found_in(tmp_path / "rank 0") == []
    assert found_in(tmp_path / "rank 1") == ["0/checkpoint.ckpt.sparsecomm/rank_1_of_2"]
    ranks = [f"checkpoint.ckpt.sparsecomm/rank_{rank}_of_2" for rank in range(2)]
    assert found_in(tmp_path / "merged") == ["checkpoint", *ranks]
    path = str(tmp_path / "merged" / "checkpoint.ckpt")
    resumed = fit(tmp_path, Model(), strategy(), max_epochs=2, ckpt_paths=[path] * 2)
    for before, after in zip(whole, resumed, strict=True):
        assert all((after[name] == values).all() for name, values in before.items())


@pytest.mark.usefixtures("environment")
def test_in_one_folder_rank_0s_name_counts(tmp_path: Path) -> None:
    class Saving(Model):
        def on_train_epoch_end(self) -> None:
            self.trainer.save_checkpoint(tmp_path / f"from {self.global_rank}.ckpt")

    fit(tmp_path, Saving(), strategy())
    assert sorted(path.name for path in tmp_path.glob("from*")) == ["from 0.ckpt", "from 0.ckpt.sparsecomm"]
    names = sorted(path.name.split(".")[0] for path in (tmp_path / "from 0.ckpt.sparsecomm").iterdir())
    assert names == ["rank_0_of_2", "rank_1_of_2"]
