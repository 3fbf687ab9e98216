"""Replicas are one before any of the user's callbacks hears that training has ended."""

import os
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from torch.utils.data import DataLoader

from lightning_sparsecomm.frontends.own_callbacks import FirstCallback
from lightning_sparsecomm.methods import federated_averaging, gradient_dropping
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
