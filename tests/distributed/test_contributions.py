"""Contributions that count differently: over those that sent an element, and clipped to the median norm."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_sparsecomm.basis import Layout, Round, SparseVector, Vector, Wire
from lightning_sparsecomm.codecs import Compressor, SparseCodec, TopK, TwoBit
from lightning_sparsecomm.exchange import GatherContributions
from tests.distributed.launch import run_ranks

N, K = 600, 60
LAYOUT = Layout([("weight", (N - 10,)), ("bias", (10,))])


def _gradient(rank: int) -> torch.Tensor:
    # The first rank's is far larger than the others'; one rank has nothing.
    gradient = torch.randn(N, generator=torch.Generator().manual_seed(rank)) * (20 if rank == 0 else 1)
    return gradient * (0 if rank == 2 else 1)


def _exchange(rank: int, compressor: Compressor, of_senders: bool, clip: bool) -> tuple[np.ndarray, np.ndarray]:
    wire = Wire()
    exchange = GatherContributions(compressor, of_senders, clip)
    context = Round(LAYOUT, rank=rank, world_size=wire.world_size)
    exchanged = exchange.exchange(Vector(_gradient(rank)), context, wire)
    shared, sent = (
        each.dense() if isinstance(each, SparseVector) else each for each in (exchanged.shared, exchanged.sent)
    )
    return shared.numpy(), sent.numpy()


def _top_k(rank: int) -> np.ndarray:
    gradient = _gradient(rank).numpy().astype(np.float64)
    kept = np.argsort(-np.abs(gradient), kind="stable")[:K]
    sparse = np.zeros(N)
    sparse[kept] = gradient[kept]
    return sparse


@pytest.mark.parametrize(("of_senders", "clip"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("world_size", [3, 4])
def test_equals_a_naive_reference(tmp_path: Path, world_size: int, of_senders: bool, clip: bool) -> None:
    ranks = run_ranks(tmp_path, world_size, _exchange, SparseCodec(TopK(K / N)), of_senders, clip)
    sent = [_top_k(rank) for rank in range(world_size)]
    if clip:
        norms = [float(np.sqrt((each**2).sum())) for each in sent]
        median = sorted(norms)[(world_size - 1) // 2]
        sent = [each * min(1.0, median / norm) if norm else each for each, norm in zip(sent, norms)]
    total, senders = np.sum(sent, axis=0), np.sum([each != 0 for each in sent], axis=0)
    shared = total / (np.maximum(senders, 1) if of_senders else world_size)
    for rank, (received, own) in enumerate(ranks):
        assert received.tobytes() == ranks[0][0].tobytes()
        np.testing.assert_allclose(received, shared, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(own, sent[rank], rtol=1e-6, atol=1e-7)
    assert len(np.unique(senders)) > 2


def test_codecs_that_send_everything_are_counted_too(tmp_path: Path) -> None:
    ranks = run_ranks(tmp_path, 3, _exchange, SparseCodec(TopK(1.0), TwoBit()), True, False)
    sent = [own for _, own in ranks]
    senders = np.sum([each != 0 for each in sent], axis=0)
    np.testing.assert_allclose(ranks[0][0], np.sum(sent, axis=0) / np.maximum(senders, 1), rtol=1e-5, atol=1e-6)


def test_switches_are_switches() -> None:
    with pytest.raises(TypeError, match="of_senders must be True or False"):
        GatherContributions(SparseCodec(TopK(0.1)), of_senders=1)  # type: ignore[arg-type]
