"""Positions that all ranks have in common; here of one rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout, Round, SparseVector, Vector, Wire
from lightning_sparsecomm.exchange import AlignedTopK, Exchange, NonFiniteGradientError, RandomK
from lightning_sparsecomm.exchange.shared_positions import drawn

LAYOUT = Layout([("weight", (30, 20)), ("none", (0, 3)), ("bias", (7,))])
CONTEXT = Round(LAYOUT)
EXCHANGES: dict[str, Callable[[float], Exchange]] = {
    "random_k": RandomK,
    "aligned_topk": lambda density: AlignedTopK(density, block_size=16),
}


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("density", [1e-6, 0.1, 0.5, 1.0])
def test_what_is_shared_is_what_is_sent(wire: Wire, name: str, density: float) -> None:
    x = torch.randn(LAYOUT.size)
    shared, sent, present = EXCHANGES[name](density).exchange(Vector(x, [True] * 3), CONTEXT, wire)
    assert isinstance(shared, SparseVector)
    assert isinstance(sent, SparseVector)
    assert torch.equal(shared.indices, sent.indices)
    assert bool((shared.indices.diff() > 0).all())
    assert torch.equal(shared.values, x[shared.indices])
    assert torch.equal(sent.values, shared.values)
    assert present == [True] * 3
    assert shared.indices.numel() >= 1
    if density == 1:
        assert torch.equal(shared.dense(), x)


@pytest.mark.parametrize("name", EXCHANGES)
def test_nothing_is_shared_for_a_tensor_without_gradients(wire: Wire, name: str) -> None:
    """What a residual holds for it stays there."""
    x = torch.randn(LAYOUT.size)
    shared, sent, present = EXCHANGES[name](1.0).exchange(Vector(x, [False, True, True], carries=True), CONTEXT, wire)
    assert present == [False, True, True]
    for vector in (shared, sent):
        assert isinstance(vector, SparseVector)
        assert vector.indices.tolist() == list(range(600, 607))


@pytest.mark.parametrize("name", EXCHANGES)
def test_a_gradient_that_is_not_finite_is_reported(wire: Wire, name: str) -> None:
    for values in (torch.zeros(LAYOUT.size), torch.full((LAYOUT.size,), torch.nan)):
        with pytest.raises(NonFiniteGradientError, match="'bias'"):
            EXCHANGES[name](0.1).exchange(Vector(values, nonfinite_segment=2), CONTEXT, wire)


@pytest.mark.parametrize("name", EXCHANGES)
def test_an_empty_vector(wire: Wire, name: str) -> None:
    context = Round(Layout([("none", (0,))]))
    shared, _, present = EXCHANGES[name](0.1).exchange(Vector(torch.zeros(0), [True]), context, wire)
    assert isinstance(shared, SparseVector)
    assert shared.indices.numel() == 0
    assert present == [True]


@pytest.mark.parametrize(("n", "k"), [(10, 3), (10, 10), (7, 1), (1, 1), (0, 0), (1000, 999)])
def test_one_position_is_drawn_from_each_part(n: int, k: int) -> None:
    counts = torch.zeros(n)
    for step in range(300):
        positions, lengths = drawn(n, k, Round(LAYOUT, step=step))
        assert positions.numel() == k
        assert int(lengths.sum()) == n
        assert bool((lengths >= 1).all())
        starts = lengths.cumsum(0) - lengths
        assert bool(((positions >= starts) & (positions < starts + lengths)).all())
        counts[positions] += 1
    # Each position comes; that one in three is missing 300 times has a chance of 1e-53.
    assert bool((counts > 0).all())


def test_without_feedback_the_mean_is_the_gradient(wire: Wire) -> None:
    """Over 1,000 draws, to five standard errors."""
    x, layout = torch.randn(10), Layout([("weight", (10,))])
    exchange, draws = RandomK(0.3, unbiased=True), 1_000
    total = torch.zeros(10, dtype=torch.float64)
    for step in range(draws):
        shared = exchange.exchange(Vector(x), Round(layout, step=step), wire).shared
        assert isinstance(shared, SparseVector)
        total += shared.dense()
    # An element comes with chance 1/3 or 1/4, and is multiplied by 3 or 4.
    error = x.double().abs() * (3 / draws) ** 0.5
    assert bool(((total / draws - x).abs() <= 5 * error).all())


def test_the_largest_blocks_are_found(wire: Wire) -> None:
    """With many projections, those of largest norm; with few, most of their energy."""
    layout = Layout([("weight", (64, 16))])
    scales = torch.linspace(0.01, 4, 64)[torch.randperm(64, generator=torch.Generator().manual_seed(1))]
    x = (torch.randn(64, 16, generator=torch.Generator().manual_seed(2)) * scales[:, None]).view(-1)
    energies = x.view(64, 16).square().sum(1)
    best = float(energies.topk(8).values.sum())

    def found(projections: int, step: int) -> Tensor:
        exchange = AlignedTopK(1 / 8, block_size=16, projections=projections)
        sent = exchange.exchange(Vector(x), Round(layout, step=step), wire).sent
        assert isinstance(sent, SparseVector)
        return sent.values.square().sum()

    many, few = (sum(float(found(count, step)) for step in range(20)) / 20 / best for count in (256, 2))
    assert many > 0.97
    assert few > 0.5


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: RandomK(0), "density must be in"),
        (lambda: AlignedTopK(1.5), "density must be in"),
        (lambda: AlignedTopK(block_size=0), "block_size must be a whole number, at least 1"),
        (lambda: AlignedTopK(projections=0), "projections must be a whole number, at least 1"),
    ],
)
def test_refuses(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}"):
        make()
