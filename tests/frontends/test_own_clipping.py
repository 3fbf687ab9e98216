"""Clipping in a hook of the user's own, which comes after gradients are shared."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from torch.utils.data import DataLoader

from lightning_sparsecomm.methods import dgc, gradient_dropping
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.distributed.launch import QUIET, run_ranks
from tests.frontends.fitting import Model


class Clipped(Model):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)


def _warnings_of_fits(rank: int) -> list[list[str]]:
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    found = []
    for module, method in ((Clipped(), dgc()), (Model(), dgc()), (Clipped(), gradient_dropping())):
        trainer = pl.Trainer(
            strategy=SparseCommStrategy(method),
            devices=1,
            max_steps=1,
            enable_checkpointing=False,
            plugins=[TorchElasticEnvironment()],
            **QUIET,
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, DataLoader(torch.randn(8, 6), batch_size=4))
        found.append([str(each.message) for each in caught if "configure_gradient_clipping" in str(each.message)])
    return found


def test_it_is_told_that_it_comes_too_late(tmp_path: Path) -> None:
    """Only where a rank's own gradient is to be clipped."""
    ((late, without, shared),) = run_ranks(tmp_path, 1, _warnings_of_fits)
    (text,) = late
    assert text.startswith("Clipped.configure_gradient_clipping runs after gradients were shared")
    assert "gradient_clip_val" in text
    assert without == shared == []
