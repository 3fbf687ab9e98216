"""LayerwiseTopK: a tensor's share follows from its norm or entropy, and all shares add up."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.codecs import LayerwiseTopK, TopK
from tests.codecs.selectors.vectors import densities, vectors
from tests.reference.selection import k_of, top_k

BOTH = [LayerwiseTopK(0.1, by) for by in ("norm", "entropy")]  # type: ignore[arg-type]


def weight(x: np.ndarray, by: str) -> float:
    magnitudes = [abs(float(value)) for value in x]
    if by == "norm":
        return math.sqrt(math.fsum(value**2 for value in magnitudes))
    total = math.fsum(magnitudes)
    return math.exp(-math.fsum(v / total * math.log(v / total) for v in magnitudes if v)) if total else 0.0


def shares(total: float, weights: list[float], most: list[int]) -> list[float]:
    """By bisection: each share is its weight times a factor that is the same for all, as far as it may grow."""
    low, high = 0.0, 1e30
    for _ in range(400):
        factor = (low + high) / 2
        low, high = (factor, high) if sum(map(min, most, (factor * w for w in weights))) < total else (low, factor)
    return [min(m, high * w) for m, w in zip(most, weights)]


@pytest.mark.parametrize("by", ["norm", "entropy"])
@pytest.mark.parametrize("density", [0.02, 0.1, 0.3, 0.7])
def test_shares_are_proportional(by: Any, density: float) -> None:
    generator = torch.Generator().manual_seed(7)
    sizes = [500, 30, 0, 200, 1, 8]
    scales = [1.0, 20.0, 1.0, 0.1, 5.0, 100.0]
    x = torch.cat([torch.randn(n, generator=generator) ** 3 * s for n, s in zip(sizes, scales)])
    layout = Layout((str(i), (n,)) for i, n in enumerate(sizes))
    context = Round(layout)
    selector = LayerwiseTopK(density, by)
    total = k_of(density, sum(sizes))
    assert selector.count(context) == total
    parts = [part.numpy() for part in layout.flats(x)]
    expected = shares(total - 5, [weight(part, by) for part in parts], [max(0, n - 1) for n in sizes])
    counts = selector.counts(x, context)
    assert sum(counts) == total
    for n, count, share in zip(sizes, counts, expected):
        assert abs(count - (n > 0) - share) < 1 + 1e-6
    chosen = [
        segment.offset + i
        for segment, part, k in zip(layout.segments, parts, counts)
        for i in top_k(part, k, context.shared_seed())
    ]
    assert selector.select(x, context).tolist() == chosen


def test_by_norm_is_balanced_where_all_elements_are_alike() -> None:
    """The square root of a tensor's size, as in `TopK(scope="balanced")`, but for the one that each tensor has."""
    sizes = [90_000, 40_000, 10_000, 100]
    layout = Layout((str(i), (n,)) for i, n in enumerate(sizes))
    x = torch.ones(layout.size)
    ours = layout.counts(LayerwiseTopK(0.01).select(x, Round(layout)))
    balanced = layout.counts(TopK(0.01, "balanced").select(x, Round(layout)))
    assert all(abs(one - other) <= 2 for one, other in zip(ours, balanced))


@given(vectors(), densities, st.sampled_from(["norm", "entropy"]))
def test_sends_no_more_than_it_may(vector: Any, density: float, by: Any) -> None:
    x, layout = vector
    context = Round(layout, step=3)
    selector = LayerwiseTopK(density, by)
    selected = selector.select(x, context)
    assert bool((selected.diff() > 0).all())
    assert bool((x[selected] != 0).all())
    tensors = sum(1 for segment in layout.segments if segment.size)
    assert selected.numel() <= selector.count(context) == max(k_of(density, layout.size) if layout.size else 0, tensors)
    for k, segment in zip(selector.counts(x, context), layout.segments):
        assert min(segment.size, 1) <= k <= segment.size
    # Every tensor with something to send sends something.
    held = [bool(part.any()) for part in layout.flats(x)]
    assert [bool(count) for count in layout.counts(selected)] == held


@pytest.mark.parametrize("selector", BOTH, ids=repr)
def test_extreme_numbers_have_shares_too(selector: LayerwiseTopK) -> None:
    layout = Layout([("a", (100,)), ("b", (100,))])
    for x in (
        torch.full((200,), 1e308, dtype=torch.float64),
        torch.full((200,), 3e38),
        torch.full((200,), 1e-45),
        torch.full((200,), 5e-324, dtype=torch.float64),
    ):
        assert selector.counts(x, Round(layout)) == [10, 10]
    # A weight that is far smaller than another is not lost.
    x = torch.cat([torch.full((100,), 1e30), torch.full((100,), 1.0)])
    assert LayerwiseTopK(0.6).counts(x, Round(layout)) == [100, 20]


def test_refuses() -> None:
    with pytest.raises(ValueError, match=r"by must be one of norm, entropy; got 'norms'. Did you mean 'norm'"):
        LayerwiseTopK(0.1, "norms")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="density must be in"):
        LayerwiseTopK(2)
