"""On three ranks, each step of the systems that papers compare with equals a naive reference, or the exact mean."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_sparsecomm import IterateAverage
from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.exchange import ClientMean
from lightning_sparsecomm.methods import (
    federated_averaging,
    omnireduce,
    parallax,
    post_local_sgd,
    sketched_sgd,
    sparcml,
)
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import Method
from tests.distributed.launch import run_ranks
from tests.distributed.test_low_rank_reference import MATRICES
from tests.distributed.test_reference import SHAPES, SIZES, STEPS, Parameters, flat, gradients_of, starting_weights
from tests.distributed.test_sketch_reference import Sketch
from tests.reference.compared import FederatedAveraging, SketchedAlgorithm2, largest_of_buckets
from tests.reference.quantizers import WithErrorFeedback

N = int(MATRICES.sum())
OF_MATRICES = [size for size, shape in zip(SIZES, SHAPES) if len(shape) > 1]


def rate_of(step: int) -> float:
    return 0.1 * (0.55 + 0.45 * float(np.cos(step / 9)))


def mostly_zero(rank: int, step: int) -> np.ndarray:
    """Gradients of which a quarter of the elements is not zero, in runs."""
    gradient = gradients_of(rank)[step].astype(np.float64)
    return gradient * ((np.arange(len(gradient)) // 7 + rank + step) % 4 == 0)


def dense(rank: int, step: int) -> np.ndarray:
    return gradients_of(rank)[step].astype(np.float64)


def _train(
    rank: int,
    method: Method,
    gradient: Callable[[int, int], np.ndarray],
    momentum: float = 0.0,
    follows: bool = False,
    every_step: bool = True,
) -> dict[str, list[np.ndarray]]:
    """After each step: the weights, the gradient that the optimizer saw, and the residual; and the averaged iterate."""
    module = Parameters().to(torch.float64)
    for parameter, part in zip(module.parameters(), torch.from_numpy(starting_weights()).split(SIZES)):
        parameter.data.copy_(part.view(parameter.shape))
    engine = Engine(method, Wire())
    engine.registry.add_module(module)
    engine.registry.check()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=momentum)
    found: dict[str, list[np.ndarray]] = {"weights": [], "seen": [], "residual": [], "average": []}
    average, average_of = torch.zeros(0), IterateAverage(3.0)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rate_of(step) if follows else 0.1
        for parameter, part in zip(module.parameters(), torch.from_numpy(gradient(rank, step)).split(SIZES)):
            parameter.grad = part.clone().view(parameter.shape)
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            found["seen"].append(flat(parameter.grad for parameter in module.parameters()))
            optimizer.step()
        weights = torch.cat([parameter.detach().view(-1) for parameter in module.parameters()])
        average = average_of(average, weights, step) if step else weights.clone()
        found["weights"].append(weights.numpy().copy())
        share = next(iter(engine.registry.optimizers[0].shares.values()))
        channels = [unit.channel for unit in getattr(share, "fragments", [share])]
        found["residual"] += [flat(each.held["residual"].parts) for channel in channels for each in channel.residuals]
    found["average"] = [average.numpy()]
    if every_step:
        engine.settle()
    engine.close()
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("method", "gradient"),
    [
        (omnireduce(block_size=5), mostly_zero),
        (parallax(), dense),
        (parallax(tables=["parts.0", "parts.2"]), mostly_zero),
    ],
    ids=["omnireduce", "parallax", "parallax, tables"],
)
def test_what_is_exact_is_the_mean(tmp_path: Path, method: Method, gradient: Any) -> None:
    ranks = run_ranks(tmp_path, 3, _train, method, gradient)
    for step in range(STEPS):
        expected = np.mean([gradient(rank, step) for rank in range(3)], axis=0)
        for trained in ranks:
            assert trained["seen"][step].tobytes() == ranks[0]["seen"][step].tobytes()
            np.testing.assert_allclose(trained["seen"][step], expected, rtol=1e-12, atol=1e-14)


def test_sparcml(tmp_path: Path) -> None:
    method = sparcml(density=0.1, bucket=50, follow_rate=False)
    ranks = run_ranks(tmp_path, 3, _train, method, dense)
    reference = WithErrorFeedback(3, N, lambda x: largest_of_buckets(x, OF_MATRICES, 0.1, 50))
    for step in range(STEPS):
        gradients = [dense(rank, step) for rank in range(3)]
        expected = np.mean(gradients, axis=0)
        expected[MATRICES] = reference.step([gradient[MATRICES] for gradient in gradients])
        for trained, residual in zip(ranks, reference.residuals):
            np.testing.assert_allclose(trained["seen"][step], expected, rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(trained["residual"][step], residual, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("columns", [pytest.param(40, marks=pytest.mark.slow), 400])
def test_algorithm_2_of_sketched_sgd(tmp_path: Path, columns: int) -> None:
    """With a learning rate that changes; the averaged iterate too."""
    method = sketched_sgd(0.1, rows=3, columns=columns, momentum_correction=False, recovery="heavymix")
    ranks = run_ranks(tmp_path, 3, _train, method, dense, 0.0, True, False)
    reference = SketchedAlgorithm2(3, starting_weights()[MATRICES], round(0.1 * N), 3.0)
    for step in range(STEPS):
        sketch = Sketch(step, 3, columns, N)
        order = torch.randperm(N, generator=Round(Layout([]), step).shared_generator()).tolist()
        gradients = [dense(rank, step)[MATRICES] for rank in range(3)]
        reference.step(gradients, rate_of(step), sketch.insert, sketch.query, order, sketch.seed)
        for trained, error in zip(ranks, reference.errors):
            np.testing.assert_allclose(trained["weights"][step][MATRICES], reference.weights, rtol=1e-6, atol=1e-6)
            # Held in units of the learning rate.
            np.testing.assert_allclose(trained["residual"][step] * rate_of(step), error, rtol=1e-6, atol=1e-6)
    expected = reference.average / reference.total
    np.testing.assert_allclose(ranks[0]["average"][0][MATRICES], expected, rtol=1e-6, atol=1e-6)


def test_federated_averaging_with_a_fraction_and_weights(tmp_path: Path) -> None:
    samples, every = [600, 200, 400], 4
    ranks = run_ranks(tmp_path, 3, _train, federated_averaging(every, fraction=0.67, weights=samples), dense)
    reference = FederatedAveraging(starting_weights(), samples)
    local = [reference.shared.copy() for _ in range(3)]
    rounds = set()
    for step in range(STEPS):
        local = [own - 0.1 * dense(rank, step) for rank, own in enumerate(local)]
        if step % every == every - 1:
            clients = ClientMean(0.67).ranks(Round(Layout([]), step, world_size=3))
            rounds.add(tuple(clients))
            local = [reference.round(local, clients).copy() for _ in range(3)]
        for trained, own in zip(ranks, local):
            np.testing.assert_allclose(trained["weights"][step], own, rtol=1e-9, atol=1e-9)
    assert len(rounds) == 3 and all(len(clients) == 2 for clients in rounds)


@pytest.mark.parametrize("average_moments", [True, False])
def test_post_local_sgd_is_ddp_and_then_streams(tmp_path: Path, average_moments: bool) -> None:
    """Later, each of two fragments is exchanged every 4 steps, two steps apart, and used a step after that.

    Momentum that is averaged counts as if its mean had been there from the start.
    """
    first, every, delay = 10, 4, 1
    method = post_local_sgd(first, every, average_moments=average_moments, fragments=2, delay=delay)
    ranks = run_ranks(tmp_path, 3, _train, method, dense, 0.9)
    tensors = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
    fragments = [np.concatenate(tensors[number::2]) for number in range(2)]
    weights = [starting_weights().astype(np.float64) for _ in range(3)]
    momenta = [np.zeros(sum(SIZES)) for _ in range(3)]
    # By fragment: what weights were when its exchange began, and momenta that began as their mean.
    flights: dict[int, tuple[int, list[np.ndarray], list[np.ndarray]]] = {}
    landed = 0
    for step in range(STEPS):
        gradients = [dense(rank, step) for rank in range(3)]
        momenta = [0.9 * momentum + gradient for momentum, gradient in zip(momenta, gradients)]
        weights = [own - 0.1 * momentum for own, momentum in zip(weights, momenta)]
        for _, _, prompt in flights.values():
            for rank, gradient in enumerate(gradients):
                prompt[rank] = 0.9 * prompt[rank] + gradient
        for number, places in enumerate(fragments):
            if step < first or (step + 1 - 2 * (number + 1)) % every == 0:
                prompt = [np.mean(momenta, axis=0)] * 3 if average_moments else [each.copy() for each in momenta]
                flights[number] = step + delay * (step >= first), [own.copy() for own in weights], prompt
            if number in flights and flights[number][0] == step:
                _, began, prompt = flights.pop(number)
                mean = np.mean(began, axis=0)
                for own, then, momentum, other in zip(weights, began, momenta, prompt):
                    own[places] = mean[places] + (own[places] - then[places])
                    momentum[places] = other[places]
                landed += step >= first
        for trained, own in zip(ranks, weights):
            np.testing.assert_allclose(trained["weights"][step], own, rtol=1e-9, atol=1e-9)
    assert landed > 4


@pytest.mark.parametrize("average_moments", [True, False])
def test_post_local_sgd_is_ddp_and_then_local(tmp_path: Path, average_moments: bool) -> None:
    first, every = 10, 4
    method = post_local_sgd(first, every, average_moments=average_moments)
    ranks = run_ranks(tmp_path, 3, _train, method, dense, 0.9)
    weights = [starting_weights().astype(np.float64) for _ in range(3)]
    momenta = [np.zeros(sum(SIZES)) for _ in range(3)]
    ddp, momentum_of_ddp = weights[0], momenta[0]
    since = 0
    for step in range(STEPS):
        gradients = [dense(rank, step) for rank in range(3)]
        momenta = [0.9 * momentum + gradient for momentum, gradient in zip(momenta, gradients)]
        weights = [own - 0.1 * momentum for own, momentum in zip(weights, momenta)]
        since = 0 if step < first else since + 1
        if step < first or since == every:
            weights = [np.mean(weights, axis=0)] * 3
            momenta = [np.mean(momenta, axis=0)] * 3 if average_moments else momenta
            since = 0
        if step < first:
            momentum_of_ddp = 0.9 * momentum_of_ddp + np.mean(gradients, axis=0)
            ddp = ddp - 0.1 * momentum_of_ddp
            np.testing.assert_allclose(ranks[0]["weights"][step], ddp, rtol=1e-9, atol=1e-9)
        for trained, own in zip(ranks, weights):
            np.testing.assert_allclose(trained["weights"][step], own, rtol=1e-9, atol=1e-9)


def _embeddings(rank: int) -> list[Any]:
    """Rows of a sparse table that each rank sees, and what parallax makes of their gradients."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Linear(4, 1))
    engine = Engine(parallax(), Wire())
    engine.registry.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found = []
    for step in range(4):
        rows = torch.randint(50, (6,), generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        module(rows).square().sum().backward()
        own = module[0].weight.grad.to_dense().numpy().copy()
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            shared = module[0].weight.grad
            assert shared.is_sparse
            found.append((own, shared.to_dense().numpy().copy()))
            optimizer.step()
    engine.close()
    return found


def test_parallax_keeps_sparse_gradients_sparse(tmp_path: Path) -> None:
    ranks = run_ranks(tmp_path, 3, _embeddings)
    for of_ranks in zip(*ranks):
        expected = np.mean([own for own, _ in of_ranks], axis=0)
        for _, shared in of_ranks:
            np.testing.assert_allclose(shared, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"fraction": 0}, r"fraction must be in \(0, 1\].*got 0"),
        ({"weights": [1, -1]}, "weights must be a positive number for each rank"),
        ({"weights": "abc"}, "weights must be a positive number for each rank"),
    ],
)
def test_bad_clients_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        federated_averaging(**options)


def test_weights_for_another_number_of_ranks_are_refused_before_the_first_step(wire: Wire) -> None:
    engine, module = Engine(federated_averaging(weights=[1, 2]), wire), nn.Linear(2, 2)
    engine.registry.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.ones(2)).sum().backward()
    with (
        pytest.raises(ValueError, match=r"weights must be a positive number for each of 1 ranks; got 2"),
        engine.stepping(optimizer),
    ):
        engine.synchronize(optimizer)
