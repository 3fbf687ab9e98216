"""The samples of a batch, read off its tensors."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sparsecomm.frontends.counting import samples_in

X, Y = torch.zeros(8, 3), torch.zeros(8, dtype=torch.int64)
LOADER = DataLoader(range(20), batch_size=8)  # type: ignore[arg-type]
SMALL = DataLoader(range(20), batch_size=3)  # type: ignore[arg-type]


class Pair(NamedTuple):
    x: Tensor
    names: list[str]


@dataclass
class Record:
    x: Tensor
    scale: float


@pytest.mark.parametrize(
    "batch",
    [
        X,
        [X, Y],
        (X, {"y": Y, "ids": ["a"] * 8}),
        {"x": X, "temperature": torch.ones(())},
        Pair(X, ["a"] * 8),
        Record(X, 1.0),
        [list(range(30)), Y],
        X.to_sparse(),
    ],
    ids=lambda batch: type(batch).__name__,
)
@pytest.mark.parametrize("loader", [None, LOADER], ids=["no loader", "loader"])
def test_it_is_what_tensors_have_in_common(batch: Any, loader: Any) -> None:
    assert samples_in(batch, loader) == 8


@pytest.mark.parametrize(
    "batch", [[X, torch.zeros(5)], [], ["a"] * 8, torch.ones(()), 1.5, [torch.zeros(9)], {"x": 1.0}], ids=repr
)
def test_a_batch_may_not_tell(batch: Any) -> None:
    assert math.isnan(samples_in(batch, LOADER))


def test_of_several_dataloaders_samples_add_up() -> None:
    small = torch.zeros(3)
    assert samples_in([[X, Y], small], [LOADER, SMALL]) == 11
    assert samples_in({"a": X, "b": {"x": small}}, {"a": LOADER, "b": SMALL}) == 11
    # One is at its end; one does not tell.
    assert samples_in([None, small], [LOADER, SMALL]) == 3
    assert math.isnan(samples_in([X, "b"], [LOADER, SMALL]))
    # The module has put them together before.
    assert samples_in({"x": torch.zeros(11, 2)}, {"a": LOADER, "b": SMALL}) == 11


def test_it_looks_at_few_parts_of_many() -> None:
    looked: list[int] = []

    class Many(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            for number in range(10**9):
                looked.append(number)
                yield X

    assert samples_in(Many()) == 8
    endless: list[Any] = []
    endless.append(endless)
    assert math.isnan(samples_in(endless))
    assert len(looked) < 100
