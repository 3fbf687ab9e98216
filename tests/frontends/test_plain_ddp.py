"""What torch's own DDP waited, from its samples."""

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from lightning_sparsecomm import CompressionMonitor
from lightning_sparsecomm.frontends.plain_ddp import PlainDDP
from tests.distributed.launch import QUIET, run_ranks
from tests.frontends.fitting import Model


class Sampled:
    """Stands for DistributedDataParallel, whose latest sample took a whole second."""

    def _get_ddp_logging_data(self) -> dict[str, int]:
        return {"backward_comm_time": 1_500_000_000, "backward_compute_comm_overlap_time": 500_000_000}


def _ended(rank: int) -> bool:
    """Whether anything holds DDP's wrapper after fit."""
    wrapped: list[weakref.ref[Any]] = []

    class Look(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            wrapped.append(weakref.ref(trainer.strategy.model))

    monitor, options = CompressionMonitor(summary=False), {**QUIET, "enable_checkpointing": False}
    trainer = pl.Trainer(max_steps=1, strategy="ddp", devices=1, callbacks=[monitor, Look()], **options)
    trainer.fit(Model(), DataLoader(torch.zeros(1, 6)))
    del trainer
    gc.collect()
    return wrapped[0]() is not None


def test_it_lets_go_of_the_model_at_the_end(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, 1, _ended) == [False]


def test_a_slow_sample_never_stands_for_more_time_than_has_passed() -> None:
    counter: Any = PlainDDP(2)
    begin = time.perf_counter()
    counter._model, counter._passes = Sampled(), 1000
    counter.look()
    passed = time.perf_counter() - begin
    waited = counter.ledger.clock.seconds["wait"]
    assert 0 < waited <= passed + 0.1
    counter._passes += 1
    counter._looked -= 60
    counter.look()
    assert 1 <= counter.ledger.clock.seconds["wait"] - waited < 1.001
