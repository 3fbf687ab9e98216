"""Tables whose gradients have few rows are trained as with ddp, whatever else of the model waits in residuals."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_sparsecomm.basis import GRADIENTS, Wire
from lightning_sparsecomm.methods import dgc, gradient_dropping, local_adam, quantized
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.switching import switch
from lightning_sparsecomm.sharing import Method
from tests.distributed.launch import run_ranks

WORLD_SIZE, STEPS, ROWS = 3, 6, 400
RATES = (0.1, 0.05, 0.2, 0.1, 0.0, 0.1)


class Model(nn.Module):
    """A table of many rows, one whose rows are all met in each step, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.ids = nn.Embedding(ROWS, 4)
        self.kinds = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 3)
        with torch.no_grad():
            for weight in self.parameters():
                weight.copy_(torch.randn(weight.shape, generator=generator))


def gradients(rank: int, step: int, rows: int = 5) -> list[Tensor]:
    """Of the first table few rows; rank 2 has met none of its rows in the first step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    found = [torch.randn(weight.shape, generator=generator) for weight in Model().parameters()]
    met = torch.randperm(ROWS, generator=generator)[: 0 if rank == 2 and step == 0 else rows]
    found[0] *= torch.zeros(ROWS, 1).index_fill_(0, met, 1.0)
    return found


def make(method: Method, kind: Any, options: dict[str, Any]) -> tuple[Engine, Model, torch.optim.Optimizer]:
    model, engine = Model(), Engine(method, Wire())
    engine.registry.add_module(model)
    return engine, model, kind(model.parameters(), **options)


def step(engine: Engine, model: Model, optimizer: torch.optim.Optimizer, number: int, rows: int = 5) -> None:
    for weight, gradient in zip(model.parameters(), gradients(engine.wire.rank, number, rows)):
        weight.grad = gradient
    optimizer.param_groups[0]["lr"] = RATES[number]
    with engine.stepping(optimizer):
        engine.synchronize(optimizer)
        optimizer.step()


def _train(rank: int, method: Method, kind: Any, options: dict[str, Any]) -> tuple[list[np.ndarray], list[str], float]:
    """The table after each step; the tables found; and bytes of all gradients on the link."""
    engine, model, optimizer = make(method, kind, options)
    tables = []
    for number in range(STEPS):
        step(engine, model, optimizer, number)
        tables.append(model.ids.weight.detach().numpy().copy())
    found = list(engine.state.state_dict()["streams"][0].get("few_rows", {}))
    engine.close()
    return tables, found, engine.wire.ledger.link_bytes(GRADIENTS)


def _reference(kind: Any, options: dict[str, Any]) -> list[np.ndarray]:
    """ddp's: the optimizer's steps along the mean over ranks of the rounded gradients."""
    table = nn.Parameter(Model().ids.weight.detach().clone())
    optimizer, tables = kind([table], **options), []
    for number in range(STEPS):
        own = [gradients(rank, number)[0].bfloat16().float() for rank in range(WORLD_SIZE)]
        table.grad = torch.stack(own).sum(0) / WORLD_SIZE
        optimizer.param_groups[0]["lr"] = RATES[number]
        optimizer.step()
        tables.append(table.detach().numpy().copy())
    return tables


CASES: list[tuple[Callable[..., Method], Any, dict[str, Any]]] = [
    (lambda **o: dgc(0.2, warmup_steps=0, **o), torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "lr": 0.1}),
    (lambda **o: dgc(0.2, warmup_steps=0, every=2, residual_in_weights=True, **o), torch.optim.SGD, {"momentum": 0.9}),
    (lambda **o: local_adam(0.2, **o), torch.optim.AdamW, {"weight_decay": 0.1}),
    (lambda **o: local_adam(0.2, every=2, residual_in_weights=True, **o), torch.optim.Adam, {}),
    (lambda **o: local_adam(0.2, delay=1, **o), torch.optim.Adam, {}),
    (lambda **o: gradient_dropping(0.2, **o), torch.optim.Adagrad, {"lr": 0.1}),
    (lambda **o: quantized(bits=8, **o), torch.optim.RMSprop, {"momentum": 0.9}),
]


@pytest.mark.few(3)
@pytest.mark.parametrize(("method", "kind", "options"), CASES)
def test_a_table_of_few_rows_is_trained_as_with_ddp(
    tmp_path: Path, method: Callable[..., Method], kind: Any, options: dict[str, Any]
) -> None:
    ranks = run_ranks(tmp_path, WORLD_SIZE, _train, method(few_rows=True), kind, options)
    whole = 2 * (WORLD_SIZE - 1) / WORLD_SIZE * 4 * STEPS * sum(each.numel() for each in Model().parameters())
    for tables, found, sent in ranks:
        assert found == ["ids.weight"]
        assert sent < whole / 5
        for table, expected in zip(tables, _reference(kind, options)):
            np.testing.assert_allclose(table, expected, rtol=1e-5, atol=1e-6)
        assert tables[-1].tobytes() == ranks[0][0][-1].tobytes()


def _others(rank: int, fixed: bool) -> tuple[list[str], list[float], list[str]]:
    """Tables found by SGD; how far the layer is ahead of what all share after each step; and tables after a switch."""
    engine, model, optimizer = make(
        dgc(0.2, warmup_steps=0, every=2, residual_in_weights=True, few_rows=True), torch.optim.SGD, {"lr": 0.1}
    )
    engine.registry.fixed = fixed
    ahead = []
    for number in range(4):
        step(engine, model, optimizer, number)
        own = model.head.weight.detach().clone()
        engine.replicas.view_shared()
        ahead.append(float((own - model.head.weight.detach()).abs().max()))
        engine.replicas.view_own()
    found = list(engine.state.state_dict()["streams"][0].get("few_rows", {}))
    engine.close()

    engine, model, optimizer = make(gradient_dropping(0.2), torch.optim.Adam, {"lr": 0.1})
    engine.registry.fixed, engine.registry.few_rows.wanted = fixed, True
    step(engine, model, optimizer, 1)
    switch(engine, local_adam(0.2, few_rows=True), engine.registry.optimizers[0])
    step(engine, model, optimizer, 2)
    parts = engine.registry.optimizers[0].parts
    engine.close()
    return found, ahead, [name for sync, piece in parts if sync.takes_few_rows for name, _ in piece]


@pytest.mark.parametrize("fixed", [False, True])
def test_by_sgd_the_rest_exchanges_in_each_step_and_methods_to_come_know_the_tables(
    tmp_path: Path, fixed: bool
) -> None:
    """But between nodes, and replicas that come and go, there are no such tables."""
    for found, ahead, after in run_ranks(tmp_path, 2, _others, fixed):
        assert found == after == ([] if fixed else ["ids.weight"])
        assert (max(ahead) > 0) is fixed


def _resume(rank: int, rows: int) -> tuple[list[str], list[bytes]]:
    """Resumed after two steps or not, the table at the end; later steps meet so many rows."""
    options, ends = {"lr": 0.1}, []
    engine, model, optimizer = make(local_adam(0.2, few_rows=True), torch.optim.Adam, options)
    for number in range(2):
        step(engine, model, optimizer, number)
    state = copy.deepcopy((engine.state.state_dict(), optimizer.state_dict(), model.state_dict()))
    again, other, its = make(local_adam(0.2, few_rows=True), torch.optim.Adam, options)
    again.register(its)
    other.load_state_dict(state[2])
    its.load_state_dict(state[1])
    again.restart()
    assert not again.state.load_state_dict(state[0], as_many_ranks=True)
    for each in ((engine, model, optimizer), (again, other, its)):
        for number in range(2, STEPS):
            step(*each, number, rows)
        ends.append(b"".join(weight.detach().numpy().tobytes() for weight in each[1].parameters()))
    found = list(again.state.state_dict()["streams"][0]["few_rows"])
    return found, ends


@pytest.mark.parametrize("rows", [5, 300])
def test_what_the_first_step_found_holds_for_runs_that_resume(tmp_path: Path, rows: int) -> None:
    """Also where later steps meet many rows, which then travel in an all-reduce."""
    for found, ends in run_ranks(tmp_path, 2, _resume, rows):
        assert found == ["ids.weight"]
        assert ends[0] == ends[1]
