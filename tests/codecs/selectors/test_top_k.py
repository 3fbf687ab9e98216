"""TopK: the reference's positions, exactly, whatever the ties, zeros and samples."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.schedules import DensityWarmup
from lightning_sparsecomm.codecs import TopK
from lightning_sparsecomm.codecs.selectors import candidates
from lightning_sparsecomm.codecs.selectors.candidates import sample_stride
from tests.codecs.selectors.vectors import densities, hints_for, vectors
from tests.reference.selection import k_of, top_k


@given(vectors(), densities, st.integers(0, 9), st.sampled_from([0.2, 0.5, 8]), st.integers(0, 8))
def test_selects_what_the_reference_selects(vector, density, step, sample, surplus):
    x, layout = vector
    before = x.clone()
    context = Round(layout, step=step, seed=5)
    seed = context.shared_seed()
    # With a small sample, even vectors this short are sampled.
    with mock.patch.object(candidates, "_SAMPLE", sample):
        whole = TopK(density).select(x, context)
        by_tensor = TopK(density, scope="tensor").select(x, context)
    assert whole.dtype == by_tensor.dtype == torch.int64
    assert whole.tolist() == top_k(x.numpy(), k_of(density, x.numel()), seed)
    assert by_tensor.tolist() == [
        s.offset + i
        for s in layout.segments
        for i in top_k(x[s.offset : s.offset + s.size].numpy(), k_of(density, s.size), seed)
    ]
    for selector, selected in ((TopK(density), whole), (TopK(density, scope="tensor"), by_tensor)):
        assert selected.numel() <= selector.count(context)
        hints = hints_for(x, selector.wanted(context), surplus)
        assert torch.equal(selector.select_hinted(x, context, hints), selected)
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
        # Large at the sample's stride: the sample sees only large elements.
        x[:: sample_stride(x.numel())] *= 100
    context = Round(Layout([("weight", (x.numel(),))]), step=3)
    selected = TopK(density).select(x, context)
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
    # 20 times each on average. 8 standard deviations of a binomial leave room for the hash.
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
    with pytest.raises(ValueError, match=r"scope must be one of model, tensor, balanced; got 'layer'"):
        TopK(0.1, scope="layer")  # type: ignore[arg-type]
