"""What torch's own DDP waited, from its samples."""

import time
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


def _held(rank: int) -> list[int]:
    """How many hooks DDP's wrapper has amid training, and after it; and whether the monitor holds the wrapper then."""
    hooks, found = list[dict[int, Any]](), list[int]()

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            hooks.append(trainer.strategy.model._forward_pre_hooks)
            found.append(len(hooks[0]))

    monitor, options = CompressionMonitor(summary=False), {**QUIET, "enable_checkpointing": False}
    trainer = pl.Trainer(max_steps=1, strategy="ddp", devices=1, callbacks=[monitor, Look()], **options)
    trainer.fit(Model(), DataLoader(torch.zeros(1, 6)))
    assert monitor._plain is not None
    return [*found, len(hooks[0]), monitor._plain._model is not None]


def test_it_lets_go_of_the_model_at_the_end(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, 1, _held) == [[1, 0, False]]


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
