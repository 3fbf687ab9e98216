"""Which tables count as having few rows."""

import pytest
import torch
from torch import nn

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.channel.momentum import Velocity
from lightning_sparsecomm.methods import default, dgc, gradient_dropping, local_adam, split
from lightning_sparsecomm.run.choice import method_for
from lightning_sparsecomm.run.few_rows import FewRows
from lightning_sparsecomm.sharing import Sync
from lightning_sparsecomm.sharing.gradients import few_rows_of, has_few_rows, note_few_rows

WIDTH, COUNT = 16, 1000
SYNCS = dgc(0.01, few_rows=True).syncs


@pytest.fixture
def two(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> Wire:
    """Two ranks, of which the other one has met no row."""
    monkeypatch.setattr(wire, "world_size", 2)
    monkeypatch.setattr(wire, "all_gather", lambda counts, row: torch.stack([0 * counts, counts]))
    return wire


def judged(wire: Wire, rows: int, syncs: tuple[Sync, ...] = SYNCS, table: nn.Module | None = None) -> bool:
    """Whether a table is found whose gradient has so many rows."""
    table = nn.Embedding(COUNT, WIDTH) if table is None else table
    few_rows = FewRows(wire)
    few_rows.scan(table)
    weight = next(table.parameters())
    weight.grad = torch.zeros_like(weight)
    weight.grad.view(len(weight), -1)[:rows, -1] = 1e-6
    few_rows.judge([weight], syncs)
    return has_few_rows(weight)


def test_rows_must_take_20_times_fewer_bytes(two: Wire) -> None:
    """2 bytes for each element and 8 for each row, against 4 for each element of the table."""
    most = int(COUNT * WIDTH * 4 / 20 / (2 * WIDTH + 8))
    assert judged(two, most)
    assert not judged(two, most + 1)


def test_each_table_is_judged_once(two: Wire) -> None:
    """Also where another optimizer holds it, or a state says what it is."""
    table, few_rows = nn.Embedding(COUNT, WIDTH), FewRows(two)
    few_rows.scan(table)
    few_rows.load_state_dict([("table", table.weight)], {"table": 5})
    table.weight.grad = torch.ones_like(table.weight)
    assert not few_rows.judge([table.weight], SYNCS)
    assert has_few_rows(table.weight)
    assert few_rows.state_dict([("table", table.weight)]) == {"table": 5}
    few_rows.load_state_dict([("table", table.weight)], {})
    assert not has_few_rows(table.weight)


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


def test_a_table_that_is_excluded_goes_whole(two: Wire) -> None:
    table = nn.Embedding(COUNT, WIDTH)
    assert judged(two, 5, table=table)
    for method in (dgc(few_rows=True, exclude=["w*"]), gradient_dropping(few_rows=True, exclude=["w*"])):
        ((sync, _),) = method.parts([("weight", table.weight)])
        assert sync is method.syncs[1]


@pytest.mark.parametrize("few", [0, 5])
def test_what_a_method_does_for_an_optimizer_does_not_depend_on_tables(few: int) -> None:
    """Momentum that one sync takes over is in all; and RMSprop has the method that it has with any weight."""
    table, head = nn.Embedding(COUNT, WIDTH).weight, nn.Linear(WIDTH, 2, bias=False).weight
    note_few_rows(table, few)
    both = [("table", table), ("head", head)]
    mixed = split(["head"], dgc(0.2, warmup_steps=0), gradient_dropping(0.2, few_rows=True))
    joined = method_for(torch.optim.SGD([table, head], lr=0.1, momentum=0.9), [mixed], both)
    assert all(any(parts_in(sync, Velocity)) for sync in joined.syncs)
    method = method_for(torch.optim.RMSprop([table]), default().chain, both[:1])
    assert "quantized" in repr(default().chain[2])
    assert len(method.syncs) == len(default().chain[2].syncs)
    assert repr(method.syncs) == repr(default().chain[2].syncs)
    assert few_rows_of(table) == few


def test_a_local_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="few_rows must be False with a local mode"):
        gradient_dropping(0.1, local="sum", few_rows=True)
