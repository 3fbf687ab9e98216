"""Parts of loss scaling that need no Trainer: what a step that is skipped leaves in `.grad`, and sparse gradients."""

import math
from pathlib import Path

import torch
from torch import nn

from lightning_sparsecomm.gradients import NamedParameters, make_nonfinite_
from lightning_sparsecomm.methods import s2_reducer
from lightning_sparsecomm.synchronizer import Synchronizer
from lightning_sparsecomm.wire import Wire
from tests import laws
from tests.distributed.launch import run_ranks
from tests.distributed.scaled import make_scaler, scales


def named(*parameters: nn.Parameter) -> NamedParameters:
    return [(str(index), parameter) for index, parameter in enumerate(parameters)]


def test_one_element_is_made_infinite_in_place() -> None:
    empty, frozen = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(2), requires_grad=False)
    first, second = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.tensor(1.0))
    make_nonfinite_([])
    make_nonfinite_(named(empty, frozen))
    assert empty.grad is None and frozen.grad is None
    # Where there is no gradient at all, one is made.
    make_nonfinite_(named(empty, frozen, first, second))
    assert first.grad is not None and first.grad.flatten().tolist() == [math.inf, 0, 0, 0, 0, 0]
    assert frozen.grad is None and second.grad is None
    first.grad, second.grad = None, torch.tensor(2.0)
    held = second.grad
    make_nonfinite_(named(empty, frozen, first, second))
    assert first.grad is None
    assert second.grad is held and held == math.inf


def _train_a_table(rank: int) -> list[tuple[bool, float, bytes]]:
    """In the second step, rank 1 overflows, and rank 0 has no gradient."""
    table = nn.Embedding(16, 4, sparse=True)
    with torch.no_grad():
        table.weight.zero_()
    scaler = make_scaler()
    synchronizer = Synchronizer(s2_reducer(block_density=1.0, sketch_ratio=None), Wire(), scaler=scaler)
    assert synchronizer.scaling is not None
    synchronizer.scaling.take_over(synchronizer.unscale_)
    synchronizer.add_module(table)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        if (rank, step) != (0, 1):
            loss = table(torch.tensor([rank, 2 * step])).sum()
            with synchronizer.backward():
                scaler.scale(loss * math.inf if (rank, step) == (1, 1) else loss).backward()
        with synchronizer.stepping(optimizer):
            synchronizer.synchronize(optimizer)
            gradient = table.weight.grad
            assert gradient is not None and gradient.is_sparse
            scaler.step(optimizer)
            scaler.update()
        finite = bool(gradient.coalesce().values().isfinite().all())
        found.append((finite, scaler.get_scale(), laws.bits(table.weight.detach())))
    assert table.weight.sum() == -4 * 2 * 2
    synchronizer.close()
    return found


def test_sparse_gradients(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, 2, _train_a_table)
    assert first == second
    finite, scale, weights = zip(*first, strict=True)
    assert finite == (True, False, True)
    assert list(scale) == scales(1, steps=3)
    assert weights[0] == weights[1] != weights[2]
