"""A checkpoint that is asked for amid a step, or by a signal, is that of the end of a batch that stepped.

What such checkpoints resume to, for each method and moment, is in tests/distributed/test_saves_in_steps.py.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sparsecomm import methods
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.frontends.fitting import Model, fit

ASKED = 1  # After so many steps.


class Asking(Model):
    """Asks for a checkpoint once, and keeps the weights that each step has left."""

    def __init__(self, moment: str, path: Path) -> None:
        super().__init__()
        self.moment, self.path, self.asked = moment, path, False

    def _ask(self, moment: str) -> None:
        if self.moment == moment and self.global_step == ASKED and not self.asked:
            self.asked = True
            self.trainer.save_checkpoint(self.path / "asked.ckpt")

    def on_train_start(self) -> None:
        if self.moment == "signal":
            signal.signal(signal.SIGUSR1, lambda number, frame: self._ask("signal"))

    def on_after_backward(self) -> None:
        if self.moment == "signal" and self.global_step == ASKED and not self.asked:
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._ask("on_before_optimizer_step")

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_rank == 0:
            torch.save(self.state_dict(), self.path / f"after {self.global_step}.pt")


@pytest.mark.few(2)
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("moment", ["signal", "on_before_optimizer_step"])
def test_it_is_saved_when_the_step_has_ended(tmp_path: Path, moment: str, accumulated: int) -> None:
    strategy = SparseCommStrategy(methods.dgc(0.1, warmup_steps=0))
    fit(tmp_path, Asking(moment, tmp_path), strategy, max_epochs=2, accumulate_grad_batches=accumulated)
    checkpoint = torch.load(tmp_path / "asked.ckpt", weights_only=False)
    batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"]
    assert checkpoint["global_step"] == ASKED + 1
    assert batches == accumulated * (ASKED + 1)
    expected: dict[str, Tensor] = torch.load(tmp_path / f"after {ASKED + 1}.pt")
    assert all(torch.equal(checkpoint["state_dict"][name], weight) for name, weight in expected.items())


class SavingAmidABatch(Model):
    """Saves between a forward and its backward pass, in a batch that does not step, if there is a path."""

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self.path = path

    def on_before_backward(self, loss: Tensor) -> None:
        if self.path is not None and self.trainer.fit_loop.epoch_loop.total_batch_idx == 2:
            self.trainer.save_checkpoint(self.path)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "method",
    [
        methods.sbc(0.05, every=3),
        methods.federated_averaging(every=3),
        methods.diloco(every=3),
        methods.gradient_dropping(0.05, local="partial", average_every=3),
    ],
)
def test_a_save_amid_a_batch_changes_nothing(tmp_path: Path, method: Any) -> None:
    """It writes the shared model into the weights, and puts them back: autograd, as under ddp, notices nothing."""
    trained = []
    for path in (None, tmp_path / "amid.ckpt"):
        model = SavingAmidABatch(path)
        fit(tmp_path, model, SparseCommStrategy(method), max_epochs=2, accumulate_grad_batches=2)
        trained.append(model.state_dict())
    assert (tmp_path / "amid.ckpt").exists()
    assert all(torch.equal(weight, trained[0][name]) for name, weight in trained[1].items())
