"""On three ranks, each step of a method equals a naive reference written from the paper."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.methods import dgc, gradient_dropping
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import Method
from tests.distributed.launch import run_ranks
from tests.reference.dgc import DeepGradientCompression
from tests.reference.gradient_dropping import GradientDropping

SHAPES = [(30, 7), (30,), (5, 3, 2), (1,)]
SIZES = [210, 30, 30, 1]
STEPS, WORLD_SIZE = 50, 3


class Parameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])


def starting_weights() -> np.ndarray:
    return np.random.default_rng(99).standard_normal(sum(SIZES)).astype(np.float32)


def gradients_of(rank: int) -> list[np.ndarray]:
    """A rank's own gradients in each step. Their scales differ widely."""
    random = np.random.default_rng(rank)
    scales = np.repeat([1.0, 0.01, 30.0, 0.1], SIZES)
    return [(random.standard_normal(sum(SIZES)) * scales).astype(np.float32) for _ in range(STEPS)]


class Trained(NamedTuple):
    """After each step: the gradient that a rank's optimizer saw, its memories, and its weights."""

    seen: list[np.ndarray]
    memories: list[list[np.ndarray]]
    weights: list[np.ndarray]


def _train(
    rank: int, method: Method, options: dict[str, Any], momenta: list[float] | None = None, adam: bool = False
) -> Trained:
    module = Parameters()
    start = torch.from_numpy(starting_weights())
    for parameter, part in zip(module.parameters(), start.split(SIZES)):
        parameter.data.copy_(part.view(parameter.shape))
    engine = Engine(method, Wire())
    engine.registry.add_module(module)
    engine.registry.check()
    optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(module.parameters(), **options)
    trained = Trained([], [], [])
    for step, gradient in enumerate(gradients_of(rank)):
        for parameter, part in zip(module.parameters(), torch.from_numpy(gradient).split(SIZES)):
            parameter.grad = part.clone().view(parameter.shape)
        if momenta is not None:
            optimizer.param_groups[0]["momentum"] = momenta[step]
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            trained.seen.append(flat(p.grad for p in module.parameters()))
            optimizer.step()
        (tracked,) = engine.registry.optimizers
        # The sync that comes first is the compressed one.
        states = next(iter(tracked.shares.values())).state_dict().items()
        # Units of the learning rate, and what the exchange has noted, are no memories.
        kinds = [(kind, state) for kind, state in states if not kind.endswith((".unit", ".Sparse"))]
        trained.memories.append([flat(state.values()) for _, state in kinds])
        trained.weights.append(flat(p.detach() for p in module.parameters()))
    engine.close()
    return trained


def flat(tensors: Iterable[torch.Tensor | None]) -> np.ndarray:
    return torch.cat([tensor.flatten() for tensor in tensors if tensor is not None]).numpy().copy()


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "options",
    [
        {"density": 0.05},
        {"density": 0.05, "scope": "tensor"},
        {"density": 0.2, "values": "float16"},
        {"density": 0.001},
        pytest.param({"density": 1.0}, marks=pytest.mark.slow),
        pytest.param({"density": 0.05, "local": "sum"}, marks=pytest.mark.slow),
        {"density": 0.05, "local": "partial"},
        {"density": 0.05, "local": "error"},
        {"density": 0.1, "local": "partial", "scope": "tensor", "values": "float16"},
    ],
)
def test_gradient_dropping(tmp_path: Path, options: dict[str, Any]) -> None:
    reference = GradientDropping(
        WORLD_SIZE,
        SIZES,
        options["density"],
        options.get("scope") != "tensor",
        options.get("values") == "float16",
        options.get("local", "none"),
    )
    ranks = run_ranks(tmp_path, WORLD_SIZE, _train, gradient_dropping(**options), {"lr": 0.1})
    all_gradients = [gradients_of(rank) for rank in range(WORLD_SIZE)]
    for step in range(STEPS):
        expected = reference.step([gradients[step] for gradients in all_gradients])
        for rank, trained in enumerate(ranks):
            np.testing.assert_allclose(trained.seen[step], expected[rank], rtol=1e-6, atol=2e-6)
            for residual in trained.memories[step]:
                np.testing.assert_allclose(residual, reference.residuals[rank], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("local", ["partial", "error"])
@pytest.mark.parametrize("density", [0.05, 1.0])
def test_a_rank_alone_keeps_its_own_gradient(tmp_path: Path, local: str, density: float) -> None:
    method = gradient_dropping(density, local=local)
    (trained,) = run_ranks(tmp_path, 1, _train, method, {"lr": 0.1})
    for seen, gradient in zip(trained.seen, gradients_of(0), strict=True):
        np.testing.assert_array_equal(seen, gradient)


@pytest.mark.few(3)
@pytest.mark.parametrize("local", ["sum", "partial", "error"])
@pytest.mark.parametrize("state", [False, True])
def test_replicas_are_averaged_with_adam(tmp_path: Path, local: str, state: bool) -> None:
    """Against Adam written out. Every 7 steps weights are averaged, and with `state` the optimizer's state too."""
    method = gradient_dropping(0.05, local=local, average_every=7, average_optimizer_state=state)
    ranks = run_ranks(tmp_path, WORLD_SIZE, _train, method, {"lr": 0.01}, None, True)
    reference = GradientDropping(WORLD_SIZE, SIZES, 0.05, True, False, local)
    weights = [starting_weights().astype(np.float64) for _ in range(WORLD_SIZE)]
    first, second = ([np.zeros(sum(SIZES)) for _ in range(WORLD_SIZE)] for _ in range(2))
    all_gradients = [gradients_of(rank) for rank in range(WORLD_SIZE)]
    for step in range(STEPS):
        expected = reference.step([gradients[step] for gradients in all_gradients])
        for rank, c in enumerate(expected):
            first[rank] = 0.9 * first[rank] + 0.1 * c
            second[rank] = 0.999 * second[rank] + 0.001 * c.astype(np.float64) ** 2
            corrected = first[rank] / (1 - 0.9 ** (step + 1))
            weights[rank] -= 0.01 * corrected / (np.sqrt(second[rank] / (1 - 0.999 ** (step + 1))) + 1e-8)
        if (step + 1) % 7 == 0:
            for replicas in (weights, first, second) if state else (weights,):
                replicas[:] = [np.mean(replicas, axis=0) for _ in range(WORLD_SIZE)]
        apart = not np.array_equal(ranks[0].weights[step], ranks[1].weights[step])
        assert apart == ((step + 1) % 7 != 0)
        for rank, trained in enumerate(ranks):
            np.testing.assert_allclose(trained.weights[step], weights[rank], rtol=1e-4, atol=1e-4)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("method", "sgd", "scheduled"),
    [
        ({}, {"momentum": 0.9}, False),
        pytest.param({}, {"momentum": 0.0}, False, marks=pytest.mark.slow),
        ({"momentum_masking": True}, {"momentum": 0.9, "nesterov": True}, False),
        pytest.param({"clip": 3.0}, {"momentum": 0.9}, False, marks=pytest.mark.slow),
        pytest.param({}, {"momentum": 0.9, "weight_decay": 0.05}, False, marks=pytest.mark.slow),
        ({}, {"momentum": 0.0, "weight_decay": 0.05}, False),
        ({}, {"momentum": 0.9, "dampening": 0.4}, False),
        pytest.param({"momentum_masking": True}, {"momentum": 0.9}, False, marks=pytest.mark.slow),
        pytest.param(
            {"density": 1.0}, {"momentum": 0.8, "nesterov": True, "weight_decay": 0.05}, False, marks=pytest.mark.slow
        ),
        ({"clip": 5.0, "density": 0.3}, {"momentum": 0.7, "nesterov": True, "weight_decay": 0.01}, False),
        ({}, {"momentum": 0.9}, True),
        pytest.param({}, {"momentum": 0.9, "nesterov": True}, True, marks=pytest.mark.slow),
        ({"clip": 3.0, "momentum_masking": True}, {"momentum": 0.9, "weight_decay": 0.05, "dampening": 0.4}, True),
        ({"density": 1.0}, {"momentum": 0.8, "nesterov": True, "weight_decay": 0.05}, True),
    ],
)
def test_dgc(tmp_path: Path, method: dict[str, Any], sgd: dict[str, Any], scheduled: bool) -> None:
    density = method.get("density", 0.05)
    momenta = [
        sgd["momentum"] * (1 - 0.5 * (step % 10) / 10) if scheduled else sgd["momentum"] for step in range(STEPS)
    ]
    recipe = dgc(**{"density": density, "warmup_steps": 0, **method})
    ranks = run_ranks(tmp_path, WORLD_SIZE, _train, recipe, {"lr": 0.1, **sgd}, momenta)
    bounds = np.cumsum(SIZES)[:-1]
    reference = DeepGradientCompression(
        np.split(starting_weights(), bounds),
        [len(shape) < 2 for shape in SHAPES],
        WORLD_SIZE,
        density,
        method.get("momentum_masking", False),
        method.get("clip"),
    )
    all_gradients = [gradients_of(rank) for rank in range(WORLD_SIZE)]
    sparse = [i for i, shape in enumerate(SHAPES) if len(shape) > 1]
    for step in range(STEPS):
        gradients = [np.split(own[step], bounds) for own in all_gradients]
        reference.step(gradients, 0.1, **{**sgd, "momentum": momenta[step]})
        for rank, trained in enumerate(ranks):
            np.testing.assert_allclose(trained.weights[step], np.concatenate(reference.weights), rtol=1e-5, atol=1e-4)
            *velocity, residual = trained.memories[step]
            expected = np.concatenate([reference.residuals[rank][i] for i in sparse])
            np.testing.assert_allclose(residual, expected, rtol=1e-5, atol=2e-5)
            if velocity:
                expected = np.concatenate([reference.velocities[rank][i] for i in sparse])
                np.testing.assert_allclose(velocity[0], expected, rtol=1e-5, atol=2e-5)
