"""Manual optimization: a run that is resumed at an epoch's end is the run that never stopped."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsecomm import Method, SparseCommStrategy
from lightning_sparsecomm.basis import ByLength
from lightning_sparsecomm.basis.groups import destroy_all
from lightning_sparsecomm.methods import default, dgc
from tests.distributed.launch import QUIET

BATCHES, EPOCHS = 6, 4


@pytest.fixture(autouse=True)
def _leaves_the_group() -> Iterator[None]:
    """Trainers of one process join a group in this process, which later tests would find."""
    yield
    destroy_all()


class Manual(pl.LightningModule):
    """Two networks, of which the second is trained in every `seldom`-th batch; it says what a run has done."""

    def __init__(self, seldom: int, clips: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seldom, self.clips = seldom, clips
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.lengths: list[float] = []
        self.apart: list[bool] = []
        self.saves_to: Path | None = None

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), 0.05, momentum=0.9) for each in (self.first, self.second)]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for network, optimizer, every in zip((self.first, self.second), self.optimizers(), (1, self.seldom)):  # type: ignore[arg-type]
            if batch_idx % every == 0:
                optimizer.zero_grad()
                self.manual_backward((network(batch[0]) - batch[0].flip(1)).square().mean())
                if self.clips:
                    self.clip_gradients(optimizer, gradient_clip_val=1.0)
                optimizer.step()

    def on_train_epoch_end(self) -> None:
        if self.saves_to is not None:
            self.trainer.save_checkpoint(self.saves_to / f"{self.current_epoch}.ckpt")
        engine = getattr(self.trainer.strategy, "engine", None)
        if engine is None:
            return
        self.lengths.append(engine.length)
        self.apart.append(any(share.shared_weights() for share in engine.registry.optimizers[0].shares.values()))


def fit(
    method: Method | None,
    folder: Path,
    resumed: Path | None = None,
    epochs: int = EPOCHS,
    saves: bool = False,
    **options: Any,
) -> Manual:
    pl.seed_everything(0, verbose=False)
    model = Manual(**options)
    samples = torch.randn(4 * BATCHES, 16, generator=torch.Generator().manual_seed(1))
    if resumed is None or saves:
        model.saves_to = folder
    strategy: Any = "auto" if method is None else SparseCommStrategy(method=method)
    trainer = pl.Trainer(devices=1, strategy=strategy, max_epochs=epochs, enable_checkpointing=False, **QUIET)
    trainer.fit(model, DataLoader(TensorDataset(samples), 4), ckpt_path=resumed)
    return model


def check(method: Method, folder: Path, **options: Any) -> Manual:
    """Resumes from each checkpoint of a run, which must end as it did; returns the run that never stopped."""
    whole = fit(method, folder, **options)
    saved = sorted(folder.glob("*.ckpt"))
    assert len(saved) == EPOCHS
    for path in saved:
        resumed = fit(method, folder, path, **options)
        assert set(resumed.lengths) <= set(whole.lengths)
        for key, weight in whole.state_dict().items():
            assert torch.equal(weight, resumed.state_dict()[key]), (path, key)
    return whole


@pytest.mark.parametrize("every", [1, 2])
def test_gradients_that_are_clipped_know_whether_they_end_an_epoch(tmp_path: Path, every: int) -> None:
    whole = check(default(every=every, residual_in_weights=True), tmp_path, seldom=1, clips=True)
    assert whole.apart == [False] * EPOCHS


def test_the_length_holds_where_one_optimizer_makes_fewer_steps(tmp_path: Path) -> None:
    density = ByLength(0.4, 0.9, least=0.002, most=0.9, steps=BATCHES * EPOCHS)
    whole = check(dgc(density), tmp_path, seldom=2, clips=False)
    assert set(whole.lengths) == {BATCHES * EPOCHS}


@pytest.mark.filterwarnings("ignore:resuming from .* with empty memories")
def test_a_run_that_went_on_from_one_without_sparsecomm_is_resumed_with_its_length(tmp_path: Path) -> None:
    options: Any = {"seldom": 1, "clips": False}
    fit(None, tmp_path, epochs=1, **options)
    went_on = fit(default(), tmp_path, tmp_path / "0.ckpt", saves=True, **options)
    resumed = fit(default(), tmp_path, tmp_path / "2.ckpt", **options)
    assert len({*went_on.lengths, *resumed.lengths}) == 1
