"""Which tables count as having few rows."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.methods import dgc, local_adam
from lightning_sparsecomm.run.few_rows import FewRows
from lightning_sparsecomm.sharing import Sync
from lightning_sparsecomm.sharing.gradients import has_few_rows

WIDTH, COUNT = 16, 1000
SYNCS = dgc(0.01, few_rows=True).syncs


@pytest.fixture
def two(wire: Wire) -> Iterator[Wire]:
    """Two ranks, of which this one is alone: sums are its own."""
    wire.world_size = 2
    yield wire
    wire.world_size = 1


def judged(
    wire: Wire, rows: int, syncs: tuple[Sync, ...] = SYNCS, averaged: bool = False, table: nn.Module | None = None
) -> bool:
    """Whether a table is found whose gradient has so many rows."""
    table = nn.Embedding(COUNT, WIDTH) if table is None else table
    few_rows = FewRows(wire)
    few_rows.scan(table)
    weight = next(table.parameters())
    weight.grad = torch.zeros_like(weight)
    weight.grad.view(len(weight), -1)[:rows, -1] = 1e-6
    few_rows.judge([weight], syncs, averaged)
    return has_few_rows(weight)


@pytest.mark.parametrize("averaged", [False, True])
def test_rows_must_take_20_times_fewer_bytes(two: Wire, averaged: bool) -> None:
    """2 W for each element and 8 for each row, against 8 for each element of the table."""
    most = int(2 * COUNT * WIDTH * 4 / 20 / (2 * WIDTH + 8)) * (2 if averaged else 1)
    assert judged(two, most, averaged=averaged)
    assert not judged(two, most + 2, averaged=averaged)


def test_only_embeddings_and_only_methods_that_want_it(two: Wire) -> None:
    assert judged(two, 5, table=nn.EmbeddingBag(COUNT, WIDTH))
    assert not judged(two, 5, table=nn.Linear(WIDTH, COUNT, bias=False))
    assert not judged(two, 5, syncs=dgc(0.01).syncs)
    assert not judged(two, 0)


def test_a_new_run_finds_out_anew(two: Wire) -> None:
    table = nn.Embedding(COUNT, WIDTH)
    assert judged(two, 5, table=table)
    assert not judged(two, COUNT, table=table)


def test_alone_nothing_is_found(wire: Wire) -> None:
    assert not judged(wire, 5)


def test_other_syncs_leave_such_a_table_alone(two: Wire) -> None:
    table = nn.Embedding(COUNT, WIDTH)
    named = [("weight", table.weight)]
    for method in (dgc(0.01, few_rows=True), local_adam(0.01, few_rows=True)):
        assert not judged(two, COUNT, table=table)
        ((sync, _),) = method.parts(named)
        assert sync is method.syncs[0]
        assert judged(two, 5, table=table)
        ((sync, _),) = method.parts(named)
        assert sync is method.syncs[-1]
    ((sync, _),) = dgc(0.01).parts(named)
    assert sync.takes_few_rows is None
