"""TwoSidedTopK: the reference's positions, exactly, with hints and without."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.schedules import Stages
from lightning_sparsecomm.codecs import TwoSidedTopK
from lightning_sparsecomm.codecs.selectors import candidates
from tests.codecs.selectors.vectors import densities, hints_for, vectors
from tests.reference.selection import k_of, top_k


def two_sided(x: np.ndarray, density: float, seed: int) -> list[int]:
    """The naive selection for one tensor: ranks both sides."""
    taken = []
    for sign in (1, -1):
        side = [i for i, value in enumerate(x) if sign * float(value) > 0]
        taken += [side[j] for j in top_k(x[side], k_of(density, len(side)), seed)]
    return sorted(taken)


@given(vectors(), densities, st.integers(0, 9), st.sampled_from([0.2, 0.5, 8]), st.integers(0, 8))
def test_selects_what_the_reference_selects(vector, density, step, sample, surplus):
    x, layout = vector
    before = x.clone()
    context = Round(layout, step=step, seed=5)
    selector = TwoSidedTopK(density)
    expected = [
        s.offset + i
        for s in layout.segments
        for i in two_sided(x[s.offset : s.offset + s.size].numpy(), density, context.shared_seed())
    ]
    with mock.patch.object(candidates, "_SAMPLE", sample):
        selected = selector.select(x, context)
    assert selected.dtype == torch.int64
    assert selected.tolist() == expected
    assert selector.select_hinted(x, context, hints_for(x, selector.wanted(context), surplus)).tolist() == expected
    assert len(expected) <= selector.count(context)
    assert x.numpy().tobytes() == before.numpy().tobytes()


@given(st.integers(0, 60), densities)
def test_count_is_reached_by_some_signs(size, density):
    """It is no more than one above what the worst signs need."""
    layout = Layout([("weight", (size,))])
    most = max((k_of(density, m) if m else 0) + (k_of(density, size - m) if size > m else 0) for m in range(size + 1))
    assert most <= TwoSidedTopK(density).count(Round(layout)) <= most + 1


def test_finds_a_sign_that_hints_hold_little_of():
    # All large elements but one are negative.
    x = torch.full((3000,), 1e-3)
    x[:1500] = -torch.linspace(1, 2, 1500)
    x[2000] = 1000.0
    layout = Layout([("weight", (3000,))])
    selector = TwoSidedTopK(0.1)
    expected = two_sided(x.numpy(), 0.1, Round(layout).shared_seed())
    assert len(expected) == 300 and 2000 in expected
    assert selector.select(x, Round(layout)).tolist() == expected
    few = hints_for(x, selector.wanted(Round(layout)), 1)
    assert few
    assert selector.select_hinted(x, Round(layout), few).tolist() == expected


def test_follows_a_schedule_and_refuses_densities():
    x = torch.arange(1.0, 1001.0)
    layout = Layout([("weight", (1000,))])
    selector = TwoSidedTopK(Stages([0.5, 0.01], steps=[0, 10]))
    assert selector.select(x, Round(layout)).numel() == 500
    assert selector.select(x, Round(layout, step=10)).numel() == 10
    with pytest.raises(ValueError, match="density must be in"):
        TwoSidedTopK(0)
