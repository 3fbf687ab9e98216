"""Replicas are one before any of the user's callbacks hears that training has ended."""

import os
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sparsecomm.frontends.own_callbacks import FirstCallback
from lightning_sparsecomm.methods import default, federated_averaging, gradient_dropping, sbc
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.distributed.launch import QUIET, run_ranks
from tests.frontends.fitting import Model, fit


class Looks(pl.Callback):
    """Notes the weights at the end, and where our callback stands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        callbacks: Any = vars(trainer)["callbacks"]
        weights = torch.cat([parameter.detach().flatten() for parameter in pl_module.parameters()])
        found = [type(callback) for callback in callbacks].index(FirstCallback), weights
        torch.save(found[1], self.folder / f"{trainer.global_rank}-{found[0]}.pt")


@pytest.mark.filterwarnings("ignore:every=100 is more than")
def test_the_last_exchange_comes_first(tmp_path: Path) -> None:
    # 4 steps, and no exchange before their end.
    fit(tmp_path, Model(), SparseCommStrategy(federated_averaging(every=100)), callbacks=[Looks(tmp_path)])
    first, second = (torch.load(tmp_path / f"{rank}-0.pt") for rank in range(2))
    assert torch.equal(first, second)


def _callbacks_of_a_fit(rank: int) -> list[list[str]]:
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    trainer = pl.Trainer(
        strategy=SparseCommStrategy(gradient_dropping()),
        devices=1,
        max_steps=2,
        enable_checkpointing=False,
        plugins=[TorchElasticEnvironment()],
        **QUIET,
    )

    def names() -> list[str]:
        return [type(callback).__name__ for callback in vars(trainer)["callbacks"]]

    before = names()
    trainer.fit(Model(), DataLoader(torch.randn(8, 6), batch_size=4))
    return [before, names()]


def test_the_trainers_callbacks_are_given_back(tmp_path: Path) -> None:
    ((before, after),) = run_ranks(tmp_path, 1, _callbacks_of_a_fit)
    assert before == after
    assert "FirstCallback" not in after


class Breaking(Model):
    """Its training ends in an error amid an epoch. It notes the weights that ranks share then, and this rank's own."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_step == 3 and "shared" not in self.options:
            with self.trainer.strategy.shared_model():
                self.options["shared"] = weights_in(self)
            self.options["own"] = weights_in(self)
            raise ArithmeticError("a batch that cannot be read")
        return super().training_step(batch, batch_idx)


def weights_in(model: pl.LightningModule) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def _broken_off(rank: int, path: str, method: Any) -> list[bool]:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    options: dict[str, Any] = {**QUIET, "enable_checkpointing": False, "plugins": [TorchElasticEnvironment()]}
    model = Breaking()
    batches = DataLoader(torch.randn(40, 6, generator=torch.Generator().manual_seed(3)), batch_size=4)
    trainer = pl.Trainer(devices=2, max_epochs=2, strategy=SparseCommStrategy(method), **options)
    with pytest.raises(ArithmeticError):
        trainer.fit(model, batches)
    shared, own, left = model.options["shared"], model.options["own"], weights_in(model)
    trainer.save_checkpoint(path)
    dist.barrier()
    state = torch.load(path)["state_dict"]
    saved = torch.cat([state[name].flatten() for name, _ in model.named_parameters()])
    # The run goes on from there, with this rank's own weights.
    again = Seeing()
    trainer = pl.Trainer(devices=2, max_epochs=1, strategy=SparseCommStrategy(method), **options)
    trainer.fit(again, batches, ckpt_path=path)
    found = again.options["found"]
    return [bool((a == b).all()) for a, b in ((left, shared), (saved, shared), (found, own), (shared, own))]


class Seeing(Model):
    """It notes the weights that its first batch finds."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.options.setdefault("found", weights_in(self))
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("method", [default(), sbc(0.1, every=2)])
def test_a_fit_that_breaks_off_leaves_the_weights_that_all_share(tmp_path: Path, method: Any) -> None:
    found = run_ranks(tmp_path, 2, _broken_off, str(tmp_path / "broken.ckpt"), method)
    assert found == [[True, True, True, False]] * 2
