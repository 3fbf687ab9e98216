"""What a run says at its start."""

import math

import pytest
import torch
from torch import nn

from lightning_sparsecomm.basis import ByLength
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.methods import default, dense, dgc
from lightning_sparsecomm.run.announcement import announcement
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.following import follow
from lightning_sparsecomm.sharing import Method
from tests.run.training import chain


def test_a_run_that_resumes_with_another_length_says_that_it_keeps_its_method(wire: Wire) -> None:
    engine, module = Engine(default(), wire), chain()
    engine.registry.add_module(module)
    engine.register(torch.optim.SGD(module.parameters(), lr=0.1))
    engine.expect(20)
    engine.follow_length()
    lines = [
        announcement(engine.registry, length, ranks, usual=default().for_run(length, ranks))[0]
        for length, ranks in ((20, 1), (300, 1), (3000, 1))
    ]
    engine.close()
    assert lines[0].endswith("; 58.00% of the elements in each of 20 steps")
    # A run of 300 has the same one.
    assert lines[1].endswith("; 58.00% of the elements in each of 300 steps")
    assert lines[2].endswith(" of the elements in each of 3,000 steps; with the method of a run of 20 steps")


@pytest.mark.parametrize("warms_up", [False, True])
def test_a_callback_that_warms_up_is_said_with_the_bytes(wire: Wire, warms_up: bool) -> None:
    engine, module = Engine(dgc(0.1, warmup_steps=0), wire), chain()
    engine.registry.add_module(module)
    engine.register(torch.optim.SGD(module.parameters(), lr=0.1))
    (line,) = announcement(engine.registry, 20, 2, fewer=[50.0], warms_up=warms_up)
    engine.close()
    assert line.endswith("about 50 times fewer bytes than ddp" + ", after the warm-up" * warms_up)


@pytest.mark.parametrize(
    ("rows", "few_rows", "judged", "said"),
    [(1000, True, False, True), (1000, False, False, False), (1000, True, True, False), (10, True, False, False)],
)
def test_embeddings_may_send_fewer_bytes_than_the_rehearsal_tells(
    wire: Wire, rows: int, few_rows: bool, judged: bool, said: bool
) -> None:
    table, module = nn.Embedding(rows, 10), nn.Linear(100, 100)
    engine = Engine(dgc(0.1, warmup_steps=0, few_rows=few_rows), wire)
    engine.registry.add_module(nn.ModuleList([table, module]))
    engine.register(torch.optim.SGD([*table.parameters(), *module.parameters()], lr=0.1))
    if judged:
        engine.registry.few_rows.load_state_dict([("table", table.weight)], {"table": 8})
    (line,) = announcement(engine.registry, 20, 2, fewer=[50.0])
    engine.close()
    assert line.endswith(
        "times fewer bytes than ddp" + ", and fewer still if steps use few rows of the embeddings" * said
    )


@pytest.mark.parametrize("case", ["excluded", "output layer", "narrow"])
def test_nothing_is_promised_of_embeddings_that_are_exchanged_like_all_else(wire: Wire, case: str) -> None:
    table = nn.Embedding(4, 64) if case == "narrow" else nn.Embedding(1000, 10)
    output = nn.Linear(table.embedding_dim, table.num_embeddings, bias=False)
    if case == "output layer":
        output.weight = table.weight
    method = dgc(0.1, warmup_steps=0, few_rows=True, exclude=["0.*"] if case == "excluded" else [])
    engine = Engine(method, wire)
    engine.registry.add_module(nn.ModuleList([table, output]))
    engine.register(torch.optim.SGD(table.parameters(), lr=0.1))
    wire.world_size = 2
    (line,) = announcement(engine.registry, 20, 2, fewer=[50.0])
    wire.world_size = 1
    engine.close()
    assert line.endswith("times fewer bytes than ddp")


def _kept_of(engine: Engine, ranks: int) -> str:
    engine.registry.methods = default().chain
    follow(engine.registry, (562, ranks))
    return announcement(engine.registry, 3000, 4, usual=default().for_run(3000, 4))[0]


def test_a_run_that_resumes_on_other_ranks_says_that_it_keeps_its_method(wire: Wire) -> None:
    engine, module = Engine(default(), wire), chain()
    engine.registry.add_module(module)
    engine.register(torch.optim.AdamW(module.parameters()))
    follow(engine.registry, (3000, 8))
    lines = [
        announcement(engine.registry, 3000, ranks, usual=default().for_run(3000, ranks))[0] for ranks in (8, 16, 4)
    ]
    alone, earlier = (_kept_of(engine, ranks) for ranks in (1, 0))
    engine.close()
    assert lines[0].endswith("; 15.00% of the elements in each of 3,000 steps")
    assert lines[1].endswith(" in each of 3,000 steps")
    assert lines[2].endswith(" in each of 3,000 steps; with the method of a run of 3,000 steps on 8 ranks")
    assert alone.endswith(" in each of 3,000 steps; with the method of a run of 562 steps on 1 rank")
    assert earlier.endswith(" in each of 3,000 steps; with the method of a run of 562 steps by an earlier version")


@pytest.mark.parametrize(
    ("method", "length", "lines"),
    [
        (
            default(),
            300,
            "SGD by dgc(density=0.58, scope='balanced', values='three_bit', positions='short', exchange='all_reduce',"
            " rest_bits=8, few_rows=True);"
            " 58.00% of the elements in each of 300 steps",
        ),
        (
            default(),
            math.inf,
            "SGD by dgc(density=0.212 to 0.0514, scope='balanced', values='three_bit', positions='short',"
            " exchange='all_reduce', rest_bits=8, few_rows=True);"
            " 21.20% of the elements at first, 5.14% later, in each step of a run of unknown length",
        ),
        (
            dgc(ByLength(unknown=0.02)),
            math.inf,
            "SGD by dgc(density=0.02); 2.00% of the elements in each step of a run of unknown length",
        ),
        (default(every=2), 1000, "; 59.20% of the elements in at least 500 of 1,000 steps"),
        (
            default(every=2),
            math.inf,
            "; 59.20% of the elements at first, 14.36% later, in one of 2 steps of a run of unknown length",
        ),
        (dgc(0.001), 300, "SGD by dgc(density=0.001); warm-up of 1,000 steps"),
        (dgc(0.001, warmup_epochs=4), 300, "SGD by dgc(density=0.001, warmup_epochs=4); warm-up of 4 epochs"),
        (dgc(0.001, warmup_steps=0), 300, "SGD by dgc(density=0.001, warmup_steps=0)"),
        (dense(), 300, "SGD by dense()"),
    ],
)
def test_a_line_for_each_optimizer(wire: Wire, method: Method, length: float, lines: str) -> None:
    engine, module = Engine(method, wire), chain()
    engine.registry.add_module(module)
    engine.register(torch.optim.SGD(module.parameters(), lr=0.1))
    (line,) = announcement(engine.registry, length, 4)
    engine.close()
    assert line.startswith("sparsecomm: 4 ranks, SGD by ")
    assert line.endswith(lines)


def test_a_run_that_may_end_sooner_says_what_it_begins_with(wire: Wire) -> None:
    engine, module = Engine(default(every=2), wire), chain()
    engine.registry.add_module(module)
    engine.register(torch.optim.SGD(module.parameters(), lr=0.1))
    long, short = (announcement(engine.registry, length, 4, may_end_sooner=True)[0] for length in (5000, 300))
    engine.close()
    assert long.endswith("; 59.20% of the elements at first, 14.36% later, in at least 2,500 of 5,000 steps")
    assert short.endswith("; 62.00% of the elements in at least 150 of 300 steps")


def test_a_length_that_supposes_one_step_for_each_batch_says_so(wire: Wire) -> None:
    engine, module = Engine(default(), wire), chain()
    engine.registry.add_module(module)
    engine.register(torch.optim.SGD(module.parameters(), lr=0.1))
    (known,), (unknown,) = (announcement(engine.registry, length, 4, estimated=True) for length in (300, math.inf))
    engine.close()
    assert known.endswith("; 58.00% of the elements in each of 300 steps (if each batch makes one)")
    assert unknown.endswith("in each step of a run of unknown length")
