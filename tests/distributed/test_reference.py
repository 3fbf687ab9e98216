"""Step by step on three ranks, a method equals its naive reference, which is written from the paper."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_sparsecomm.methods import gradient_dropping
from lightning_sparsecomm.synchronizer import Synchronizer
from lightning_sparsecomm.wire import Wire
from tests.distributed.launch import run_ranks
from tests.reference.gradient_dropping import GradientDropping

SHAPES = [(30, 7), (30,), (5, 3, 2), (1,)]
SIZES = [210, 30, 30, 1]
STEPS, WORLD_SIZE = 50, 3


class Parameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])


def gradients_of(rank: int) -> list[np.ndarray]:
    """A rank's own gradients, of very different scales, at each step."""
    random = np.random.default_rng(rank)
    scales = np.repeat([1.0, 0.01, 30.0, 0.1], SIZES)
    return [(random.standard_normal(sum(SIZES)) * scales).astype(np.float32) for _ in range(STEPS)]


def _train(rank: int, options: dict[str, Any]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    module = Parameters()
    synchronizer = Synchronizer(gradient_dropping(**options), Wire())
    synchronizer.add_module(module)
    synchronizer.check()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    shared, residuals = [], []
    for gradient in gradients_of(rank):
        for parameter, part in zip(module.parameters(), torch.from_numpy(gradient).split(SIZES)):
            parameter.grad = part.clone().view(parameter.shape)
        with synchronizer.stepping(optimizer):
            synchronizer.synchronize(optimizer)
        shared.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).numpy())
        state = synchronizer.syncs[0].state_dict()[0][0]
        residuals.append(torch.cat([tensor.flatten() for tensor in state.values()]).numpy().copy())
    return shared, residuals


@pytest.mark.parametrize(
    "options",
    [
        {"density": 0.05},
        {"density": 0.05, "scope": "tensor"},
        {"density": 0.2, "values": "float16"},
        {"density": 0.001},
        {"density": 1.0},
    ],
)
def test_gradient_dropping(tmp_path: Path, options: dict[str, Any]) -> None:
    reference = GradientDropping(
        WORLD_SIZE, SIZES, options["density"], options.get("scope") != "tensor", options.get("values") == "float16"
    )
    ranks = run_ranks(tmp_path, WORLD_SIZE, _train, options)
    all_gradients = [gradients_of(rank) for rank in range(WORLD_SIZE)]
    for step in range(STEPS):
        expected = reference.step([gradients[step] for gradients in all_gradients])
        for rank, (shared, residuals) in enumerate(ranks):
            np.testing.assert_allclose(shared[step], expected, rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(residuals[step], reference.residuals[rank], rtol=1e-6, atol=1e-6)
