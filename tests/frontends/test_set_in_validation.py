"""Weights that a hook sets while Lightning validates, and the module holds the shared model, stay set."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
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
