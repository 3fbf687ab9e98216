"""Selectors: the reference's positions, exactly, whatever the ties, zeros, samples and blocks."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparsecomm import compensation
from lightning_sparsecomm.codecs import ChunkTopK, OneSidedTopK, TopK
from lightning_sparsecomm.layout import Layout
from lightning_sparsecomm.rounds import Round
from lightning_sparsecomm.schedules import DensityWarmup, Stages
from tests.reference.selection import k_of, top_k

DENORMAL = 1e-45
# Few distinct magnitudes, so that ties are the rule; both zeros; the smallest and the largest numbers.
crowded = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, DENORMAL, -DENORMAL, 2 * DENORMAL, 3e38, -3e38])
spread = st.floats(width=32, allow_nan=False, allow_infinity=False)
densities = st.sampled_from([1e-9, 0.01, 0.1, 0.25, 0.5, 0.99, 1.0]) | st.floats(1e-6, 1.0)


@st.composite
def vectors(draw: st.DrawFn) -> tuple[torch.Tensor, Layout]:
    """A vector of 0 to 60 elements, cut into tensors, some of them empty."""
    elements = draw(st.sampled_from([crowded, spread, st.just(1.0), st.just(0.0), st.sampled_from([0.0] * 9 + [1.0])]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    sizes = draw(st.lists(st.integers(0, 20), max_size=3))
    x = torch.tensor(draw(st.lists(elements, min_size=sum(sizes), max_size=sum(sizes))), dtype=dtype)
    return x, Layout((str(i), (size,)) for i, size in enumerate(sizes))


@given(vectors(), densities, st.integers(0, 9), st.sampled_from([0.2, 0.5, 8]))
def test_selects_what_the_reference_selects(vector, density, step, sample):
    x, layout = vector
    before = x.clone()
    round_ = Round(layout, step=step, seed=5)
    seed = round_.shared_seed()
    # Small samples, so that vectors this short are sampled.
    with mock.patch.object(compensation, "_SAMPLE", sample):
        whole = TopK(density).select(x, round_)
        by_tensor = TopK(density, scope="tensor").select(x, round_)
    assert whole.dtype == by_tensor.dtype == torch.int64
    assert whole.tolist() == top_k(x.numpy(), k_of(density, x.numel()), seed)
    assert by_tensor.tolist() == [
        s.offset + i
        for s in layout.segments
        for i in top_k(x[s.offset : s.offset + s.size].numpy(), k_of(density, s.size), seed)
    ]
    assert whole.numel() <= TopK(density).count(round_)
    assert by_tensor.numel() <= TopK(density, scope="tensor").count(round_)
    assert x.numpy().tobytes() == before.numpy().tobytes()


@pytest.mark.parametrize("density", [0.001, 0.01, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("kind", ["normal", "ties", "rare", "periodic"])
def test_long_vectors(density: float, kind: str):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(300_001, generator=generator)
    if kind == "ties":
        x = (x * 2).round()
    elif kind == "rare":
        x *= torch.rand(x.shape, generator=generator) < 0.004
    elif kind == "periodic":
        # The sample's stride: it sees none of the large elements, or nothing else.
        x[:: compensation.sample_stride(x.numel())] *= 100
    round_ = Round(Layout([("weight", (x.numel(),))]), step=3)
    selected = TopK(density).select(x, round_)
    k = min(k_of(density, x.numel()), int(x.count_nonzero()))
    assert selected.numel() == k
    assert bool((selected.diff() > 0).all())
    expected = np.sort(np.abs(x.numpy()))[x.numel() - k :]
    np.testing.assert_array_equal(np.sort(np.abs(x[selected].numpy())), expected)


def test_ties_favour_no_position():
    x = torch.ones(1000)
    layout = Layout([("weight", (1000,))])
    taken = torch.zeros(1000)
    for step in range(2000):
        taken[TopK(0.01).select(x, Round(layout, step=step))] += 1
    # 20 times each, were all alike; 8 standard deviations of a binomial leave room for the hash.
    assert taken.sum() == 20_000
    assert taken.min() > 0
    assert taken.max() < 60
    assert abs(float(taken[:500].sum()) / 20_000 - 0.5) < 0.01


def test_ties_depend_on_the_step_only():
    x = torch.ones(1000)
    layout = Layout([("weight", (1000,))])
    first, again = (TopK(0.01).select(x, Round(layout, step=1, rank=rank)) for rank in (0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, TopK(0.01).select(x, Round(layout, step=2)))


def test_density_follows_a_schedule():
    x = torch.arange(1.0, 1001.0)
    layout = Layout([("weight", (1000,))])
    warmup = TopK(DensityWarmup(0.01, steps=100, shape="inverse_time"))
    counts = [warmup.select(x, Round(layout, step=step)).numel() for step in (0, 99, 500)]
    assert counts == [round((1 - 0.99**100) * 1000), 10, 10]
    assert counts == [warmup.count(Round(layout, step=step)) for step in (0, 99, 500)]


def test_count():
    layout = Layout([("a", (100,)), ("none", (0,)), ("b", (1,)), ("c", (10,))])
    assert TopK(0.1).count(Round(layout)) == 11
    assert TopK(0.1, scope="tensor").count(Round(layout)) == 10 + 0 + 1 + 1
    assert TopK(0.1).count(Round(Layout([]))) == TopK(0.1, scope="tensor").count(Round(Layout([]))) == 0


def test_refuses_arguments_when_built():
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\].*got 100\. Did you mean 0\.01"):
        TopK(100)
    with pytest.raises(ValueError, match=r"scope must be 'model'.*or 'tensor'.*got 'layer'"):
        TopK(0.1, scope="layer")  # type: ignore[arg-type]


def one_sided(x: np.ndarray, k: int, seed: int) -> list[int]:
    """The naive thing for one tensor: both sides, and the one of larger mean."""
    sides = []
    for sign in (1, -1):
        side = [i for i, value in enumerate(x) if sign * float(value) > 0]
        taken = [side[j] for j in top_k(x[side], k, seed)]
        sides.append((float(np.abs(x[taken].astype(np.float64)).mean()) if taken else 0.0, taken))
    (above, positive), (below, negative) = sides
    return positive if above >= below else negative


def candidates_for(x: torch.Tensor, wanted: list[compensation.Wanted], surplus: int) -> list[torch.Tensor | None]:
    """All that reach the k-th largest magnitude, or a smaller one that so many more reach; or all that are not zero."""
    found: list[torch.Tensor | None] = []
    for start, stop, k in wanted:
        magnitudes = x[start:stop].abs()
        threshold = magnitudes.sort(descending=True).values[min(k + surplus, stop - start) - 1]
        reached = (magnitudes >= threshold) & (magnitudes > 0)
        found.append(reached.nonzero().view(-1) + start if surplus % 3 else None)
    return found


@given(vectors(), densities, st.integers(0, 9), st.sampled_from([0.2, 0.5, 8]), st.integers(0, 8))
def test_one_sided_selects_what_the_reference_selects(vector, density, step, sample, surplus):
    x, layout = vector
    before = x.clone()
    round_ = Round(layout, step=step, seed=5)
    selector = OneSidedTopK(density)
    wanted = selector.wanted(round_)
    assert wanted == [
        (s.offset, s.offset + s.size, min(s.size, 3 * k_of(density, s.size))) for s in layout.segments if s.size
    ]
    expected = [
        s.offset + i
        for s in layout.segments
        for i in one_sided(x[s.offset : s.offset + s.size].numpy(), k_of(density, s.size), round_.shared_seed())
    ]
    with mock.patch.object(compensation, "_SAMPLE", sample):
        selected = selector.select(x, round_)
    assert selected.dtype == torch.int64
    assert selected.tolist() == expected
    assert selector.select(x, round_, candidates_for(x, wanted, surplus)).tolist() == expected
    assert len(expected) <= selector.count(round_)
    assert x.numpy().tobytes() == before.numpy().tobytes()


def test_one_sided_finds_a_side_that_candidates_hold_little_of():
    # The largest magnitudes are negative but for one, and that outweighs all of them in its mean with 299 small ones.
    x = torch.full((3000,), 1e-3)
    x[:1500] = -torch.linspace(1, 2, 1500)
    x[2000] = 1000.0
    layout = Layout([("weight", (3000,))])
    selector = OneSidedTopK(0.1)
    expected = one_sided(x.numpy(), 300, Round(layout).shared_seed())
    assert len(expected) == 300 and 2000 in expected
    assert selector.select(x, Round(layout)).tolist() == expected
    few = candidates_for(x, selector.wanted(Round(layout)), 1)
    assert selector.select(x, Round(layout), few).tolist() == expected


def test_one_sided_prefers_the_positive_side_of_equals():
    round_ = Round(Layout([("weight", (4,))]))
    assert OneSidedTopK(0.25).select(torch.tensor([-1.0, 0.0, 1.0, 0.5]), round_).tolist() == [2]
    assert OneSidedTopK(0.25).select(torch.zeros(4), round_).tolist() == []
    assert OneSidedTopK(0.25).select(-torch.ones(4), round_).numel() == 1


def test_one_sided_follows_a_schedule_and_refuses_densities():
    x = torch.arange(1.0, 1001.0)
    layout = Layout([("weight", (1000,))])
    warmup = OneSidedTopK(DensityWarmup(0.01, steps=100, shape="inverse_time"))
    counts = [warmup.select(x, Round(layout, step=step)).numel() for step in (0, 99, 500)]
    assert counts == [round((1 - 0.99**100) * 1000), 10, 10]
    assert counts == [warmup.count(Round(layout, step=step)) for step in (0, 99, 500)]
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\].*got 100"):
        OneSidedTopK(100)


@given(vectors(), st.integers(1, 29), st.floats(0, 1, exclude_min=True))
def test_chunks_select_the_largest_of_each(vector, chunk, density):
    x, layout = vector
    round_ = Round(layout)
    selector = ChunkTopK(density, chunk)
    before = x.clone()
    selected = selector.select(x, round_)
    assert selected.dtype == torch.int64
    assert bool((selected.diff() > 0).all())
    remaining, most = selected.tolist(), 0
    for segment in layout.segments:
        for start in range(segment.offset, segment.offset + segment.size, chunk):
            stop = min(start + chunk, segment.offset + segment.size)
            wanted = max(1, round(density * (stop - start)))
            most += wanted
            taken = [i for i in remaining if start <= i < stop]
            remaining = remaining[len(taken) :]
            # By magnitude, since which of the ties are taken is torch's choice.
            magnitudes = np.sort(np.abs(x[start:stop].numpy()))[::-1][:wanted]
            assert np.sort(np.abs(x[taken].numpy()))[::-1].tolist() == magnitudes[magnitudes > 0].tolist()
    assert not remaining
    assert selector.count(round_) == most
    assert selector.wanted(round_) == ()
    assert x.numpy().tobytes() == before.numpy().tobytes()


def test_chunks_of_long_tensors():
    x = torch.randn(3 * 4096 + 1000, generator=torch.Generator().manual_seed(2))
    selected = ChunkTopK().select(x, Round(Layout([("weight", (x.numel(),))])))
    assert torch.bincount(selected // 4096).tolist() == [64, 64, 64, round(64 * 1000 / 4096)]
    for chunk in range(3):
        expected = top_k(x[4096 * chunk : 4096 * (chunk + 1)].numpy(), 64, 0)
        assert (selected[64 * chunk : 64 * (chunk + 1)] - 4096 * chunk).tolist() == expected


def test_density_of_chunks_follows_a_schedule():
    x = torch.arange(1.0, 1001.0)
    layout = Layout([("weight", (1000,))])
    selector = ChunkTopK(Stages([0.5, 0.1], steps=[0, 3]), chunk=100)
    counts = [selector.select(x, Round(layout, step=step)).numel() for step in (0, 2, 3)]
    assert counts == [500, 500, 100]
    assert counts == [selector.count(Round(layout, step=step)) for step in (0, 2, 3)]


@pytest.mark.parametrize(
    ("density", "chunk", "error", "text"),
    [
        (0, 4096, ValueError, r"density must be in \(0, 1\].*got 0"),
        (64, 4096, ValueError, r"density must be in \(0, 1\].*got 64"),
        (True, 4096, TypeError, "density must be a number.*got True"),
        (0.5, -1, ValueError, "chunk must be a whole number, at least 1.*got -1"),
        (0.5, 4096.0, ValueError, "chunk must be a whole number, at least 1.*got 4096.0"),
    ],
)
def test_chunks_refuse_arguments_when_built(density, chunk, error, text):
    with pytest.raises(error, match=text):
        ChunkTopK(density, chunk)
