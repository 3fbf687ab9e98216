"""Calling one Trainer or strategy several times works as it does under ddp."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy, Strategy
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsecomm import CompressionMonitor, methods
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.distributed.launch import QUIET, run_ranks
from tests.distributed.test_resume import BATCH, CLASSES, FEATURES, Network, outside_launcher

Make = Callable[[], Strategy]

STRATEGIES: dict[str, Make] = {
    "ddp": lambda: DDPStrategy(find_unused_parameters=True),
    # Everything is sent, so the weights are those of ddp.
    "everything": lambda: SparseCommStrategy(methods.gradient_dropping(1.0)),
    "sbc": lambda: SparseCommStrategy(methods.sbc(0.1, every=3)),
    "local": lambda: SparseCommStrategy(methods.gradient_dropping(0.1, local="partial", average_every=3)),
}


class Predicts(Network):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.head(self.body(batch[0]))


def _data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4 * 2 * BATCH, FEATURES, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(CLASSES, (len(x),), generator=generator)), batch_size=BATCH)


def _trainer(strategy: Strategy, devices: int = 2, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        **{
            **QUIET,
            "devices": devices,
            "strategy": strategy,
            "max_epochs": 1,
            "enable_checkpointing": False,
            **options,
        }
    )


def _fit_twice(make: Make) -> Any:
    model, trainer = Predicts(), _trainer(make())
    trainer.fit(model, _data())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, _data())
    assert trainer.global_step == 8
    return model


def _all_in_turns(make: Make) -> Any:
    model, trainer = Predicts(), _trainer(make(), num_sanity_val_steps=1)
    before = trainer.validate(model, _data(), verbose=False)
    trainer.fit(model, _data(), _data())
    after = trainer.test(model, _data(), verbose=False)
    assert after[0]["loss"] < before[0]["loss"]
    predicted = trainer.predict(model, _data())
    assert predicted is not None and len(predicted) == 4
    trainer.validate(model, _data(), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, _data(), _data())
    return model


def _no_steps(make: Make) -> Any:
    model = Predicts()
    trainer = _trainer(make(), max_steps=0)
    trainer.fit(model, _data())
    assert trainer.global_step == 0
    return model


def _another_model(make: Make) -> Any:
    # A second Trainer refuses any used strategy, ddp's too, since the first gave it an accelerator.
    model, trainer = Predicts(), _trainer(make())
    trainer.fit(model, _data())
    model.other = Predicts()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model.other, _data())
    return model


def _monitored(make: Make) -> Any:
    model, strategy = Predicts(), make()
    ours = isinstance(strategy, SparseCommStrategy)
    trainer = _trainer(strategy, callbacks=[CompressionMonitor(summary=False)] if ours else [])
    trainer.fit(model, _data())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, _data())
    return model


USES = (_fit_twice, _all_in_turns, _no_steps, _another_model, _monitored)


def _each(rank: int, folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    outside_launcher(rank, 2)
    return _used(STRATEGIES)


def _alone(rank: int, folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    outside_launcher(0, 1)
    return _used({name: STRATEGIES[name] for name in ("ddp", "everything")})


def _used(strategies: dict[str, Make]) -> dict[str, dict[str, dict[str, Any]]]:
    ends: dict[str, dict[str, dict[str, Any]]] = {}
    for name, make in strategies.items():
        for use in USES:
            torch.manual_seed(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = use(make)
            state = {key: tensor.numpy().copy() for key, tensor in model.state_dict().items()}
            ends.setdefault(use.__name__, {})[name] = state
    return ends


def _check(ends: dict[str, dict[str, dict[str, Any]]]) -> None:
    for use, strategies in ends.items():
        for key, value in strategies["ddp"].items():
            ours = torch.from_numpy(strategies["everything"][key])
            torch.testing.assert_close(
                ours,
                torch.from_numpy(value),
                rtol=1e-4,
                atol=1e-5,
                msg=lambda words, use=use, key=key: f"{use} {key} {words}",
            )


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    ranks = run_ranks(tmp_path, 2, _each, tmp_path)
    _check(ranks[0])
    for use, strategies in ranks[0].items():
        for name, state in strategies.items():
            for key, value in state.items():
                if "running" not in key:
                    assert value.tobytes() == ranks[1][use][name][key].tobytes(), (use, name, key)


def test_one_process(tmp_path: Path) -> None:
    _check(run_ranks(tmp_path, 1, _alone, tmp_path)[0])
