"""A loss scaler whose decisions all ranks take together: sparse gradients, and what is given back."""

import math
from pathlib import Path

import torch
from torch import nn

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.methods import gradient_dropping, s2_reducer
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.scaling import LossScaling
from tests import laws
from tests.distributed.launch import run_ranks
from tests.distributed.scaled import make_scaler, scales
from tests.run.training import chain


def _train_a_table(rank: int) -> list[tuple[bool, float, bytes]]:
    """In the second step, rank 1 overflows, and rank 0 has no gradient."""
    table = nn.Embedding(16, 4, sparse=True)
    with torch.no_grad():
        table.weight.zero_()
    scaler = make_scaler()
    engine = Engine(s2_reducer(block_density=1.0, sketch_ratio=None), Wire(), scaler=scaler)
    assert engine.scaling is not None
    engine.scaling.take_over(engine.unscale_)
    engine.registry.add_module(table)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        if (rank, step) != (0, 1):
            loss = table(torch.tensor([rank, 2 * step])).sum()
            with engine.guards.backward():
                scaler.scale(loss * math.inf if (rank, step) == (1, 1) else loss).backward()
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            gradient = table.weight.grad
            assert gradient is not None and gradient.is_sparse
            scaler.step(optimizer)
            scaler.update()
        finite = bool(gradient.coalesce().values().isfinite().all())
        found.append((finite, scaler.get_scale(), laws.bits(table.weight.detach())))
    assert table.weight.sum() == -4 * 2 * 2
    engine.close()
    return found


def test_sparse_gradients(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, 2, _train_a_table)
    assert first == second
    finite, scale, weights = zip(*first, strict=True)
    assert finite == (True, False, True)
    assert list(scale) == scales(1, steps=3)
    assert weights[0] == weights[1] != weights[2]


def test_gradients_are_unscaled_once_per_step(wire: Wire) -> None:
    scaler = make_scaler()
    scaling = LossScaling(scaler)
    module = chain()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler.scale(module(torch.ones(1, 2)).sum()).backward()
    before = [parameter.grad.clone() for parameter in module.parameters()]
    assert not scaling.unscale_(optimizer, together=wire)
    assert wire.ledger.handed_bytes() == 4
    after = [parameter.grad.clone() for parameter in module.parameters()]
    for parameter, scaled, unscaled in zip(module.parameters(), before, after, strict=True):
        assert torch.equal(unscaled * scaler.get_scale(), scaled)
        assert torch.equal(parameter.grad, unscaled)
    # The scaler's own step finds that it is done.
    scaler.step(optimizer)
    assert all(torch.equal(parameter.grad, each) for parameter, each in zip(module.parameters(), after, strict=True))


def test_a_rank_may_decide_alone() -> None:
    scaler = make_scaler()
    module = chain()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler.scale(module(torch.ones(1, 2)).sum() * math.inf).backward()
    assert LossScaling(scaler).unscale_(optimizer, together=None)


def test_what_the_scaler_forgets_is_recorded_again(wire: Wire) -> None:
    scaler = make_scaler()
    scaling = LossScaling(scaler)
    first, second = (torch.optim.SGD(chain().parameters(), lr=0.1) for _ in range(2))
    for optimizer in (first, second):
        scaling.unscale_(optimizer, together=wire)
    # `update` after the first one's step forgets the second.
    scaler.step(first)
    scaler.update()
    assert not scaler._found_inf_per_device(second)
    scaling.remind(second, skips=True)
    assert [float(found) for found in scaler._found_inf_per_device(second).values()] == [1]
    scaling.remind(second, skips=False)
    assert [float(found) for found in scaler._found_inf_per_device(second).values()] == [1]


def test_scaler_and_optimizers_are_given_back(wire: Wire) -> None:
    scaler = make_scaler()
    engine = Engine(gradient_dropping(), wire, scaler=scaler)
    assert engine.scaling is not None
    optimizer = torch.optim.SGD(chain().parameters(), lr=0.1)
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    engine.register(optimizer)
    assert optimizer._step_supports_amp_scaling is False  # type: ignore[attr-defined]
    asked = []
    engine.scaling.take_over(lambda each: bool(asked.append(each) or True))  # type: ignore[func-returns-value]
    scaler.unscale_(optimizer)
    assert asked == [optimizer]
    engine.close()
    assert optimizer._step_supports_amp_scaling is True  # type: ignore[attr-defined]
    assert "unscale_" not in vars(scaler)
