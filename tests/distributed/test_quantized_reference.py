"""On 3, 4 and 5 ranks, each step of a quantized all-reduce equals a naive reference."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.ledger import GRADIENTS
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.channel import Channel, ErrorFeedback
from lightning_sparsecomm.exchange import QuantizedAllReduce
from lightning_sparsecomm.methods import quantized
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import DeltaSync, Method
from tests.distributed.launch import run_ranks
from tests.distributed.test_low_rank_reference import MATRICES, _train
from tests.distributed.test_reference import STEPS, gradients_of
from tests.reference.quantized import QuantizedReference


# With 2 bits, other numbers of ranks come to ties, which the reference refuses.
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("bits", "world_size"),
    [
        (8, 5),
        (4, 4),
        (2, 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((8, 3), (8, 4), (4, 3), (4, 5))),
    ],
)
def test_quantized(tmp_path: Path, bits: Any, world_size: int) -> None:
    """Weights are rounded, all else is sent whole."""
    ranks = run_ranks(tmp_path, world_size, _train, quantized(bits), torch.float64)
    reference = QuantizedReference(world_size, int(MATRICES.sum()), bits, 128 if bits == 2 else 256)
    all_gradients = [gradients_of(rank) for rank in range(world_size)]
    for step in range(STEPS):
        gradients = [own[step].astype(np.float64) for own in all_gradients]
        expected = np.mean(gradients, axis=0)
        expected[MATRICES] = reference.step([gradient[MATRICES] for gradient in gradients])
        for trained, own in zip(ranks, reference.residuals, strict=True):
            seen, residual = trained[step]
            assert seen.tobytes() == ranks[0][step][0].tobytes()
            np.testing.assert_allclose(seen, expected, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(residual, own, rtol=1e-12, atol=1e-11)


def _few(rank: int, size: int, block: int, world_size: int) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """What is shared and held in each round, and all bytes handed over; in float64."""
    layout, wire = Layout([("vector", (size,))]), Wire()
    channel = Channel(QuantizedAllReduce(8, block), [ErrorFeedback()])
    channel.bind(layout, torch.float64, torch.device("cpu"))
    found = []
    for step in range(5):
        gradient = torch.from_numpy(_few_gradients(rank, size)[step])
        shared = channel.reduce([gradient], Round(layout, step, rank=rank, world_size=world_size), wire).shared
        assert isinstance(shared, torch.Tensor)
        held = channel.memories[0].held["residual"].flat
        found.append((shared.numpy().copy(), held.numpy().copy(), wire.ledger.handed_bytes(GRADIENTS)))
    return found


def _few_gradients(rank: int, size: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal((5, size))


@pytest.mark.few(5)
@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize(("size", "block"), [(0, 4), (1, 4), (2, 256), (11, 2), (40, 3)])
def test_fewer_elements_than_ranks(tmp_path: Path, size: int, block: int, world_size: int) -> None:
    """And pieces of unequal length, of several blocks, the last of which is not full."""
    ranks = run_ranks(tmp_path, world_size, _few, size, block, world_size)
    reference = QuantizedReference(world_size, size, 8, block) if size else None
    length = -(-size // world_size)
    message = 16 + length + 4 * -(-length // block)
    for step in range(5):
        gradients = [_few_gradients(rank, size)[step] for rank in range(world_size)]
        expected = reference.step(gradients) if reference else np.zeros(0)
        for rank, found in enumerate(ranks):
            shared, held, handed = found[step]
            np.testing.assert_allclose(shared, expected, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(held, reference.residuals[rank] if reference else held, rtol=1e-12, atol=1e-12)
            # A message with a status may need 4 bytes for it, and one bit for each tensor.
            first = 16 + 1 + max(4, message - 16)
            assert handed == (step + 1) * (world_size * first + message)


def _to_all(rank: int) -> list[list[int]]:
    wire = Wire()
    mine = torch.tensor([[10 * rank + other, rank] for other in range(wire.world_size)])
    found: list[list[int]] = wire.all_to_all(mine).tolist()
    # Whatever the memory's layout.
    assert wire.all_to_all(mine.t().contiguous().t()).tolist() == found
    return found


def test_each_rank_has_one_message_from_every_rank(tmp_path: Path) -> None:
    for rank, received in enumerate(run_ranks(tmp_path, 3, _to_all)):
        assert received == [[10 * other + rank, other] for other in range(3)]


def _drift(rank: int, method: Method) -> tuple[np.ndarray, float]:
    """The weights after the last exchange, and the norm of what this rank still holds."""
    torch.manual_seed(0)
    module = torch.nn.Linear(20, 10)
    engine = Engine(method, Wire())
    engine.registry.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(12):
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        with engine.stepping(optimizer):
            engine.closure(optimizer, lambda: None)()
            optimizer.step()
    share = next(iter(engine.registry.optimizers[0].shares.values()))
    weights = torch.nn.utils.parameters_to_vector(module.parameters()).detach().numpy().copy()
    norm = share.residual_norm()
    engine.close()
    return weights, norm


def test_outer_gradients_of_methods_that_exchange_every_few_steps(tmp_path: Path) -> None:
    """In 4 bits, with an outer optimizer: the anchors are equal to the bit, and close to those of a whole exchange."""
    outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    method = Method([DeltaSync(Channel(QuantizedAllReduce(4), [ErrorFeedback()]), every=4, outer=outer)])
    whole = Method([DeltaSync(Channel(QuantizedAllReduce(8, 1), [ErrorFeedback()]), every=4, outer=outer)])
    (tmp_path / "whole").mkdir()
    ranks, exact = run_ranks(tmp_path, 3, _drift, method), run_ranks(tmp_path / "whole", 3, _drift, whole)
    for weights, norm in ranks:
        assert weights.tobytes() == ranks[0][0].tobytes()
        assert norm > 0
    np.testing.assert_allclose(ranks[0][0], exact[0][0], rtol=0, atol=0.2)
    assert not np.array_equal(ranks[0][0], exact[0][0])
