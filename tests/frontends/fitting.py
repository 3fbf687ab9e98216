"""A small Trainer run on two ranks: what each ends with, or the error that each finds."""

import os
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.launch import NotConnectedError, run_ranks


class Model(pl.LightningModule):
    """Counts its batches, so that a test sees that an error came before the first."""

    def __init__(self, network: nn.Module | None = None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.network = network if network is not None else nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.options = options
        self.begun = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.begun += 1
        loss = (self.network(batch) - batch[:, :3].sin()).square().mean()
        if self.options.get("poison") == (self.global_rank, batch_idx):
            loss = loss + (self.network[2].weight * float("nan")).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = self.options.get("optimizer", lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        return optimizer(self.parameters())


def _fit(rank: int, world_size: int, model: pl.LightningModule, strategy: Any, options: dict[str, Any]) -> Any:
    """In a process that is joined to the others already, as under torchrun: every rank's own error can be seen."""
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "LOCAL_WORLD_SIZE": str(world_size)})
    paths = options.get("ckpt_paths", [None] * world_size)
    options = {name: option for name, option in options.items() if name != "ckpt_paths"}
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world_size,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{
            "max_epochs": 1,
            "enable_checkpointing": False,
            **options,
            "plugins": [TorchElasticEnvironment(), *options.get("plugins", [])],
        },
    )
    batches = torch.randn(4 * world_size * 4, 6, generator=torch.Generator().manual_seed(3))
    try:
        trainer.fit(model, DataLoader(batches, batch_size=4), ckpt_path=paths[rank])
    except Exception as error:
        if "connectFullMesh failed" in str(error):
            raise NotConnectedError(str(error)) from error
        return f"{type(error).__name__}: {error} [after {model.begun} batches]"
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def fit(tmp_path: Path, model: pl.LightningModule, strategy: Any, **options: Any) -> list[dict[str, Any]]:
    """The weights of each rank. `ckpt_paths` has the path that each resumes from; else, `options` are the Trainer's."""
    found = run_ranks(tmp_path, 2, _fit, 2, model, strategy, options)
    assert all(isinstance(weights, dict) for weights in found), found
    return found


def refusals(tmp_path: Path, model: pl.LightningModule, strategy: Any, **options: Any) -> list[str]:
    """The error of each rank. All find it: none is left waiting for another."""
    found = run_ranks(tmp_path, 2, _fit, 2, model, strategy, options)
    assert all(isinstance(error, str) for error in found), found
    return found
