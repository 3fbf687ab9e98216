"""The references that other tests believe, held to the papers' numbers and to torch."""

import math

import numpy as np
import pytest
import torch

from tests.reference.optimizers import SGD, Adam
from tests.reference.sparse_binary_compression import (
    SparseBinaryCompression,
    binarized,
    golomb_decode,
    golomb_encode,
    golomb_parameter,
)


@pytest.mark.parametrize(
    ("ours", "make"),
    [
        (SGD(0.1, 0.9), lambda w: torch.optim.SGD([w], 0.1, momentum=0.9)),
        (SGD(0.7, 0.9, nesterov=True), lambda w: torch.optim.SGD([w], 0.7, momentum=0.9, nesterov=True)),
        (Adam(1e-2), lambda w: torch.optim.Adam([w], 1e-2)),
    ],
    ids=["momentum", "nesterov", "adam"],
)
def test_optimizers_do_as_torchs(ours: SGD | Adam, make) -> None:
    generator = np.random.default_rng(0)
    weights = generator.standard_normal(20).astype(np.float32)
    theirs = torch.nn.Parameter(torch.tensor(weights))
    optimizer = make(theirs)
    for step in range(6):
        gradient = generator.standard_normal(20).astype(np.float32)
        weights = ours.step(weights, gradient)
        theirs.grad = torch.tensor(gradient)
        optimizer.step()
        np.testing.assert_allclose(weights, theirs.detach().numpy(), rtol=1e-5, atol=1e-6)
        if step == 2:
            sent = np.where(np.arange(20) % 3 == 0, np.float32(0.5), np.float32(0))
            ours.mask(sent)
            name = "exp_avg" if isinstance(ours, Adam) else "momentum_buffer"
            optimizer.state[theirs][name][torch.tensor(sent) != 0] = 0


@pytest.mark.parametrize(("density", "bits"), [(0.1, 4.756), (0.01, 8.108), (0.001, 11.495)])
def test_golomb_takes_the_papers_bits(density: float, bits: float) -> None:
    b = golomb_parameter(density)
    assert round(b + 1 / (1 - (1 - density) ** (2**b)), 3) == bits
    positions = np.flatnonzero(np.random.default_rng(0).random(1_000_000) < density).tolist()
    code = golomb_encode(positions, b)
    assert golomb_decode(code, b) == positions
    assert math.isclose(len(code) / len(positions), bits, rel_tol=0.02)


def test_golomb_by_hand() -> None:
    # Gaps 1, 6 and 2, less one: 0 = 0·4 + 0, 5 = 1·4 + 1, 1 = 0·4 + 1.
    assert golomb_encode([0, 6, 8], b=2) == "000" + "1001" + "001"
    assert golomb_decode("0001001001", b=2) == [0, 6, 8]
    assert golomb_encode([], b=2) == ""
    assert golomb_parameter(1.0) == 0
    assert golomb_encode([0, 1, 2], b=0) == "000"


def test_binarized_by_hand() -> None:
    delta = np.array([3, -4, 1, 0, -1, 2], dtype=np.float32)
    # k = 2: the positive ones have a mean of 2.5, and so have the negative ones.
    np.testing.assert_array_equal(binarized(delta, 1 / 3), [2.5, 0, 0, 0, 0, 2.5])
    np.testing.assert_array_equal(binarized(delta, 1 / 6), [0, -4, 0, 0, 0, 0])
    # Fewer than k are positive.
    np.testing.assert_array_equal(binarized(np.array([0, 5, -1, -2], dtype=np.float32), 0.5), [0, 5, 0, 0])
    np.testing.assert_array_equal(binarized(np.zeros(4, dtype=np.float32), 0.5), np.zeros(4))


def test_sparse_binary_compression_loses_nothing() -> None:
    """Theorem II.1: what was sent and what is left are all that ranks have moved."""
    generator, ranks = np.random.default_rng(0), 3
    start = generator.standard_normal(50).astype(np.float32)
    reference = SparseBinaryCompression(ranks, [30, 20], density=0.1, every=2, start=start)
    moved = [np.zeros(50) for _ in range(ranks)]
    sent = [np.zeros(50) for _ in range(ranks)]
    for _ in range(20):
        weights = [reference.anchor + generator.standard_normal(50).astype(np.float32) for _ in range(ranks)]
        for rank in range(ranks):
            moved[rank] += weights[rank] - reference.anchor
        for rank, each in enumerate(reference.exchange(weights)):
            assert np.count_nonzero(each) == 3 + 2
            sent[rank] += each
    for rank in range(ranks):
        np.testing.assert_allclose(sent[rank] + reference.residuals[rank], moved[rank], atol=1e-4)
    np.testing.assert_allclose(reference.anchor, start + np.mean(sent, axis=0), atol=1e-4)


def test_an_outer_step_of_rate_one_changes_nothing() -> None:
    generator = np.random.default_rng(0)
    start = np.zeros(40, dtype=np.float32)
    plain = SparseBinaryCompression(2, [40], density=0.1, every=1, start=start)
    outer = SparseBinaryCompression(2, [40], density=0.1, every=1, start=start, outer=SGD(1.0))
    for _ in range(5):
        steps = generator.standard_normal((2, 40)).astype(np.float32)
        plain.exchange([plain.anchor + step for step in steps])
        outer.exchange([outer.anchor + step for step in steps])
        np.testing.assert_array_equal(plain.anchor, outer.anchor)
