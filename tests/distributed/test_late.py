"""Exchanges of gradients in flight, step by step against the paper's method, on three ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.methods import dgc
from lightning_sparsecomm.run.engine import Engine
from tests.distributed.launch import run_ranks
from tests.distributed.test_reference import (
    SHAPES,
    SIZES,
    STEPS,
    WORLD_SIZE,
    Parameters,
    flat,
    gradients_of,
    starting_weights,
)
from tests.reference.dgc import DeepGradientCompression

Vectors = list[np.ndarray]


def _train(rank: int, options: dict[str, Any], sgd: dict[str, Any]) -> list[Vectors]:
    """After each step: this rank's weights, and the shared ones; at last those that training ends with."""
    module = Parameters()
    for parameter, part in zip(module.parameters(), torch.from_numpy(starting_weights()).split(SIZES)):
        parameter.data.copy_(part.view(parameter.shape))
    engine = Engine(dgc(0.05, warmup_steps=0, delay=1, **options), Wire())
    engine.registry.add_module(module)
    engine.registry.check()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, **sgd)
    trained = []
    for gradient in gradients_of(rank):
        for parameter, part in zip(module.parameters(), torch.from_numpy(gradient).split(SIZES)):
            parameter.grad = part.clone().view(parameter.shape)
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            optimizer.step()
        own = flat(parameter.detach() for parameter in module.parameters())
        engine.replicas.view_shared()
        shared = flat(parameter.detach() for parameter in module.parameters())
        engine.replicas.view_own()
        assert own.tobytes() == flat(parameter.detach() for parameter in module.parameters()).tobytes()
        trained.append([own, shared])
    engine.settle()
    trained.append([flat(parameter.detach() for parameter in module.parameters())])
    engine.close()
    return trained


@pytest.mark.parametrize(
    ("options", "sgd"),
    [
        ({}, {"momentum": 0.9}),
        ({"clip": 3.0}, {"momentum": 0.9, "nesterov": True}),
        pytest.param({}, {"momentum": 0.0}, marks=pytest.mark.slow),
        pytest.param({"momentum_masking": True}, {"momentum": 0.9}, marks=pytest.mark.slow),
        pytest.param({}, {"momentum": 0.9, "dampening": 0.4}, marks=pytest.mark.slow),
    ],
)
def test_step_by_step(tmp_path: Path, options: dict[str, Any], sgd: dict[str, Any]) -> None:
    """The shared weights are the reference's, a step later. A rank's own are ahead of them by its own velocity."""
    ranks = run_ranks(tmp_path, WORLD_SIZE, _train, options, sgd)
    bounds = np.cumsum(SIZES)[:-1]
    dense = [len(shape) < 2 for shape in SHAPES]
    reference = DeepGradientCompression(
        np.split(starting_weights(), bounds),
        dense,
        WORLD_SIZE,
        0.05,
        options.get("momentum_masking", False),
        options.get("clip"),
    )
    # What a rank's own gradient would do alone, whatever is sent.
    alone = [
        DeepGradientCompression(np.split(np.zeros_like(starting_weights()), bounds), [True] * len(SHAPES), 1, 1.0)
        for _ in range(WORLD_SIZE)
    ]
    all_gradients = [gradients_of(rank) for rank in range(WORLD_SIZE)]
    for step in range(STEPS):
        before = np.concatenate(reference.weights)
        gradients = [np.split(own[step], bounds) for own in all_gradients]
        reference.step(gradients, 0.1, **sgd)
        for rank, trained in enumerate(ranks):
            own, shared = trained[step]
            assert shared.tobytes() == ranks[0][step][1].tobytes()
            np.testing.assert_allclose(shared, before, rtol=1e-5, atol=1e-4)
            if options.get("momentum_masking"):
                # The velocity of the step, before what it has sent was masked, is not in the reference.
                continue
            position = np.concatenate(alone[rank].weights)
            clipped = [_clipped(part, options.get("clip")) for part in [all_gradients[rank][step]]]
            alone[rank].step([np.split(part, bounds) for part in clipped], 0.1, **sgd)
            ahead = np.concatenate(alone[rank].weights) - position
            np.testing.assert_allclose(own - shared, ahead, rtol=1e-4, atol=2e-4)
    # What is in flight, and what waits in residuals, is delivered.
    waiting = np.zeros_like(starting_weights())
    for residuals in reference.residuals:
        waiting += np.concatenate(residuals) / WORLD_SIZE
    for trained in ranks:
        np.testing.assert_allclose(
            trained[-1][0], np.concatenate(reference.weights) - 0.1 * waiting, rtol=1e-5, atol=2e-4
        )
        assert trained[-1][0].tobytes() == ranks[0][-1][0].tobytes()


def _clipped(gradient: np.ndarray, clip: float | None) -> np.ndarray:
    if clip is None:
        return gradient
    norm = np.sqrt(np.sum(gradient.astype(np.float64) ** 2))
    return gradient * np.float32(min(1.0, clip * np.sqrt(WORLD_SIZE) / norm))
