"""The largest elements of a sum, found in a sketch; here of one rank."""

import re
from typing import Any

import pytest
import torch

from lightning_sparsecomm.basis import Layout, Round, SparseVector, Vector, Warmup, Wire
from lightning_sparsecomm.basis.mirror import MirrorWire
from lightning_sparsecomm.exchange import NonFiniteGradientError, SketchedTopK

LAYOUT = Layout([("weight", (40, 50)), ("bias", (7,))])
CONTEXT = Round(LAYOUT)


def peaked() -> torch.Tensor:
    """A vector of small noise with six large elements."""
    x = torch.randn(LAYOUT.size) * 1e-3
    x[torch.tensor([3, 500, 501, 1200, 1999, 2003])] = torch.tensor([9.0, -8.0, 7.0, 6.0, -5.0, 4.0])
    return x


@pytest.mark.parametrize("wire_dtype", ["same", "float16", "bfloat16"])
def test_the_k_largest_are_found_and_exact(wire: Wire, wire_dtype: Any) -> None:
    x = peaked()
    exchange = SketchedTopK(k=4, columns=100, candidates=8, wire_dtype=wire_dtype)
    shared, sent, present = exchange.exchange(Vector(x, [True, True]), CONTEXT, wire)
    assert isinstance(shared, SparseVector)
    assert isinstance(sent, SparseVector)
    assert shared.indices.tolist() == sent.indices.tolist() == [3, 500, 501, 1200]
    assert torch.equal(shared.values, x[shared.indices])
    assert torch.equal(sent.values, x[sent.indices])
    assert present == [True, True]
    # The table, a count for each tensor, and the candidates' values.
    assert wire.ledger.handed_bytes() == (500 + 2) * (4 if wire_dtype == "same" else 2) + 32 * 4


def test_no_sketch_is_needed_of_a_model_that_would_have_too_large_a_one() -> None:
    """Of 300 million elements that take no memory; a warm-up sends nearly all."""
    size = 300_000_000
    context = Round(Layout([("weight", (size,))]), warmup=Warmup(steps=5000, shape="inverse_time"), world_size=2)

    class WholeError(Exception):
        pass

    class Exchange(SketchedTopK):
        def _exchange_whole(self, *args: Any) -> Any:
            raise WholeError

    with pytest.raises(WholeError):
        Exchange(0.001).exchange(Vector(torch.zeros(1).expand(size), [True]), context, MirrorWire(2))


def test_the_vector_itself_is_sent_where_it_is_shorter(wire: Wire) -> None:
    x = peaked()
    shared, sent, _ = SketchedTopK(k=6, columns=10_000).exchange(Vector(x), CONTEXT, wire)
    assert wire.ledger.handed_bytes() == 4 * (LAYOUT.size + 2)
    assert isinstance(shared, SparseVector)
    assert isinstance(sent, SparseVector)
    assert shared.indices.tolist() == [3, 500, 501, 1200, 1999, 2003]
    assert torch.equal(shared.values, x[shared.indices])


def test_a_sketch_can_be_asked_for_even_so(wire: Wire) -> None:
    SketchedTopK(k=6, columns=10_000, always_sketch=True).exchange(Vector(peaked()), CONTEXT, wire)
    assert wire.ledger.handed_bytes() > 4 * 5 * 10_000


def test_a_density_or_a_warmup_says_how_many(wire: Wire) -> None:
    # 0.2% of 2,007; in the first of 4 stages, 4 of them at (4/2,007)^(1/5).
    for exchange in (SketchedTopK(0.002), SketchedTopK(k=4)):
        shared, _, _ = exchange.exchange(Vector(peaked()), CONTEXT, wire)
        assert isinstance(shared, SparseVector)
        assert shared.indices.numel() == 4
        warming = Round(LAYOUT, warmup=Warmup(steps=100))
        shared, _, _ = exchange.exchange(Vector(peaked()), warming, wire)
        assert isinstance(shared, SparseVector)
        assert shared.indices.numel() == pytest.approx(2_007 * (4 / 2_007) ** 0.2, abs=1)


def test_a_gradient_that_is_not_finite_is_reported(wire: Wire) -> None:
    for exchange in (SketchedTopK(k=2), SketchedTopK(k=2, columns=10_000)):
        with pytest.raises(NonFiniteGradientError, match="'bias'"):
            exchange.exchange(Vector(torch.zeros(LAYOUT.size), nonfinite_segment=1), CONTEXT, wire)


def test_more_than_there_are_elements_is_refused() -> None:
    assert SketchedTopK(k=2_007).objection(LAYOUT) is None
    objection = SketchedTopK(k=2_008).objection(LAYOUT)
    assert objection is not None
    assert re.search(r"k must be at most the 2,007 elements.*got 2,008", objection)
    assert SketchedTopK(1.0).objection(LAYOUT) is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"density": 0.1, "k": 3}, "density and k .*got 0.1 and 3. Give one"),
        ({"density": 2}, r"density must be in \(0, 1\].*got 2"),
        ({"k": 0}, "k must be a whole number, at least 1.*got 0"),
        ({"k": 2.0}, "k must be a whole number, at least 1.*got 2.0"),
        ({"candidates": 0.5}, "candidates must be at least 1.*got 0.5"),
        ({"candidates": float("nan")}, "candidates must be at least 1.*got nan"),
        ({"rows": 0}, "rows must be"),
        ({"columns": 0}, "columns must be"),
        ({"wire_dtype": "int8"}, "dtype must be one of same, float16, bfloat16; got 'int8'"),
    ],
)
def test_refuses(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SketchedTopK(**options)
