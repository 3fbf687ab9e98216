"""Matrices as products of two thin ones; here of one rank."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout, Round, Vector, Wire
from lightning_sparsecomm.exchange import NonFiniteGradientError, PowerSGD

# The second matrix is too small for factors of rank 2, the tensors after it are none.
LAYOUT = Layout([("weight", (30, 4, 5)), ("small", (3, 4)), ("bias", (7,)), ("scale", ()), ("empty", (0, 3))])
WEIGHT, REST = slice(0, 600), slice(600, None)


def run(exchange: PowerSGD, x: Tensor, wire: Wire, step: int = 0, **options: Any) -> Tensor:
    """What is shared in a round that is committed."""
    context = Round(LAYOUT, step)
    vector = Vector(x, **options)
    exchange.prepare(vector, context, wire)
    shared, sent, _ = exchange.exchange(vector, context, wire)
    exchange.commit()
    assert isinstance(shared, Tensor)
    assert isinstance(sent, Tensor)
    # One rank sends what is shared.
    torch.testing.assert_close(shared, sent)
    return shared


def low_rank(rank: int) -> Tensor:
    """A vector whose first tensor is a matrix of this rank."""
    return torch.cat([(torch.randn(30, rank) @ torch.randn(rank, 20)).view(-1), torch.randn(LAYOUT.size - 600)])


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_matrix_of_low_rank_is_shared_exactly(wire: Wire, rank: int) -> None:
    x = low_rank(rank)
    shared = run(PowerSGD(rank), x, wire)
    torch.testing.assert_close(shared[WEIGHT], x[WEIGHT], rtol=1e-4, atol=1e-5)
    small = slice(600, 612) if rank == 1 else slice(0, 0)
    assert torch.equal(shared[REST][small.stop - small.start :], x[REST][small.stop - small.start :])


@pytest.mark.parametrize(("rank", "handed"), [(1, 50 + 7), (2, 100 + 12), (12, 600 + 12), (99, 600 + 12)])
def test_bytes_are_those_of_the_factors(wire: Wire, rank: int, handed: int) -> None:
    """A matrix is sent whole where its factors would be no shorter."""
    run(PowerSGD(rank), torch.randn(LAYOUT.size), wire)
    assert wire.ledger.handed_bytes() == 4 * (handed + 7 + 1 + len(LAYOUT.segments))


def test_a_warm_start_finds_the_largest_singular_vectors(wire: Wire) -> None:
    x = torch.randn(LAYOUT.size)
    x[WEIGHT] += 5 * low_rank(2)[WEIGHT]
    u, s, v = torch.linalg.svd(x[WEIGHT].view(30, 20))
    best = float((x[WEIGHT] - ((u[:, :2] * s[:2]) @ v[:2]).view(-1)).norm())
    warm, cold = PowerSGD(2), PowerSGD(2, warm_start=False)
    for step in range(12):
        errors = [float((x - run(exchange, x, wire, step)).norm()) for exchange in (warm, cold)]
    assert errors[0] == pytest.approx(best, rel=1e-3)
    assert errors[1] > 1.02 * best
    assert not cold.state_dict()


def test_it_starts_after_dense_steps(wire: Wire) -> None:
    exchange, x = PowerSGD(1, dense_steps=2), torch.randn(LAYOUT.size)
    for step in range(2):
        assert torch.equal(run(exchange, x, wire, step), x)
        assert not exchange.state_dict()
    assert not torch.equal(run(exchange, x, wire, 2), x)
    assert exchange.state_dict().keys() == {"weight", "small"}


def test_groups_share_the_same(wire: Wire) -> None:
    together, apart = PowerSGD(2), PowerSGD(2, group_elements=1)
    for step in range(3):
        x = torch.randn(LAYOUT.size)
        assert torch.equal(run(together, x, wire, step), run(apart, x, wire, step))
    calls = wire.ledger.rows["gradients"]["all_reduce"].calls
    # Two sums of all; and one for each tensor, with a second one for the matrix. An empty tensor is no group.
    assert calls == 3 * (2 + 4 + 1)


@pytest.mark.parametrize("warm_start", [True, False])
def test_zero_gradients_leave_nothing_that_is_not_finite(wire: Wire, warm_start: bool) -> None:
    exchange = PowerSGD(2, warm_start=warm_start)
    x = low_rank(1)
    for step, given in enumerate((x * 0, x, x * 0, x * 0, x, x)):
        shared = run(exchange, given, wire, step)
        assert bool(shared.isfinite().all())
        # A gradient of rank 1, of which the second columns of P and Q know nothing.
        torch.testing.assert_close(shared, given, rtol=1e-4, atol=1e-5)
    full = low_rank(2)
    torch.testing.assert_close(run(exchange, full, wire, 9), full, rtol=1e-3, atol=1e-4)


def test_a_tensor_without_a_gradient_keeps_its_factor(wire: Wire) -> None:
    exchange, x = PowerSGD(1), low_rank(3)
    run(exchange, x, wire)
    before = exchange.state_dict()["weight"].clone()
    x[WEIGHT] = 0
    shared = run(exchange, x, wire, 1, present=[False, True, True, True, True])
    assert not shared[WEIGHT].any()
    assert torch.equal(exchange.state_dict()["weight"], before)


def test_a_gradient_of_any_size(wire: Wire) -> None:
    for scale in (1e-30, 1e-15, 1e15, 1e30):
        x, exchange = low_rank(1) * scale, PowerSGD(1)
        for step in range(3):
            torch.testing.assert_close(run(exchange, x, wire, step)[WEIGHT] / scale, x[WEIGHT] / scale)


def test_a_factor_of_another_rank_or_shape_is_used_as_far_as_it_goes(wire: Wire) -> None:
    x = torch.randn(LAYOUT.size)
    x[WEIGHT] = low_rank(2)[WEIGHT]
    exchange = PowerSGD(2)
    for step in range(3):
        run(exchange, x, wire, step)
    for rank, factors in ((1, exchange.state_dict()), (3, exchange.state_dict()), (2, {"weight": torch.ones(2, 3)})):
        other = PowerSGD(rank)
        other.load_state_dict(factors)
        shared = run(other, x, wire, 3)
        assert other.state_dict()["weight"].shape == (rank, 20)
        if rank > 1:
            torch.testing.assert_close(shared[WEIGHT], x[WEIGHT], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_factor_that_is_not_finite_is_drawn_anew(wire: Wire, value: float) -> None:
    exchange, x = PowerSGD(1), low_rank(1)
    exchange.load_state_dict({"weight": torch.full((1, 20), value)})
    torch.testing.assert_close(run(exchange, x, wire)[WEIGHT], x[WEIGHT], rtol=1e-4, atol=1e-5)


def test_what_was_loaded_is_not_changed(wire: Wire) -> None:
    state = {"weight": torch.randn(1, 20)}
    before, exchange = state["weight"].clone(), PowerSGD(1)
    exchange.load_state_dict(state)
    run(exchange, torch.randn(LAYOUT.size), wire)
    assert torch.equal(state["weight"], before)
    assert not torch.equal(exchange.state_dict()["weight"], before)


def test_a_gradient_that_is_not_finite_is_reported(wire: Wire) -> None:
    exchange = PowerSGD(1, group_elements=1)
    with pytest.raises(NonFiniteGradientError, match="'bias'"):
        exchange.exchange(Vector(torch.zeros(LAYOUT.size), nonfinite_segment=2), Round(LAYOUT), wire)
    exchange.abort()
    assert not exchange.state_dict()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"rank": 0}, ValueError, "rank must be a whole number, at least 1: columns .*got 0. Use 1, 2 or 4"),
        ({"rank": 1.0}, ValueError, "rank must be a whole number, at least 1.*got 1.0"),
        ({"dense_steps": -1}, ValueError, "dense_steps must be a whole number, 0 or more; got -1. Use 0"),
        ({"group_elements": 0}, ValueError, "group_elements must be a whole number, at least 1; got 0"),
        ({"warm_start": "no"}, TypeError, "warm_start must be True or False; got 'no'"),
    ],
)
def test_refuses(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        PowerSGD(**options)
