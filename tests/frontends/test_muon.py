"""MuLoCo with Muon for the matrices and AdamW for all else, by manual optimization."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.methods import muloco
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.frontends.fitting import Model, fit


class ByMuon(Model):
    """Two optimizers that step together."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        matrices = [parameter for parameter in self.parameters() if parameter.dim() == 2]
        others = [parameter for parameter in self.parameters() if parameter.dim() != 2]
        return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon since 2.9")
def test_ranks_end_with_the_same_weights(tmp_path: Path) -> None:
    before = {name: weight.numpy() for name, weight in Model().state_dict().items()}
    first, second = fit(tmp_path, ByMuon(), SparseCommStrategy(muloco(every=3)), max_epochs=4)
    for name, weight in before.items():
        assert np.array_equal(first[name], second[name])
        assert not np.array_equal(first[name], weight)
