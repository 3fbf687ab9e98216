"""Ok-Topk's parts, on one rank or none; test_ok_topk in tests/distributed runs it on several."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_sparsecomm.basis import Layout, Round, SparseVector, Vector, Wire
from lightning_sparsecomm.codecs import Auto, Float32, PayloadError, SparseCodec, TopK
from lightning_sparsecomm.exchange import Exchange, NonFiniteGradientError, OkTopK
from lightning_sparsecomm.exchange.regions import agreed_bounds, cut, joined, kept_of, shared_out

LAYOUT = Layout([("weight", (30, 20)), ("none", (0, 3)), ("bias", (7,))])
CONTEXT = Round(LAYOUT)


def _exchange(density: float = 0.1) -> Exchange:
    return OkTopK(SparseCodec(TopK(density)))


@pytest.mark.parametrize("density", [1e-6, 0.1, 0.5, 1.0])
def test_one_rank_shares_what_it_selects(wire: Wire, density: float) -> None:
    x = torch.randn(LAYOUT.size)
    exchange = _exchange(density)
    exchanged = exchange.exchange(Vector(x, [True] * 3), CONTEXT, wire)
    expected = torch.zeros_like(x)
    chosen = TopK(density).select(x, CONTEXT)
    expected[chosen] = x[chosen]
    for vector in (exchanged.shared, exchanged.sent):
        assert expected.equal(vector.dense() if isinstance(vector, SparseVector) else vector)
    assert exchange.elements(exchanged) == chosen.numel()


def test_nothing_is_shared_for_a_tensor_without_gradients(wire: Wire) -> None:
    x = torch.randn(LAYOUT.size)
    shared, sent, present = _exchange(1.0).exchange(Vector(x, [False, True, True], carries=True), CONTEXT, wire)
    assert present == [False, True, True]
    for vector in (shared, sent):
        whole = vector.dense() if isinstance(vector, SparseVector) else vector
        assert whole.nonzero().view(-1).tolist() == list(range(600, 607))


def test_a_gradient_that_is_not_finite_is_reported(wire: Wire) -> None:
    for values in (torch.zeros(LAYOUT.size), torch.full((LAYOUT.size,), torch.nan)):
        with pytest.raises(NonFiniteGradientError, match="'bias'"):
            _exchange().exchange(Vector(values, nonfinite_segment=2), CONTEXT, wire)


def test_an_empty_vector(wire: Wire) -> None:
    context = Round(Layout([("none", (0,))]))
    shared, _, present = _exchange().exchange(Vector(torch.zeros(0), [True]), context, wire)
    assert isinstance(shared, SparseVector)
    assert shared.indices.numel() == 0
    assert present == [True]


def test_regions_count_after_a_commit_only(wire: Wire) -> None:
    exchange = _exchange()
    exchange.exchange(Vector(torch.randn(LAYOUT.size), [True] * 3), CONTEXT, wire)
    exchange.abort()
    assert exchange.state_dict() == {}
    exchange.exchange(Vector(torch.randn(LAYOUT.size), [True] * 3), CONTEXT, wire)
    exchange.commit()
    assert exchange.state_dict()["bounds"].tolist() == [0, LAYOUT.size]


@pytest.mark.parametrize("bounds", [[0, 300, 607], [0, 600]])
def test_regions_of_another_number_of_ranks_or_model_are_left(wire: Wire, bounds: list[int]) -> None:
    exchange = _exchange()
    exchange.load_state_dict({"bounds": torch.tensor(bounds), "rounds": torch.tensor(1)})
    exchange.exchange(Vector(torch.randn(LAYOUT.size), [True] * 3), Round(LAYOUT, step=5), wire)
    exchange.commit()
    assert exchange.state_dict()["bounds"].tolist() == [0, LAYOUT.size]


def _vector(positions: list[int]) -> SparseVector:
    indices = torch.tensor(positions, dtype=torch.int64)
    return SparseVector(indices, torch.randn(len(positions)), LAYOUT.size)


def test_regions_of_what_nothing_was_selected_of(wire: Wire) -> None:
    assert agreed_bounds(_vector([]), CONTEXT, wire).tolist() == [0, LAYOUT.size]


def test_cut_and_joined_are_inverse() -> None:
    vector = _vector([0, 3, 200, 201, 606])
    parts = cut(vector, torch.tensor([0, 3, 3, 201, 607]))
    assert [part.indices.tolist() for part in parts] == [[0], [], [3, 200], [201, 606]]
    assert joined(parts).values.equal(vector.values)
    with pytest.raises(PayloadError, match="ranks sent results for the same positions"):
        joined([parts[0], parts[0]])


@pytest.mark.parametrize("counts", [[9, 0, 0], [0, 9, 0], [1, 2, 8], [4, 4, 3], [0, 0, 1], [0, 0, 0]])
def test_shared_out_evenly_and_in_order(counts: list[int]) -> None:
    whole, before = list(range(sum(counts))), 0
    received: list[list[int]] = [[] for _ in counts]
    for rank, count in enumerate(counts):
        for to, part in enumerate(shared_out(_vector(whole[before : before + count]), counts, rank)):
            received[to] += part.indices.tolist()
        before += count
    assert [each for mine in received for each in mine] == whole
    assert max(map(len, received)) == -(-len(whole) // len(counts))


@pytest.mark.parametrize("k", [1, 5, 63, 64, 100, 639, 640, 1_000])
def test_kept_are_at_most_k_and_less_by_at_most_a_class(wire: Wire, k: int) -> None:
    region = SparseVector(torch.arange(640), torch.randn(640), 640)
    available, counts = kept_of(region, k, CONTEXT, wire)
    assert available == [640]
    assert max(0, min(k, 640) - 10) < counts[0] <= k


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: OkTopK(TopK(0.1)), TypeError, "codec must be a SparseCodec"),  # type: ignore[arg-type]
        (lambda: OkTopK(SparseCodec(TopK(0.1), Float32(), Auto()), 0), ValueError, "balance_every must be a whole"),
        (lambda: OkTopK(SparseCodec(TopK(0.1)), 1.5), ValueError, "balance_every must be a whole"),  # type: ignore[arg-type]
    ],
)
def test_refuses(make: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{text}"):
        make()
