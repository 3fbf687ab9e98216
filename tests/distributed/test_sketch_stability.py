"""A sketch's error does not build up unless it is fed back. Then it grows from step to step."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from lightning_sparsecomm.basis.layout import Vector
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.channel import Channel, ErrorFeedback
from lightning_sparsecomm.codecs import TopBlocks
from lightning_sparsecomm.exchange import BlockReduce, Exchanged
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import GradientSync, Method
from tests.distributed.launch import run_ranks

STEPS = 300


class FeedsBack(BlockReduce):
    """The wrong way: memories forget the estimate, and so keep the sketch's error."""

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        exchanged = super().exchange(x, context, wire)
        return exchanged._replace(sent=exchanged.shared)


class Course(NamedTuple):
    """In each step, the distance from the minimum and the norm of the residual."""

    distance: list[float]
    residual: list[float]


def _descend(rank: int, exchange: BlockReduce) -> Course:
    """Noisy gradient descent on a quadratic of a matrix and of a table, of which each step touches few rows."""
    generator = torch.Generator().manual_seed(rank)
    module = nn.Module()
    module.weight = nn.Parameter(torch.full((16, 40), 1.0))
    module.table = nn.Parameter(torch.full((100, 16), 1.0))
    engine = Engine(Method([GradientSync(Channel(exchange, [ErrorFeedback()]))]), Wire())
    engine.registry.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    course = Course([], [])
    for _ in range(STEPS):
        touched = torch.zeros(100, 1)
        touched[torch.randperm(100, generator=generator)[:20]] = 1
        for parameter, mask in ((module.weight, 1.0), (module.table, touched)):
            noise = 0.1 * torch.randn(parameter.shape, generator=generator)
            parameter.grad = mask * (parameter.detach() + noise)
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            optimizer.step()
        course.distance.append(float(torch.cat([p.detach().flatten() for p in module.parameters()]).norm()))
        course.residual.append(engine.residual_norm())
        if course.residual[-1] > 1e6:
            break
    engine.close()
    return course


def _all(rank: int, exchanges: list[BlockReduce]) -> list[Course]:
    return [_descend(rank, exchange) for exchange in exchanges]


@pytest.mark.slow
def test_only_what_is_fed_back_grows(tmp_path: Path) -> None:
    blocks = TopBlocks(0.25, 40)
    sound = [BlockReduce(blocks, ratio, always_sketch=True) for ratio in (2.0, 1.0, 0.5)]
    wrong = FeedsBack(blocks, 0.5, always_sketch=True)
    courses, others = run_ranks(tmp_path, 2, _all, [BlockReduce(blocks), *sound, wrong])
    exact, *sketched, fed_back = courses
    start = (16 * 40 + 100 * 16) ** 0.5
    assert exact.distance[-1] < 0.1 * start
    for course, other in zip(sketched, others[1:]):
        assert course.distance == other.distance
        assert len(course.distance) == STEPS
        assert course.distance[-1] < 0.1 * start
        assert max(course.distance) < 1.5 * start
        assert max(course.residual) < 2 * max(exact.residual)
    assert max(fed_back.residual) > 1000 * max(exact.residual)
