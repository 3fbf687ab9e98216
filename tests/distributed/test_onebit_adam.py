"""1-bit Adam: each step equals a naive reference; its first steps are ddp's, and others can go on from it."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.methods import onebit_adam
from lightning_sparsecomm.run.engine import Engine
from tests.distributed.launch import run_ranks
from tests.distributed.test_local_adam import ADAM, BOUNDS, DENSE, SPARSE, settings_at
from tests.distributed.test_reference import SHAPES, SIZES, STEPS, Parameters, flat, gradients_of, starting_weights
from tests.reference.onebit_adam import OneBitAdam

FIRST_STEPS = 10


class Trained(NamedTuple):
    """After each step: a rank's weights, and what it holds by kind, over the weights of two dimensions or more."""

    weights: list[np.ndarray]
    held: list[dict[str, np.ndarray]]


def gradient(rank: int, step: int, tensor: int, late: bool) -> np.ndarray | None:
    """The last weight has gaps, on one rank or on all; and with `late`, no gradient in the first steps."""
    absent = (step % 5 == 2 and rank == 1) or step % 11 == 7 or (late and step < FIRST_STEPS + 3)
    if tensor == SPARSE[-1] and absent:
        return None
    part = np.split(gradients_of(rank)[step], BOUNDS)[tensor]
    # One element never has a gradient in the first steps, and one has tiny ones.
    if tensor == 0:
        part = part * np.where(np.arange(len(part)) == 3, float(step >= FIRST_STEPS), 1.0)
        part[5] *= 1e-4
    return part.astype(np.float64)


def _train(
    rank: int,
    kind: type[torch.optim.Adam],
    method: dict[str, Any],
    options: dict[str, Any],
    scheduled: bool,
    late: bool,
) -> Trained:
    module = Parameters().to(torch.float64)
    for parameter, part in zip(module.parameters(), torch.from_numpy(starting_weights()).split(SIZES)):
        parameter.data.copy_(part.view(parameter.shape))
    engine = Engine(onebit_adam(**method), Wire())
    engine.length = STEPS
    engine.registry.add_module(module)
    optimizer = kind(module.parameters(), **options)
    trained = Trained([], [])
    for step in range(STEPS):
        for index, parameter in enumerate(module.parameters()):
            own = gradient(rank, step, index, late)
            parameter.grad = None if own is None else torch.from_numpy(own).view(parameter.shape)
        optimizer.param_groups[0].update(settings_at(step, options, scheduled))
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            optimizer.step()
        (tracked,) = engine.registry.optimizers
        state = next(iter(tracked.shares.values())).state_dict()
        trained.held.append({kind.split(".", 1)[1]: flat(parts.values()) for kind, parts in state.items()})
        trained.weights.append(flat(p.detach() for p in module.parameters()))
    engine.close()
    return trained


DECAYING = {**ADAM, "weight_decay": 0.1}
CASES = [
    (3, "Adam", {"warmup_steps": FIRST_STEPS}, DECAYING, True, False),
    # On four ranks pieces are filled up.
    (
        4,
        "AdamW",
        {"warmup_steps": FIRST_STEPS, "clip": 5.0},
        {**DECAYING, "maximize": True},
        False,
        True,
    ),
    # 15% of 50 steps are 8.
    pytest.param(3, "Adam", {"floor": 0.3}, {**ADAM, "betas": (0.0, 0.99)}, False, False, marks=pytest.mark.slow),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("world_size", "kind", "method", "options", "scheduled", "late"), CASES)
def test_step_by_step(
    tmp_path: Path,
    world_size: int,
    kind: str,
    method: dict[str, Any],
    options: dict[str, Any],
    scheduled: bool,
    late: bool,
) -> None:
    ranks = run_ranks(tmp_path, world_size, _train, getattr(torch.optim, kind), method, options, scheduled, late)
    first_steps, floor = method.get("warmup_steps", 8), method.get("floor", 0.01)
    start = np.split(starting_weights(), BOUNDS)
    reference = OneBitAdam(start, DENSE, world_size, first_steps, floor, method.get("clip"))
    for step in range(STEPS):
        gradients = [[gradient(rank, step, t, late) for t in range(len(SHAPES))] for rank in range(world_size)]
        reference.step(gradients, **settings_at(step, options, scheduled), decoupled=kind == "AdamW")
        for trained in ranks:
            assert trained.weights[step].tobytes() == ranks[0].weights[step].tobytes()
            np.testing.assert_allclose(trained.weights[step], np.concatenate(reference.weights), rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(
                trained.held[step]["SharedAdam.exp_avg"],
                np.concatenate([reference.first[t] for t in SPARSE]),
                rtol=1e-6,
                atol=1e-6,
            )
        for rank, trained in enumerate(ranks):
            # A server's error is of a mean, and it is kept in the residual of its rank.
            expected = []
            for t in SPARSE:
                length = -(-SIZES[t] // world_size)
                error = reference.worker_errors[rank][t].copy()
                own = slice(rank * length, (rank + 1) * length)
                error[own] = world_size * reference.server_errors[t][own]
                expected.append(error)
            np.testing.assert_allclose(
                trained.held[step]["ErrorFeedback"], np.concatenate(expected), rtol=1e-6, atol=1e-6
            )
