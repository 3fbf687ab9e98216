"""How long a fit will be: densities follow it, and its last step sends what waits."""

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import GradientAccumulationScheduler, LearningRateFinder, StochasticWeightAveraging
from torch import Tensor, nn

from lightning_sparsecomm.basis.schedules import ByLength
from lightning_sparsecomm.methods import dgc, diloco
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.frontends.fitting import Model, fit

BATCHES = 4


class ByHand(Model):
    """Manual optimization, of one optimizer or of one for each layer."""

    def __init__(self, optimizers: int = 1) -> None:
        super().__init__()
        self.automatic_optimization, self.count = False, optimizers

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """A step of each optimizer."""
        loss = super().training_step(batch, batch_idx)
        found: Any = self.optimizers()
        optimizers = found if isinstance(found, list) else [found]
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        """SGD."""
        layers = [self.network[0], self.network[2]] if self.count == 2 else [self.network]
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers]


class Notes(pl.Callback):
    """Writes what rank 0 announced, expected and did."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Also the largest difference from an averaged model."""
        averages = [each for each in vars(trainer)["callbacks"] if isinstance(each, StochasticWeightAveraging)]
        differences = [
            float((own - mean).abs().max().detach())
            for each in averages
            for own, mean in zip(pl_module.parameters(), each._average_model.parameters())  # type: ignore[union-attr]
        ]
        if trainer.is_global_zero:
            strategy: Any = trainer.strategy
            made = max(tracked.steps for tracked in strategy.engine.registry.optimizers)
            torch.save((strategy.announced, strategy.engine.length, made, max(differences, default=0.0)), self.path)


def _noted(
    tmp_path: Path, model: Model, *callbacks: pl.Callback, **options: Any
) -> tuple[list[str], float, int, float]:
    path = tmp_path / "noted.pt"
    strategy = SparseCommStrategy(dgc(ByLength(), scope="balanced"))
    fit(tmp_path, model, strategy, callbacks=[*callbacks, Notes(path)], **options)
    found: tuple[list[str], float, int, float] = torch.load(path)
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize(("options", "steps"), [({"max_epochs": 3}, 3 * BATCHES), ({"max_epochs": -1}, 6)])
def test_manual_optimization_is_expected_to_step_once_for_each_batch(
    tmp_path: Path, optimizers: int, options: dict[str, Any], steps: int
) -> None:
    if options["max_epochs"] < 0:
        options = {**options, "max_steps": steps * optimizers}
    lines, length, made, _ = _noted(tmp_path, ByHand(optimizers), **options)
    assert (length, made) == (steps, steps)
    assert len(lines) == optimizers
    assert all(f"in each of {steps} steps (if each batch makes one)" in line for line in lines)


class Stops(pl.Callback):
    """A stop of the user's own, which no length tells of."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        trainer.should_stop = trainer.global_step >= 5


def test_a_run_of_unknown_length_counts_as_a_short_one_at_first(tmp_path: Path) -> None:
    lines, length, made, _ = _noted(tmp_path, Model(), Stops(), max_epochs=-1)
    assert length == math.inf
    assert 5 <= made < 5 + BATCHES
    assert "2.95% of the elements at first, 0.99% later, in each step of a run of unknown length" in lines[0]


class Tried(Model):
    """Writes which length each of its steps has found."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.lr, self.lengths = path, 0.1, list[float]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Notes the length."""
        strategy: Any = self.trainer.strategy
        self.lengths.append(strategy.engine.length)
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        """Of rank 0."""
        if self.trainer.is_global_zero:
            torch.save(self.lengths, self.path)


def test_a_learning_rate_finder_tries_a_run_of_its_own_length(tmp_path: Path) -> None:
    """Where it sends little, rates that are too high hurt later, and it finds higher ones than with ddp."""
    finder = LearningRateFinder(num_training_steps=3)
    fit(tmp_path, Tried(tmp_path / "lengths.pt"), SparseCommStrategy(), callbacks=[finder], max_epochs=2)
    lengths = torch.load(tmp_path / "lengths.pt")
    assert lengths == [3] * 3 + [2 * BATCHES] * (2 * BATCHES)


class TriesAgain(LearningRateFinder):
    """Searches at the beginning of the first epoch, as in Lightning's documentation. The handler of SIGTERM stays."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None: ...

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            before = list(signal.getsignal(signal.SIGTERM).signal_handlers)
            assert any("_Notifier" in repr(each) for each in before)
            self.lr_find(trainer, pl_module)
            assert signal.getsignal(signal.SIGTERM).signal_handlers == before


def test_a_search_amid_a_fit_leaves_the_fit_its_length_and_its_way_to_stop(tmp_path: Path) -> None:
    ends, lengths = [], []
    search = TriesAgain(num_training_steps=3, update_attr=False, early_stop_threshold=None)
    for index, searches in enumerate([[], [search]]):
        model = Tried(tmp_path / f"{index}.pt")
        method = dgc(0.1, warmup_steps=0, every=2)
        ends.append(fit(tmp_path, model, SparseCommStrategy(method), callbacks=searches, max_epochs=3))
        lengths.append(torch.load(tmp_path / f"{index}.pt"))
    assert lengths == [[12] * 12, [3] * 3 + [12] * 12]
    assert all((weight == ends[0][0][name]).all() for name, weight in ends[1][0].items())


def test_averaged_weights_with_batch_norm_stay_the_average(tmp_path: Path) -> None:
    """Lightning adds an epoch that only measures: neither what waits nor an old gradient may move the weights then."""
    network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    averaging = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
    _, length, made, difference = _noted(tmp_path, Model(network), averaging, max_epochs=3)
    assert (length, made) == (3 * BATCHES, 3 * BATCHES)
    assert difference == 0


@pytest.mark.parametrize("schedule", [{0: 4}, {0: 1, 1: 2, 3: 3}])
def test_schedules_of_accumulation_count(tmp_path: Path, schedule: dict[int, int]) -> None:
    _, length, made, _ = _noted(tmp_path, Model(), GradientAccumulationScheduler(schedule), max_epochs=5)
    assert length == made == {1: 5, 3: 4 + 2 + 2 + 2 + 2}[len(schedule)]


def test_averages_of_weights_that_drift_end_equal_with_batch_norm(tmp_path: Path) -> None:
    """Each rank has averaged its own; the replicas are compared when training ends."""
    network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    averaging = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
    ends = fit(tmp_path, Model(network), SparseCommStrategy(diloco(every=3)), callbacks=[averaging], max_epochs=4)
    assert all((weight == ends[1][name]).all() for name, weight in ends[0].items())
