"""Runs that are too short for their method are warned of, once, on rank 0."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from lightning_sparsecomm.basis import DensityWarmup, Stages, Warmup, Wire
from lightning_sparsecomm.methods import default, dgc, federated_averaging, gradient_dropping
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.length import warn_of_short_run
from lightning_sparsecomm.sharing import Method
from tests.distributed.scenarios import Classifier, Scenario, SeveralBackwards, fit
from tests.run.training import chain


class Adam(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class ByHand(SeveralBackwards):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Fails(pl.Callback):
    """Catches the warning in the rank, whose own it is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.caught = warnings.catch_warnings(record=True)
        self.warned = self.caught.__enter__()
        warnings.simplefilter("always")

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        texts = [str(each.message) for each in self.warned if "warm-up" in str(each.message)]
        torch.save(texts, self.folder / f"warned-{trainer.global_rank}.pt")


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("method", "model", "limits", "words"),
    [
        (dgc(warmup_steps=10), Classifier, {"max_steps": 10}, "10 steps of warm-up in a run of 10"),
        pytest.param(dgc(warmup_steps=10), Classifier, {"max_steps": 11}, None, marks=pytest.mark.slow),
        (dgc(warmup_steps=20), Classifier, {"max_steps": -1, "max_epochs": 2}, "20 steps of warm-up in a run of 20"),
        pytest.param(
            dgc(warmup_steps=19), Classifier, {"max_steps": -1, "max_epochs": 2}, None, marks=pytest.mark.slow
        ),
        (dgc(warmup_epochs=2), Classifier, {"max_steps": 20}, "2 epochs of warm-up in a run of 2"),
        pytest.param(dgc(warmup_epochs=2), Classifier, {"max_steps": 25}, None, marks=pytest.mark.slow),
        (gradient_dropping(warmup_steps=9), Classifier, {"max_steps": 9}, "9 steps of warm-up in a run of 9"),
        pytest.param(
            dgc(DensityWarmup(0.1, steps=9)),
            Classifier,
            {"max_steps": 9},
            "9 steps of warm-up in a run of 9",
            marks=pytest.mark.slow,
        ),
        (dgc(), Classifier, {"max_steps": 3}, "1,000 steps of warm-up in a run of 3"),
        (dgc(warmup_steps=10), ByHand, {"max_steps": 10}, "10 steps of warm-up in a run of 10"),
        # Another method, which has none.
        (default(), Adam, {"max_steps": 3}, None),
    ],
)
def test_warmups_that_outlast_the_training(
    tmp_path: Path, method: Method, model: Any, limits: dict[str, Any], words: str | None
) -> None:
    fit(tmp_path, Scenario(model), 2, method, (Fails(tmp_path),), **limits)
    found = torch.load(tmp_path / "warned-0.pt")
    assert [words in text for text in found] == [True] if words else not found
    assert not torch.load(tmp_path / "warned-1.pt")


def warned(
    wire: Wire, method: Method, steps: float, epochs: float = math.inf, warmup: Warmup | None = None
) -> list[str]:
    engine = Engine(method, wire)
    module = chain()
    engine.registry.add_module(module)
    engine.register(torch.optim.SGD(module.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_short_run(engine.registry, warmup, steps, epochs)
    engine.close()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("every", "steps", "words"),
    [
        (10, 9, "every=10 is more than the run's 9 optimizer steps"),
        (10, 10, None),
        (10, math.inf, None),
        (Stages([1000, 10], steps=[0, 50]), 9, "every=10 is more than the run's 9 optimizer steps"),
        (Stages([5, 1000], steps=[0, 50]), 9, None),
    ],
)
def test_runs_without_an_exchange(wire: Wire, every: Any, steps: float, words: str | None) -> None:
    found = warned(wire, federated_averaging(every), steps)
    assert [words in text for text in found] == [True] if words else not found


def test_a_warmup_from_outside_takes_the_methods_place(wire: Wire) -> None:
    (found,) = warned(wire, dgc(warmup_steps=10), steps=100, warmup=Warmup(steps=200))
    assert "200 steps of warm-up in a run of 100" in found
    assert not warned(wire, dgc(warmup_steps=200), steps=100, warmup=Warmup(steps=10))
    assert warned(wire, dgc(warmup_steps=200), steps=100)


def test_before_there_is_a_module_nothing_is_known(wire: Wire) -> None:
    engine = Engine(dgc(), wire)
    engine.register(torch.optim.SGD(chain().parameters(), lr=0.1))
    warn_of_short_run(engine.registry, None, 3, 1)
    engine.close()
