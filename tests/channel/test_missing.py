"""Gradients that a rank lacks, under memories that carry something: they count as zero where another rank has one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.ledger import GRADIENTS
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.channel import Channel, ErrorFeedback, LocalAdam, MomentumCorrection, StepSettings
from lightning_sparsecomm.channel.contribution import AdamRule, MomentumRule
from lightning_sparsecomm.codecs import SparseCodec, TopK
from lightning_sparsecomm.exchange import BlockReduce, DenseAllReduce, Exchange, Gather, SketchedTopK
from tests.distributed.launch import run_ranks

LAYOUT = Layout([("always", (30,)), ("by_turns", (4, 5))])
# Which ranks have a gradient of the second tensor: no rank in two steps in a row, and in one by itself.
WITH_GRADIENT = [(0, 1), (0,), (1,), (), (), (1,), (0,), (), (0, 1)]
RULES = (MomentumRule(0.9, 0.1, True),) * 2
SETTINGS = {
    "momentum": StepSettings(momentum=RULES, rates=(0.1, 0.1)),
    "adam": StepSettings(adam=(AdamRule(),) * 2, rates=(0.1, 0.1)),
}


def _train(rank: int, memory: str, exchange: Exchange) -> dict[str, Any]:
    wire = Wire()
    first = MomentumCorrection() if memory == "momentum" else LocalAdam()
    channel = Channel(exchange, [first, ErrorFeedback()])
    channel.bind(LAYOUT, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(rank)
    shared, kept, calls = [], True, []
    for step, ranks in enumerate(WITH_GRADIENT):
        parts: list[Any] = [torch.randn(30, generator=generator), torch.randn(4, 5, generator=generator)]
        gradients = [parts[0], parts[1] if rank in ranks else None]
        held = [vector.parts[1] for memory in channel.memories for vector in memory.held.values()]
        before = [part.clone() for part in held]
        context = Round(LAYOUT, step, rank=rank, world_size=wire.world_size)
        exchanged = channel.reduce(gradients, context, wire, SETTINGS[memory])
        assert exchanged.present == [True, bool(ranks)]
        dense = [
            each if isinstance(each, torch.Tensor) else each.dense() for each in (exchanged.shared, exchanged.sent)
        ]
        if not ranks:
            kept &= all(map(torch.equal, held, before)) and not any(each[30:].any() for each in dense)
        shared.append(dense[0].numpy().copy())
        calls.append(sum(each.calls for each in wire.ledger.rows[GRADIENTS].values()))
    return {"shared": shared, "kept": kept, "calls": calls}


def _momentum_of_the_mean(world_size: int) -> list[torch.Tensor]:
    """torch.optim.SGD with the mean gradient, of which that of a rank without one is zero; no step without any."""
    generators = [torch.Generator().manual_seed(rank) for rank in range(world_size)]
    weights = [torch.zeros(30, requires_grad=True), torch.zeros(4, 5, requires_grad=True)]
    optimizer = torch.optim.SGD(weights, lr=1.0, momentum=0.9, dampening=0.1, nesterov=False)
    moves = []
    for ranks in WITH_GRADIENT:
        grads = [[torch.randn(30, generator=g), torch.randn(4, 5, generator=g)] for g in generators]
        weights[0].grad = sum(each[0] for each in grads) / world_size
        there = [each[1] for rank, each in enumerate(grads) if rank in ranks]
        weights[1].grad = sum(there) / world_size if there else None
        before = [weight.detach().clone() for weight in weights]
        optimizer.step()
        moves.append(torch.cat([(old - new.detach()).flatten() for old, new in zip(before, weights)]))
    return moves


def test_at_full_density_momentum_is_that_of_the_mean_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "momentum", StepSettings(momentum=(MomentumRule(0.9, 0.1),) * 2, rates=(0.1, 0.1)))
    for result in run_ranks(tmp_path, 2, _train, "momentum", DenseAllReduce()):
        for ours, theirs in zip(result["shared"], _momentum_of_the_mean(2), strict=True):
            torch.testing.assert_close(torch.from_numpy(ours), theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("memory", SETTINGS)
@pytest.mark.parametrize(
    "exchange",
    [
        Gather(SparseCodec(TopK(0.1))),
        Gather(SparseCodec(TopK(1.0))),
        SketchedTopK(0.1, columns=40, always_sketch=True),
        BlockReduce(),
        DenseAllReduce(),
    ],
)
def test_what_no_rank_has_changes_nothing(tmp_path: Path, memory: str, exchange: Exchange) -> None:
    results = run_ranks(tmp_path, 2, _train, memory, exchange)
    assert all(result["kept"] for result in results)
    for mine, other in zip(results[0]["shared"], results[1]["shared"], strict=True):
        assert (mine == other).all()


def test_ranks_agree_beforehand_only_after_a_step_in_which_no_rank_had_one(tmp_path: Path) -> None:
    for result in run_ranks(tmp_path, 2, _train, "momentum", DenseAllReduce()):
        calls = [after - before for before, after in zip([0, *result["calls"]], result["calls"])]
        assert calls == [1, 1, 1, 1, 2, 2, 1, 1, 2]


def _resume(rank: int) -> list[int]:
    wire = Wire()
    first, second = (Channel(DenseAllReduce(), [MomentumCorrection(), ErrorFeedback()]) for _ in range(2))
    for channel in (first, second):
        channel.bind(LAYOUT, torch.float32, torch.device("cpu"))
    calls = []
    for step, channel in enumerate((first, first, second)):
        if channel is second:
            channel.load_state_dict(first.state_dict(), [segment.name for segment in LAYOUT.segments])
        context = Round(LAYOUT, step, rank=rank, world_size=wire.world_size)
        channel.reduce([torch.ones(30), None], context, wire, SETTINGS["momentum"])
        calls.append(sum(each.calls for each in wire.ledger.rows[GRADIENTS].values()))
    return calls


def test_a_resumed_channel_agrees_beforehand_too(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, 2, _resume) == [[1, 3, 5]] * 2
