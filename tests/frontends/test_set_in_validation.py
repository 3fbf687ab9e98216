"""While Lightning validates, the module holds the shared model: hooks may set and swap weights, and replace tensors."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sparsecomm import methods
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.frontends.fitting import Model, fit

EVERY = 4


class Setting(Model):
    """Validates after every third batch, amid a round of `EVERY` steps, and sets a layer then, once."""

    def __init__(self, hook: str) -> None:
        # So small a rate that training changes little.
        super().__init__(optimizer=partial(torch.optim.SGD, lr=1e-4))
        self.hook, self.done = hook, False

    def val_dataloader(self) -> Any:
        return DataLoader(torch.zeros(4, 6), batch_size=4)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._set("validation_step")

    def on_validation_end(self) -> None:
        self._set("on_validation_end")

    def _set(self, hook: str) -> None:
        if hook == self.hook and self.global_step and not self.done:
            self.done = True
            with torch.no_grad():
                self.network[0].weight.fill_(3.0)


@pytest.mark.few(4)
@pytest.mark.filterwarnings("ignore:other code than the optimizer")
@pytest.mark.parametrize("hook", ["validation_step", "on_validation_end"])
@pytest.mark.parametrize(
    "method",
    [
        methods.sbc(0.1, every=EVERY),
        methods.diloco(every=EVERY),
        methods.sparse_loco(every=EVERY, delay=1),
        methods.gradient_dropping(0.1, local="partial", average_every=EVERY),
    ],
    ids=["sbc", "diloco", "sparse_loco, delayed", "local mode"],
)
def test_it_stays(tmp_path: Path, method: Any, hook: str) -> None:
    strategy = SparseCommStrategy(method)
    found = fit(tmp_path, Setting(hook), strategy, max_epochs=4, val_check_interval=3, num_sanity_val_steps=0)
    for weights in found:
        torch.testing.assert_close(
            torch.from_numpy(weights["network.0.weight"]), torch.full((8, 6), 3.0), atol=0.01, rtol=0
        )


class Swapping(pl.Callback):
    """Validates another model, as a moving average does: swaps it in when validation starts, and out when it ends.

    Args:
        how: Whether it swaps "values" in place, or the tensors in "data".
        folder: Where it saves the weights that validation has seen, and those after the swap back.
    """

    def __init__(self, how: str, folder: Path) -> None:
        self.how, self.folder = how, folder
        self.average: list[Tensor] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.average = [torch.full_like(each, 9.0) for each in pl_module.parameters()]

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._swap(pl_module)

    def on_validation_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._save("seen", trainer, pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._swap(pl_module)
        assert all(bool((each == 9.0).all()) for each in self.average)
        self._save("shared", trainer, pl_module)

    def _save(self, what: str, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        torch.save(pl_module.state_dict(), self.folder / f"{what}-{trainer.global_rank}-{trainer.global_step}.pt")

    def _swap(self, pl_module: pl.LightningModule) -> None:
        for index, parameter in enumerate(pl_module.parameters()):
            if self.how == "data":
                parameter.data, self.average[index] = self.average[index], parameter.data
            else:
                held = parameter.detach().clone()
                parameter.data.copy_(self.average[index])
                self.average[index].copy_(held)


@pytest.mark.few(2)
@pytest.mark.parametrize("how", ["values", "data"])
@pytest.mark.parametrize(
    "method",
    [methods.federated_averaging(every=EVERY), methods.gradient_dropping(0.1, local="partial", average_every=EVERY)],
    ids=["federated averaging", "local mode"],
)
def test_another_model_may_be_swapped_in(tmp_path: Path, method: Any, how: str) -> None:
    """Validation sees it, checkpoints hold the shared model again, and training goes on as without it."""
    options: dict[str, Any] = {"max_epochs": 3, "val_check_interval": 3, "num_sanity_val_steps": 0}
    plain = fit(tmp_path, Setting("never"), SparseCommStrategy(method), **options)
    swapped = fit(
        tmp_path, Setting("never"), SparseCommStrategy(method), callbacks=[Swapping(how, tmp_path)], **options
    )
    for before, after in zip(plain, swapped, strict=True):
        assert all((after[name] == values).all() for name, values in before.items())
    for path in tmp_path.glob("seen-*.pt"):
        assert all(bool((weight == 9.0).all()) for weight in torch.load(path).values())
    shared = [torch.load(path) for path in sorted(tmp_path.glob("shared-0-*.pt"))]
    assert len(shared) == 3
    for mine, path in zip(shared, sorted(tmp_path.glob("shared-1-*.pt")), strict=True):
        assert all(torch.equal(weight, mine[name]) for name, weight in torch.load(path).items())


class Replacing(Setting):
    """Replaces each parameter's `.data`, and a buffer, by equal ones, and saves the run, all while it is validated."""

    def __init__(self, path: Path, replaces: bool) -> None:
        super().__init__("never")
        self.path, self.replaces = path, replaces
        self.register_buffer("level", torch.zeros(2))

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.level += batch.mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.replaces:
            for parameter in self.parameters():
                parameter.data = parameter.data.clone()
            self.level = self.level.clone()
        self.trainer.save_checkpoint(self.path)


def test_tensors_may_be_replaced(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_epochs": 3, "val_check_interval": 3, "num_sanity_val_steps": 0}
    plain, replaced = (
        (
            fit(
                tmp_path, Replacing(tmp_path / name, replaces), SparseCommStrategy(methods.sbc(every=EVERY)), **options
            ),
            torch.load(tmp_path / name, weights_only=False)["state_dict"],
        )
        for name, replaces in (("plain.ckpt", False), ("replaced.ckpt", True))
    )
    for before, after in zip((*plain[0], plain[1]), (*replaced[0], replaced[1]), strict=True):
        assert all((after[name] == values).all() for name, values in before.items())
