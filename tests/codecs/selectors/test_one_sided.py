"""OneSidedTopK: the reference's positions, exactly, with hints and without."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.schedules import DensityWarmup
from lightning_sparsecomm.codecs import OneSidedTopK
from lightning_sparsecomm.codecs.selectors import candidates
from tests.codecs.selectors.vectors import densities, hints_for, vectors
from tests.reference.selection import k_of, top_k


def one_sided(x: np.ndarray, k: int, seed: int) -> list[int]:
    """The naive selection for one tensor: ranks both sides, and takes the one with the larger mean."""
    sides = []
    for sign in (1, -1):
        side = [i for i, value in enumerate(x) if sign * float(value) > 0]
        taken = [side[j] for j in top_k(x[side], k, seed)]
        sides.append((float(np.abs(x[taken].astype(np.float64)).mean()) if taken else 0.0, taken))
    (above, positive), (below, negative) = sides
    return positive if above >= below else negative


@given(vectors(), densities, st.integers(0, 9), st.sampled_from([0.2, 0.5, 8]), st.integers(0, 8))
def test_selects_what_the_reference_selects(vector, density, step, sample, surplus):
    x, layout = vector
    before = x.clone()
    context = Round(layout, step=step, seed=5)
    selector = OneSidedTopK(density)
    wanted = selector.wanted(context)
    assert wanted == [
        (s.offset, s.offset + s.size, min(s.size, 3 * k_of(density, s.size))) for s in layout.segments if s.size
    ]
    expected = [
        s.offset + i
        for s in layout.segments
        for i in one_sided(x[s.offset : s.offset + s.size].numpy(), k_of(density, s.size), context.shared_seed())
    ]
    with mock.patch.object(candidates, "_SAMPLE", sample):
        selected = selector.select(x, context)
    assert selected.dtype == torch.int64
    assert selected.tolist() == expected
    assert selector.select_hinted(x, context, hints_for(x, wanted, surplus)).tolist() == expected
    assert len(expected) <= selector.count(context)
    assert x.numpy().tobytes() == before.numpy().tobytes()


def test_finds_a_side_that_hints_hold_little_of():
    # All large elements but one are negative. With 299 small ones, that one still has the larger mean.
    x = torch.full((3000,), 1e-3)
    x[:1500] = -torch.linspace(1, 2, 1500)
    x[2000] = 1000.0
    layout = Layout([("weight", (3000,))])
    selector = OneSidedTopK(0.1)
    expected = one_sided(x.numpy(), 300, Round(layout).shared_seed())
    assert len(expected) == 300 and 2000 in expected
    assert selector.select(x, Round(layout)).tolist() == expected
    few = hints_for(x, selector.wanted(Round(layout)), 1)
    assert few
    assert selector.select_hinted(x, Round(layout), few).tolist() == expected


def test_prefers_the_positive_side_of_equals():
    context = Round(Layout([("weight", (4,))]))
    assert OneSidedTopK(0.25).select(torch.tensor([-1.0, 0.0, 1.0, 0.5]), context).tolist() == [2]
    assert OneSidedTopK(0.25).select(torch.zeros(4), context).tolist() == []
    assert OneSidedTopK(0.25).select(-torch.ones(4), context).numel() == 1


def test_follows_a_schedule_and_refuses_densities():
    x = torch.arange(1.0, 1001.0)
    layout = Layout([("weight", (1000,))])
    warmup = OneSidedTopK(DensityWarmup(0.01, steps=100, shape="inverse_time"))
    counts = [warmup.select(x, Round(layout, step=step)).numel() for step in (0, 99, 500)]
    assert counts == [round((1 - 0.99**100) * 1000), 10, 10]
    assert counts == [warmup.count(Round(layout, step=step)) for step in (0, 99, 500)]
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\].*got 100"):
        OneSidedTopK(100)
