"""CompressionMonitor beside Lightning's own ddp, and what a Trainer is told: phases, method, the ledger of children."""

import importlib
import logging
import os
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from pytorch_lightning.profilers import AdvancedProfiler, SimpleProfiler
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_sparsecomm import CompressionMonitor, methods
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.distributed.launch import run_ranks
from tests.frontends.test_callbacks import NAMES, rows_of

PACKAGES = ["pytorch_lightning", "lightning.pytorch"]

# Of the trainable parameters: 6 x 80 + 80, twice 80 of the normalization, 80 x 4 + 4.
PARAMETERS = 6 * 80 + 80 + 2 * 80 + 80 * 4 + 4
BATCHES = 12


class _Training:
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.network = nn.Sequential(nn.Linear(6, 80), nn.BatchNorm1d(80), nn.Tanh(), nn.Linear(80, 4))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.automatic_optimization = not by_hand

    def training_step(self: Any, batch: Tensor, batch_idx: int) -> Any:
        loss = self.network(batch).square().mean()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self: Any) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Hooked:
    """DDP with a communication hook, on CPUs too."""

    hook: Any = None

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        ddp: DistributedDataParallel = super()._setup_model(model)  # type: ignore[misc]
        ddp.register_comm_hook(*type(self).hook())
        return ddp


def train(
    package: str, tmp_path: Path, strategy: Any, monitor: bool = True, by_hand: bool = False, **options: Any
) -> Any:
    """A Trainer that has trained in two forked processes, and its model."""
    lightning = importlib.import_module(package)
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        callbacks=[CompressionMonitor()] if monitor else [],
        **{
            "logger": False,
            "log_every_n_steps": 1,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": tmp_path,
            **options,
        },
    )
    model = type("Model", (_Training, lightning.LightningModule), {})(by_hand)
    generator = torch.Generator().manual_seed(3)
    trainer.fit(model, DataLoader(torch.randn(4 * 2 * BATCHES, 6, generator=generator), batch_size=4))
    return trainer, model


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("package", "by_hand", "accumulated"),
    [
        (package, *case)
        if (package == PACKAGES[0]) == (case == (True, 1))
        else pytest.param(package, *case, marks=pytest.mark.slow)
        for package in PACKAGES
        for case in ((False, 1), (True, 1), (False, 3))
    ],
)
def test_ddp_is_counted_as_dense_is(
    package: str, by_hand: bool, accumulated: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An A/B is one changed string: same steps, same bytes, same ratio."""
    tables = []
    for name in ("ddp", "sparsecomm_dense"):
        logger = CSVLogger(tmp_path / name)
        train(package, tmp_path, f"{name}_fork", by_hand=by_hand, logger=logger, accumulate_grad_batches=accumulated)
        rows = rows_of(tmp_path / name)
        assert len(rows) == BATCHES // accumulated
        for row in rows:
            assert row.keys() - {"epoch", "step"} == NAMES
            assert row["sparsecomm/bytes_sent"] == 4 * PARAMETERS
            assert row["sparsecomm/compression_ratio"] == row["sparsecomm/density"] == 1
            assert row["sparsecomm/residual_norm"] == 0
        assert rows[-1]["sparsecomm/bytes_sent_total"] == 4 * PARAMETERS * BATCHES // accumulated
        # DDP samples its first passes.
        assert rows[-1]["sparsecomm/exchange_seconds"] >= 0
        out = capfd.readouterr().out
        tables.append([line for line in out.splitlines() if re.match("gradients|DDP|compression ratio", line)])
    # DDP's buckets are calls of their own in the second, and all of a backward pass is one call in the first.
    assert [re.sub(r", [\d.]+ s in exchange", "", line) for line in tables[0]] == [
        re.sub(r", [\d.]+ s in exchange", "", line) for line in tables[1]
    ]


def test_ddp_trains_as_without(tmp_path: Path) -> None:
    weights = []
    for monitor in (False, True):
        _, model = train("pytorch_lightning", tmp_path, "ddp_fork", monitor)
        weights.append(np.concatenate([each.numpy().ravel() for each in model.state_dict().values()]))
    assert weights[0].tobytes() == weights[1].tobytes()


def _power_sgd() -> Any:
    options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, "min_compression_rate": 1}
    return powerSGD_hook.PowerSGDState(None, **options), powerSGD_hook.powerSGD_hook


def _own_hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]


# PowerSGD of rank 1: a row and a column of each matrix, and vectors whole; matrices are halves of what hooks get.
@pytest.mark.parametrize(
    ("hook", "sent"),
    [
        (lambda: (None, default_hooks.allreduce_hook), 4 * PARAMETERS),
        (lambda: (None, default_hooks.fp16_compress_hook), 2 * PARAMETERS),
        (_power_sgd, 4 * (80 + 6 + 80 + 4 + 80 + 80 + 80 + 4)),
    ],
)
def test_communication_hooks(hook: Any, sent: int, tmp_path: Path) -> None:
    strategies = importlib.import_module("pytorch_lightning.strategies")
    strategy = type("HookedStrategy", (Hooked, strategies.DDPStrategy), {"hook": staticmethod(hook)})
    train("pytorch_lightning", tmp_path, strategy(start_method="fork"), logger=CSVLogger(tmp_path))
    assert rows_of(tmp_path)[-1]["sparsecomm/bytes_sent"] == sent


def test_an_unknown_hook_is_said(tmp_path: Path) -> None:
    strategies = importlib.import_module("pytorch_lightning.strategies")
    options = {"hook": staticmethod(lambda: (None, _own_hook))}
    strategy = type("HookedStrategy", (Hooked, strategies.DDPStrategy), options)
    with pytest.raises(Exception, match="the bytes that the DDP communication hook _own_hook sends are unknown"):
        train("pytorch_lightning", tmp_path, strategy(start_method="fork"))


@pytest.mark.few(2)
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", ["sparsecomm_notebook", "sparsecomm_sbc_fork"])
def test_the_ledger_comes_back_from_processes_that_fit_has_started(package: str, name: str, tmp_path: Path) -> None:
    trainer, _ = train(package, tmp_path, name, monitor=False)
    ledger = trainer.strategy.ledger
    assert (ledger.world_size, ledger.steps) == (2, BATCHES)
    assert ledger.ddp_bytes == 4 * PARAMETERS * BATCHES
    assert 0 < ledger.sent_link_bytes < ledger.ddp_link_bytes
    assert ledger.exchange_seconds > 0
    assert trainer.strategy.announced[0].startswith("sparsecomm: 2 ranks, SGD by ")


def test_the_method_is_a_hyperparameter_and_in_the_table(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    logger = CSVLogger(tmp_path)
    with caplog.at_level(logging.INFO, "pytorch_lightning"):
        trainer, _ = train("pytorch_lightning", tmp_path, "sparsecomm_notebook", logger=logger)
    (line,) = trainer.strategy.announced
    (file,) = tmp_path.rglob("hparams.yaml")
    found = yaml.safe_load(file.read_text())
    assert found.keys() == {"sparsecomm", "sparsecomm_model"}
    assert f"sparsecomm: {found['sparsecomm']}" == line
    assert found["sparsecomm_model"].startswith(f"{PARAMETERS:,} parameters in ")
    out = capfd.readouterr().out
    assert out.index(line) < out.index("sent by one rank of 2")


class OneValue(CSVLogger):
    """Refuses another value of a hyperparameter, as MLflow's logger does within a run."""

    def log_hyperparams(self, params: Any = None) -> None:
        for name, value in params.items():
            if self.experiment.hparams.get(name, value) != value:
                raise ValueError(f"{name} has another value in this run")
        super().log_hyperparams(params)


def _fit_again(rank: int, folder: str) -> list[str]:
    """Two fits of one Trainer, and a third from step 0 by another method."""
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    model = type("Model", (_Training, pl.LightningModule), {})(False)
    logger, quiet = OneValue(folder), {"enable_progress_bar": False, "enable_checkpointing": False}
    plugins = [TorchElasticEnvironment()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for method in (methods.dgc(0.1, warmup_steps=0), methods.sbc(0.1)):
            strategy = SparseCommStrategy(method)
            trainer = pl.Trainer(
                accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, logger=logger, plugins=plugins, **quiet
            )
            for epochs in (1, 2):
                trainer.fit_loop.max_epochs = epochs
                trainer.fit(model, DataLoader(torch.randn(8, 6), batch_size=4))
    return [str(each.message) for each in caught if "hyperparameters" in str(each.message)]


def test_a_further_fit_has_a_hyperparameter_of_its_own_and_a_logger_may_refuse(tmp_path: Path) -> None:
    (refused,) = run_ranks(tmp_path, 1, _fit_again, str(tmp_path))
    (file,) = tmp_path.rglob("hparams.yaml")
    found = yaml.safe_load(file.read_text())
    assert found.keys() == {"sparsecomm", "sparsecomm_from_step_2", "sparsecomm_model"}
    assert "by dgc" in found["sparsecomm"]
    words = r"OneValue did not take the hyperparameters {} \(ValueError: .* in this run\)\. Training goes on without"
    for name, text in zip(("sparsecomm", "sparsecomm_from_step_2"), refused, strict=True):
        assert re.match(words.format(name), text), text


@pytest.mark.parametrize("kind", [SimpleProfiler, AdvancedProfiler])
def test_profilers_show_phases_and_no_callback_of_ours(kind: Any, tmp_path: Path) -> None:
    profiler = kind(dirpath=tmp_path, filename="profile")
    train("pytorch_lightning", tmp_path, "sparsecomm_notebook", profiler=profiler, enable_checkpointing=True)
    report = min(tmp_path.glob("fit-profile*")).read_text()
    for phase in ("exchange", "select", "encode", "wait", "decode"):
        assert f"[Strategy]SparseCommStrategy.{phase}" in report
    assert "[Callback]CompressionMonitor" in report
    assert "FirstCallback" not in report
    assert "DeferredSaves" not in report
