"""On 3, 4 and 5 ranks, each step of a compressed all-reduce equals a naive reference."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_sparsecomm.basis import Layout, Round, Wire
from lightning_sparsecomm.channel import Channel, ErrorFeedback
from lightning_sparsecomm.codecs import Auto, Float32, SparseCodec, TopK, TwoBit, ValueCodec
from lightning_sparsecomm.exchange import CompressedAllReduce, Exchange, QuantizedAllReduce
from lightning_sparsecomm.sharing import GradientSync, Method
from tests.distributed.launch import run_ranks
from tests.distributed.test_low_rank_reference import _train
from tests.distributed.test_reference import SIZES, STEPS, gradients_of
from tests.reference.compressed import CompressedReference
from tests.reference.quantized import QuantizedReference


def _method(density: float, values: ValueCodec) -> Method:
    exchange = CompressedAllReduce(SparseCodec(TopK(density, "balanced"), values, Auto()))
    return Method([GradientSync(Channel(exchange, [ErrorFeedback(follow_rate=False)]))])


def _in_groups_of_64(values: np.ndarray) -> np.ndarray:
    return QuantizedReference(1, max(1, len(values)), 2, 64).rounded(values)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("density", "values", "world_size"),
    [
        (0.1, Float32(), 4),
        pytest.param(0.6, Float32(), 5, marks=pytest.mark.slow),
        (1.0, Float32(), 3),
        pytest.param(0.3, TwoBit(), 5, marks=pytest.mark.slow),
        (0.8, TwoBit(), 3),
    ],
)
def test_compressed(tmp_path: Path, density: float, values: ValueCodec, world_size: int) -> None:
    """Tensors of 210, 30, 30 and 1 elements: pieces are of unequal length, and some are empty."""
    ranks = run_ranks(tmp_path, world_size, _train, _method(density, values), torch.float64)
    rounded: Any = _in_groups_of_64 if isinstance(values, TwoBit) else lambda kept: kept
    reference = CompressedReference(world_size, SIZES, density, rounded)
    all_gradients = [gradients_of(rank) for rank in range(world_size)]
    for step in range(STEPS):
        expected = reference.step([own[step].astype(np.float64) for own in all_gradients])
        for trained, own in zip(ranks, reference.residuals, strict=True):
            seen, residual = trained[step]
            assert seen.tobytes() == ranks[0][step][0].tobytes()
            np.testing.assert_allclose(seen, expected, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(residual, own, rtol=1e-12, atol=1e-10)
    if density == 1.0 and isinstance(values, Float32):
        mean = np.mean([own[-1].astype(np.float64) for own in all_gradients], axis=0)
        np.testing.assert_allclose(ranks[0][-1][0], mean, rtol=1e-12)


COMPRESSED = CompressedAllReduce(SparseCodec(TopK(0.3, "balanced"), TwoBit(), Auto()))
LAYOUT = Layout([("weight", (30, 7)), ("bias", (3,)), ("nothing", (0,)), ("last", (5, 2))])


def _with_holes(
    rank: int, exchange: Exchange, sizes: list[int], world_size: int
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """What is shared in each round, the gradients' sum, and the residual of this rank."""
    layout = LAYOUT if not sizes else Layout((str(size), (size,)) for size in sizes)
    wire = Wire()
    channel = Channel(exchange, [ErrorFeedback()])
    channel.bind(layout, torch.float64, torch.device("cpu"))
    generator, total, shared = torch.Generator().manual_seed(rank), torch.zeros(layout.size, dtype=torch.float64), []
    for step in range(8):
        gradients: list[Any] = [
            torch.randn(segment.shape, dtype=torch.float64, generator=generator) for segment in layout.segments
        ]
        # Ranks in turn lack one gradient; in the last two rounds all do.
        if len(gradients) > 1 and (step % world_size == rank or step > 5):
            gradients[1] = None
        for view, gradient in zip(layout.views(total), gradients):
            view += 0 if gradient is None else gradient
        context = Round(layout, step, rank=rank, world_size=world_size, dtype=torch.float64)
        found = channel.reduce(gradients, context, wire).shared
        shared.append((found if isinstance(found, torch.Tensor) else found.dense()).numpy().copy())
    return shared, total.numpy(), channel.memories[0].held["residual"].flat.numpy()


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("exchange", "sizes", "world_size"),
    [
        (COMPRESSED, [], 1),
        (COMPRESSED, [], 2),
        (COMPRESSED, [], 3),
        (COMPRESSED, [0], 3),
        (COMPRESSED, [2, 1], 5),
        (QuantizedAllReduce(4), [], 3),
        (QuantizedAllReduce(2, 100), [], 2),
        (QuantizedAllReduce(2, 100), [1], 3),
    ],
)
def test_nothing_is_lost(tmp_path: Path, exchange: Exchange, sizes: list[int], world_size: int) -> None:
    """Not even where the owner of a piece has no gradient, nor with fewer elements than ranks."""
    ranks = run_ranks(tmp_path, world_size, _with_holes, exchange, sizes, world_size)
    brought, held = (np.mean([rank[i] for rank in ranks], axis=0) for i in (1, 2))
    np.testing.assert_allclose(np.sum(ranks[0][0], axis=0) + held, brought, rtol=0, atol=1e-12)
    for shared, *_ in ranks[1:]:
        assert all(np.array_equal(ours, first) for ours, first in zip(shared, ranks[0][0]))


def _bytes(rank: int, world_size: int) -> tuple[float, float]:
    layout, wire = Layout([("weight", (256, 1000))]), Wire()
    found = []
    for density in (0.02, 0.5):
        before = wire.ledger.link_bytes()
        exchange = CompressedAllReduce(SparseCodec(TopK(density), TwoBit(), Auto()))
        channel = Channel(exchange, [ErrorFeedback()])
        channel.bind(layout, torch.float32, torch.device("cpu"))
        gradient = torch.randn(256, 1000, generator=torch.Generator().manual_seed(rank))
        channel.reduce([gradient], Round(layout, rank=rank, world_size=world_size), wire)
        found.append(wire.ledger.link_bytes() - before)
    return found[0], found[1]


def test_bytes_do_not_grow_with_ranks(tmp_path: Path) -> None:
    """A payload's bytes, 2 (W − 1) / W times; a little more, since payloads are padded to the longest."""
    for world_size in (3, 5):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        sparse, dense = run_ranks(folder, world_size, _bytes, world_size)[0]
        share = 2 * (world_size - 1) / world_size
        # 0.141 bits of position for each element, and 2.5 for each that is sent; a bit of a bitmap, and 2.5.
        assert sparse == pytest.approx(share * 256_000 / 8 * (0.141 + 0.02 * 2.5), rel=0.12)
        assert dense == pytest.approx(share * 256_000 / 8 * (1 + 0.5 * 2.5), rel=0.05)
