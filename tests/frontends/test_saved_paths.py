"""A checkpoint's path that differs between ranks, such as one with the time in it: rank 0's counts, as under ddp."""

from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import DDPStrategy

from lightning_sparsecomm import methods
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.frontends.fitting import Model, fit


class Saving(Model):
    """Saves after the second step, each rank to a path of its own. Rank 0 may remove that later, by itself."""

    def __init__(self, path: Path, removes: bool) -> None:
        super().__init__()
        self.path, self.removes = path, removes

    def on_train_batch_end(self, *args: object) -> None:
        if self.global_step == 2:
            self.trainer.save_checkpoint(self.path / f"from {self.global_rank}.ckpt")
        if self.global_step == 3 and self.removes and self.trainer.is_global_zero:
            self.trainer.strategy.remove_checkpoint(self.path / "from 0.ckpt")


def test_all_ranks_write_beside_rank_0s_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path, Saving(tmp_path, removes=False), SparseCommStrategy(methods.dgc(0.1, warmup_steps=0)))
    assert sorted(path.name for path in tmp_path.glob("from*")) == ["from 0.ckpt", "from 0.ckpt.sparsecomm"]
    names = sorted(path.name.split(".")[0] for path in (tmp_path / "from 0.ckpt.sparsecomm").iterdir())
    assert names == ["rank_0_of_2", "rank_1_of_2"]


def test_rank_0_removes_a_checkpoint_by_itself(tmp_path: Path) -> None:
    """As under ddp, where Lightning asks nobody else. The files of all ranks go with it."""
    fit(tmp_path, Saving(tmp_path, removes=True), SparseCommStrategy(methods.dgc(0.1, warmup_steps=0)))
    assert not list(tmp_path.glob("from*"))


class Monitoring(Model):
    """Logs a metric by which each rank takes another one of its first two checkpoints as the worse one."""

    def on_train_batch_end(self, *args: object) -> None:
        metrics = [1.0, 2.0, 3.0, 4.0] if self.global_rank == 0 else [2.0, 1.0, 3.0, 4.0]
        self.log("metric", metrics[self.global_step - 1])


@pytest.mark.filterwarnings("ignore:It is recommended to use .self.log")
@pytest.mark.parametrize("name", ["{step}-{metric:.2f}", pytest.param("{step}", marks=pytest.mark.slow)])
def test_ranks_may_choose_different_checkpoints(name: str, tmp_path: Path) -> None:
    """As under ddp, rank 0's choice counts, and each checkpoint that is kept has the files of all ranks."""
    kept: dict[str, list[str]] = {}
    strategies = {"ddp": DDPStrategy(), "ours": SparseCommStrategy(methods.dgc(0.1, warmup_steps=0))}
    for kind, strategy in strategies.items():
        best = ModelCheckpoint(tmp_path / kind, name, "metric", save_top_k=2, mode="max", every_n_train_steps=1)
        fit(tmp_path, Monitoring(), strategy, enable_checkpointing=True, callbacks=[best])
        kept[kind] = sorted(path.name for path in (tmp_path / kind).glob("*.ckpt"))
    assert kept["ours"] == kept["ddp"]
    folders = sorted((tmp_path / "ours").glob("*.sparsecomm"))
    assert [folder.name for folder in folders] == [f"{each}.sparsecomm" for each in kept["ddp"]]
    for folder in folders:
        assert sorted(path.name.split(".")[0] for path in folder.iterdir()) == ["rank_0_of_2", "rank_1_of_2"]


class Asking(Model):
    """Asks for checkpoints amid the second step: rank 0 for two, the other for one, under names of its own."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == 1:
            for name in ("first", "second") if self.global_rank == 0 else ("other",):
                self.trainer.save_checkpoint(self.path / f"{name}.ckpt")


def test_deferred_saves_are_those_that_rank_0_was_asked_for(tmp_path: Path) -> None:
    fit(tmp_path, Asking(tmp_path), SparseCommStrategy(methods.dgc(0.1, warmup_steps=0)))
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["first.ckpt", "second.ckpt"]
    for name in ("first", "second"):
        ranks = sorted(path.name.split(".")[0] for path in (tmp_path / f"{name}.ckpt.sparsecomm").iterdir())
        assert ranks == ["rank_0_of_2", "rank_1_of_2"]


class SavingAgain(Model):
    """Saves once more after its next step, each rank to the path that it has resumed from."""

    def on_train_batch_end(self, *args: object) -> None:
        if self.global_step == 3:
            self.trainer.save_checkpoint(self.trainer.ckpt_path)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_ranks_may_spell_the_path_differently(tmp_path: Path) -> None:
    """They resume as ranks that spell it alike, and the files of the next save replace those of both."""
    strategy = SparseCommStrategy(methods.dgc(0.1, warmup_steps=0))
    folder = tmp_path / "saved"
    folder.mkdir()
    fit(tmp_path, Saving(folder, removes=False), strategy)
    path, detour = folder / "from 0.ckpt", folder / ".." / "saved" / "from 0.ckpt"
    alike = fit(tmp_path, Model(), strategy, max_epochs=2, ckpt_paths=[str(path)] * 2)
    other = fit(tmp_path, SavingAgain(), strategy, max_epochs=2, ckpt_paths=[str(path), str(detour)])
    for before, after in zip(alike, other, strict=True):
        assert all((after[name] == values).all() for name, values in before.items())
    names = sorted(file.name.split(".")[0] for file in (folder / "from 0.ckpt.sparsecomm").iterdir())
    assert names == ["rank_0_of_2", "rank_1_of_2"]
