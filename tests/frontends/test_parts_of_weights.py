"""Buffers that are a part of a weight move with it; weights that share no element are weights of their own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sparsecomm import methods
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.frontends.fitting import Model, fit, refusals


class Viewing(Model):
    """With a buffer that is a part of its first weight, or its transpose; and a validation that does nothing."""

    def __init__(self, view: str | None) -> None:
        super().__init__()
        weight = self.network[0].weight.detach()
        if view is not None:
            self.register_buffer("view", weight[0] if view == "row" else weight.t())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None: ...

    def val_dataloader(self) -> Any:
        return DataLoader(torch.zeros(4, 6), batch_size=4)


def weights_of(tmp_path: Path, method: Any, view: str | None, validates: bool) -> dict[str, Any]:
    options = {"max_epochs": 3, "limit_val_batches": int(validates), "val_check_interval": 3}
    first, second = fit(tmp_path, Viewing(view), SparseCommStrategy(method), **options)
    assert all((first[name] == second[name]).all() for name in first)
    return {name: value for name, value in first.items() if name != "view"}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "method", [methods.default(every=5), methods.streaming_diloco(every=6), methods.federated_averaging(every=5)]
)
def test_a_buffer_that_is_a_part_of_a_weight_changes_nothing(tmp_path: Path, method: Any) -> None:
    without = weights_of(tmp_path, method, None, validates=False)
    for view, validates in (("row", True), ("transposed", False)):
        found = weights_of(tmp_path, method, view, validates)
        assert found.keys() == without.keys()
        assert all((found[name] == without[name]).all() for name in without)


class Columns(nn.Module):
    """Two weights that are columns of one table, as those of queries and keys, or one that is the other's transpose."""

    def __init__(self, overlap: bool) -> None:
        super().__init__()
        table = torch.randn(6, 6, generator=torch.Generator().manual_seed(2))
        parts = (table, table.t()) if overlap else table.split(3, 1)
        self.first, self.second = (nn.Parameter(part) for part in parts)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.first + x @ self.second)[:, :3]


@pytest.mark.parametrize("method", [methods.default(), methods.federated_averaging(every=2)])
def test_columns_of_one_table_are_trained_and_weights_that_overlap_refused(tmp_path: Path, method: Any) -> None:
    strategy = SparseCommStrategy(method)
    first, second = fit(tmp_path, Model(Columns(overlap=False)), strategy)
    assert all((first[name] == second[name]).all() for name in first)
    for error in refusals(tmp_path, Model(Columns(overlap=True)), strategy):
        assert "parameters 'network.first' and 'network.second' must not share memory" in error
