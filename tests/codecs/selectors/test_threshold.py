"""Threshold: all elements that reach it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.codecs import Threshold
from tests.codecs.selectors.vectors import vectors


@given(vectors(), st.sampled_from([1.0, 2.0, 1e-30, 3e38]))
def test_selects_what_reaches_it(vector, threshold):
    x, layout = vector
    selector, context = Threshold(threshold), Round(layout)
    expected = [i for i, value in enumerate(x.double().tolist()) if abs(value) >= float(x.new_tensor(threshold))]
    selected = selector.select(x, context)
    assert selected.dtype == torch.int64
    assert selected.tolist() == expected
    assert selector.count(context) == layout.size


@pytest.mark.parametrize("threshold", [0, -1.0, math.inf, math.nan, True, "0.1"])
def test_refuses(threshold):
    with pytest.raises(ValueError, match=r"threshold must be positive and finite: the magnitude .* got .* Use 0.01"):
        Threshold(threshold)
