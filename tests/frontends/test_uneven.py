"""Which batches a loader for uneven inputs gives, and which of them count."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.frontends.uneven import UnevenLoader


class TwoRanks:
    """A wire on which the other rank says the same, and has a loader of `length` batches."""

    def __init__(self, length: int) -> None:
        self.length = length

    def all_gather(self, tensor: Tensor, row: str) -> Tensor:
        return torch.tensor([[int(tensor)], [self.length]])


def given(batches: list[Any], length: int) -> list[tuple[Any, bool]]:
    """The batches that Lightning trains on, and whether each is a repeated one."""
    wire: Any = TwoRanks(length)
    loader = UnevenLoader(batches, wire, torch.device("cpu"))
    # Lightning fetches one batch ahead, and passes over those that are None.
    ahead = list(loader)
    return [(batch, loader.fills.popleft()) for batch in ahead if batch is not None]


def test_a_rank_that_has_run_out_repeats_its_last_batch() -> None:
    assert given([1, 2], 4) == [(1, False), (2, False), (2, True), (2, True)]


def test_a_rank_that_resumes_where_it_had_run_out_repeats_any_batch() -> None:
    class Resumed(list[int]):
        """A loader that remembers how far it was."""

        begun = False

        def __iter__(self) -> Iterator[int]:
            left = super().__iter__() if self.begun else iter(())
            self.begun = True
            return left

    assert given(Resumed([1, 2]), 3) == [(1, True)] * 3


@pytest.mark.parametrize(
    ("batches", "found"),
    [
        ([None, 1, 2], [(1, False), (2, False), (2, True), (2, True)]),
        ([1, None, 2], [(1, False), (2, False), (2, True), (2, True)]),
        ([1, 2, None], [(1, False), (2, False), (2, True), (2, True)]),
    ],
)
def test_a_batch_of_none_is_neither_counted_nor_repeated(batches: list[Any], found: list[tuple[Any, bool]]) -> None:
    """As a `collate_fn` gives where all samples of a batch are damaged."""
    assert given(batches, 5) == found
