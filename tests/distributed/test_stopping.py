"""Whether rank 0 was told to stop, which all ranks heed in the same step, and wait for in few."""

import itertools
import logging
import logging.handlers
import os
import signal
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsecomm.basis.far import FarWire
from lightning_sparsecomm.frontends import stopping
from lightning_sparsecomm.frontends.stopping import ASKS, StopFlags
from lightning_sparsecomm.methods import dense, federated_averaging, gradient_dropping
from lightning_sparsecomm.sharing import Method
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.distributed.launch import QUIET, run_ranks
from tests.distributed.test_uneven_batches import join

# By version, so that these fail, and are not left out, once Lightning gives its question another name.
asks = pytest.mark.skipif(
    pl.__version__ < TorchVersion("2.5.3"),
    reason="Lightning before 2.5.3 broadcasts nothing before each batch, so nothing is replaced",
)


@asks
def test_lightning_asks_by_the_name_that_is_replaced() -> None:
    assert callable(getattr(_TrainingEpochLoop, ASKS))


def _stops_at(rank: int, told_at: int) -> tuple[int, int]:
    """In which step a rank stops, and how many broadcasts it has made, where rank 0 is told in a step."""
    wire = FarWire()
    flags = StopFlags(wire, torch.device("cpu"))
    stopping._UNDER_WAY_SECONDS = 0.02
    for step in itertools.count():
        # Ranks that are not told in the same step, and do not take equally long.
        if flags.step(step >= told_at and rank == 0):
            break
        time.sleep(0.002 * (rank + 1))
    flags.end()
    return step, wire.ledger.rows["Lightning, metrics"]["broadcast"].calls


@pytest.mark.parametrize("told_at", [0, 1, 40])
def test_all_ranks_stop_in_the_same_step(tmp_path: Path, told_at: int) -> None:
    found = run_ranks(tmp_path, 3, _stops_at, told_at)
    assert len(set(found)) == 1
    step, calls = found[0]
    assert step > told_at
    # Few of the steps ask.
    assert told_at < 40 or calls < step / 2


class _Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def _fit(rank: int, method: Method) -> dict[str, Any]:
    join(rank, 2)
    warnings.simplefilter("ignore")
    strategy: Any = SparseCommStrategy(method)
    options = {"enable_checkpointing": False, "plugins": [TorchElasticEnvironment()], **QUIET}
    trainer = pl.Trainer(strategy=strategy, devices=2, max_steps=30, **options)
    trainer.fit(_Model(), DataLoader(TensorDataset(torch.randn(200, 4))))
    calls = strategy.ledger.rows["Lightning, metrics"]["broadcast"].calls
    return {"calls": calls, "own": ASKS in vars(trainer.fit_loop.epoch_loop), "steps": trainer.global_step}


@asks
def test_where_weights_are_exchanged_ranks_seldom_wait_for_rank_0(tmp_path: Path) -> None:
    counts = []
    for method in (gradient_dropping(0.1), federated_averaging(every=10)):
        folder = tmp_path / str(len(counts))
        folder.mkdir()
        counts.append(run_ranks(folder, 2, _fit, method))
    for before, found in zip(*counts):
        assert found["steps"] == 30
        assert before["calls"] >= 30 > 2 * found["calls"] > 0
        # The loop has Lightning's own question again.
        assert not found["own"]


class _OwnLoop(_TrainingEpochLoop):
    """A loop of the user's, from a module that knows nothing of what Lightning raises."""


class _Told(_Model):
    """Its rank gets SIGTERM in the fourth step, after the exchange or, on other ranks than 0, before it."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self._kill(batch_idx == 3 and not self.trainer.is_global_zero)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: list[torch.Tensor], batch_idx: int) -> None:
        self._kill(batch_idx == 3 and self.trainer.is_global_zero)

    def _kill(self, due: bool) -> None:
        if due:
            os.kill(os.getpid(), signal.SIGTERM)


def _fit_until_told(rank: int, told: set[int], method: Method) -> tuple[str, bool, int]:
    join(rank, 2)
    warnings.simplefilter("ignore")
    stopping._UNDER_WAY_SECONDS, stopping._MOST_SECONDS = 0.02, 0.02
    before = signal.getsignal(signal.SIGTERM)
    strategy: Any = SparseCommStrategy(method)
    options = {"enable_checkpointing": False, "plugins": [TorchElasticEnvironment()], **QUIET}
    trainer = pl.Trainer(strategy=strategy, devices=2, max_steps=5000, **options)
    trainer.fit_loop.epoch_loop.__class__ = _OwnLoop
    how, said = "trained", logging.handlers.BufferingHandler(10)
    logging.getLogger("pytorch_lightning.trainer.connectors.signal_connector").addHandler(said)
    try:
        trainer.fit(_Told() if rank in told else _Model(), DataLoader(TensorDataset(torch.randn(5000, 4))))
    except BaseException as error:
        how = type(error).__name__
    # A run that is slow to stop may get to the fourth batch of another epoch, and be told again.
    lines = {record.getMessage() for record in said.buffer}
    assert lines == ({f"[rank: {rank}] Received SIGTERM: 15"} if rank in told else set())
    return how, trainer.received_sigterm and signal.getsignal(signal.SIGTERM) == before, trainer.global_step


METHODS = {"weights": federated_averaging(every=10), "gradients": gradient_dropping(0.1), "buckets": dense()}


@asks
@pytest.mark.parametrize("told", [{0}, {0, 1}])
@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
def test_a_signal_to_rank_0_stops_all_ranks_in_the_same_step(tmp_path: Path, method: Method, told: set[int]) -> None:
    """With Lightning's own handler, ranks that exchange gradients would wait for each other for ever."""
    found = run_ranks(tmp_path, 2, _fit_until_told, told, method, patience=timedelta(seconds=20))
    assert found[0] == found[1]
    how, heard, step = found[0]
    assert how == "SIGTERMException" and heard and 3 < step < 5000


@pytest.mark.few(1)
@asks
@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
def test_another_rank_that_is_told_alone_leaves_and_the_others_learn_it(tmp_path: Path, method: Method) -> None:
    found = run_ranks(tmp_path, 2, _fit_until_told, {1}, method, patience=timedelta(seconds=20))
    assert [how for how, _, _ in found] == ["PeerError", "SIGTERMException"]
    assert found[1][1] and found[1][2] < 5000


class _ToldLate(_Model):
    """Its rank gets SIGTERM after a batch, from which on it counts the batches of validations."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch, self.validated = batch, 0

    def on_train_batch_end(self, outputs: Any, batch: list[torch.Tensor], batch_idx: int) -> None:
        if batch_idx == self.batch:
            self.validated = 0
            os.kill(os.getpid(), signal.SIGTERM)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.validated += 1


def _fit_told_late(rank: int, method: Method, batch: int, validates: bool) -> tuple[str, int, int, list[float]]:
    join(rank, 2)
    warnings.simplefilter("ignore")
    strategy: Any = SparseCommStrategy(method)
    options = {"enable_checkpointing": False, "plugins": [TorchElasticEnvironment()], **QUIET}
    trainer = pl.Trainer(strategy=strategy, devices=2, max_epochs=1, val_check_interval=5, **options)
    model, loader = _ToldLate(batch), DataLoader(TensorDataset(torch.randn(20, 4)))
    how = "trained"
    try:
        trainer.fit(model, loader, DataLoader(TensorDataset(torch.randn(40, 4))) if validates else None)
    except SystemExit as error:
        how = type(error).__name__
    return how, trainer.global_step, model.validated, model.layer.weight.flatten().tolist()


@pytest.mark.few(4)
@asks
@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
@pytest.mark.parametrize(("batch", "validates"), [(4, True), (9, True), (9, False)])
def test_a_signal_after_the_last_question_is_heeded(
    tmp_path: Path, method: Method, batch: int, validates: bool
) -> None:
    """Before a validation, of which one batch is left, and after the last batch: then the model is whole."""
    found = run_ranks(tmp_path, 2, _fit_told_late, method, batch, validates, patience=timedelta(seconds=20))
    assert [each[:3] for each in found] == [("SIGTERMException", batch + 1, int(validates))] * 2
    assert validates or found[0][3] == found[1][3]
