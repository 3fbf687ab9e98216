"""On three ranks, each step of ef21 and of demo equals a naive reference written from the papers."""

from pathlib import Path

import numpy as np
import torch

from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.methods import demo, ef21
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import Method
from tests.distributed.launch import run_ranks
from tests.distributed.test_reference import SHAPES, SIZES, Parameters, flat, gradients_of, starting_weights
from tests.reference.demo import DeMoReference
from tests.reference.ef21 import EF21Reference

WORLD_SIZE, STEPS = 3, 30
DECAY = 0.1
METHODS = {
    "plain": (ef21(0.1, momentum_correction=False), 0.0),
    "momentum": (ef21(0.1), 0.9),
    "demo": (demo(k=4, side=8, decay=0.95), 0.0),
}

Seen = list[dict[str, np.ndarray]]


def rate(step: int) -> float:
    return 0.01 if step < 10 else 0.004


def _train(method: Method, momentum: float, rank: int) -> Seen:
    """After each step: the gradient that the optimizer saw, the weights, and what is held."""
    module = Parameters().double()
    for parameter, part in zip(module.parameters(), torch.from_numpy(starting_weights()).split(SIZES)):
        parameter.data.copy_(part.view(parameter.shape))
    engine = Engine(method, Wire())
    engine.registry.add_module(module)
    optimizer = torch.optim.SGD(
        module.parameters(), lr=0.01, momentum=momentum, weight_decay=0.0 if momentum else DECAY
    )
    trained: Seen = []
    for step, gradient in enumerate(gradients_of(rank)[:STEPS]):
        optimizer.param_groups[0]["lr"] = rate(step)
        for parameter, part in zip(module.parameters(), torch.from_numpy(gradient).split(SIZES)):
            parameter.grad = part.double().view(parameter.shape)
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            page = {"seen": flat(parameter.grad for parameter in module.parameters())}
            optimizer.step()
        page["weights"] = flat(parameter.detach() for parameter in module.parameters())
        channel = next(iter(engine.registry.optimizers[0].shares.values())).channel
        page |= {name: flat(vector.parts) for name, vector in channel.memories[-1].held.items()}
        trained.append(page)
    engine.close()
    return trained


def _train_all(rank: int) -> dict[str, Seen]:
    return {name: _train(method, momentum, rank) for name, (method, momentum) in METHODS.items()}


def test_estimates_and_transforms(tmp_path: Path) -> None:
    ranks = run_ranks(tmp_path, WORLD_SIZE, _train_all)
    gradients = [
        [own[step].astype(np.float64) for own in map(gradients_of, range(WORLD_SIZE))] for step in range(STEPS)
    ]
    whole = [len(shape) < 2 for shape in SHAPES]
    compressed = np.repeat(np.logical_not(whole), SIZES)
    for name, momentum in (("plain", None), ("momentum", 0.9)):
        reference = EF21Reference(WORLD_SIZE, SIZES, whole, 0.1, momentum)
        for step in range(STEPS):
            expected = reference.step(gradients[step])
            for rank, trained in enumerate(ranks):
                page = trained[name][step]
                assert page["seen"].tobytes() == ranks[0][name][step]["seen"].tobytes()
                np.testing.assert_allclose(page["seen"], expected, rtol=1e-9, atol=1e-9)
                np.testing.assert_allclose(page["mean"], reference.g[compressed], rtol=1e-9, atol=1e-9)
                np.testing.assert_allclose(page["own"], reference.own[rank][compressed], rtol=1e-9, atol=1e-9)

    demos = DeMoReference(WORLD_SIZE, SHAPES, 4, 8, 0.95)
    ends = np.cumsum(SIZES)[:-1]

    def parts(vector: np.ndarray) -> list[np.ndarray]:
        return [part.reshape(shape) for part, shape in zip(np.split(vector, ends), SHAPES)]

    weights = parts(starting_weights().astype(np.float64))
    for step in range(STEPS):
        weights = demos.step(weights, [parts(own) for own in gradients[step]], rate(step), DECAY)
        for rank, trained in enumerate(ranks):
            page = trained["demo"][step]
            assert page["weights"].tobytes() == ranks[0]["demo"][step]["weights"].tobytes()
            np.testing.assert_allclose(page["weights"], np.concatenate([w.ravel() for w in weights]), atol=1e-6)
            # Ours is in units of the learning rate.
            kept = np.concatenate([kept.ravel() for kept in demos.kept[rank]]) / rate(step)
            np.testing.assert_allclose(page["residual"], kept, rtol=0, atol=1e-6 * np.abs(kept).max())
