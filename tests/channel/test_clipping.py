"""Each rank's own gradient is scaled down to τ·√W, whatever it is added to afterwards."""

import math
import re
from typing import Any

import pytest
import torch

from lightning_sparsecomm.basis import Layout, Round
from lightning_sparsecomm.channel import ClipLocalNorm, Contribution, StepSettings

LAYOUT = Layout([("a", (2,))])


def scale(memory: ClipLocalNorm, norm: float, max_norm: float | None = None, ranks: int = 4) -> float:
    contribution = Contribution([torch.ones(2)], StepSettings(gradient_norm=norm, max_norm=max_norm), scale=0.5)
    return memory.prepare(contribution, Round(LAYOUT, world_size=ranks)).scale / 0.5


def test_a_norm_above_the_limit_is_scaled_to_it() -> None:
    assert scale(ClipLocalNorm(3.0), norm=12.0) == pytest.approx(3 * 2 / 12)
    assert scale(ClipLocalNorm(3.0), norm=12.0, ranks=1) == pytest.approx(3 / 12)
    assert scale(ClipLocalNorm(3.0), norm=6.0) == 1
    assert scale(ClipLocalNorm(3.0), norm=0.0) == 1


def test_without_a_threshold_the_users_own_applies() -> None:
    assert scale(ClipLocalNorm(), norm=12.0) == 1
    assert scale(ClipLocalNorm(), norm=12.0, max_norm=3.0) == pytest.approx(0.5)
    assert scale(ClipLocalNorm(6.0), norm=24.0, max_norm=3.0) == pytest.approx(0.5)


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_left_for_the_exchange_to_report(norm: float) -> None:
    assert scale(ClipLocalNorm(3.0), norm=norm) == 1


@pytest.mark.parametrize("value", [0, -1.0, True, "1", math.inf, math.nan])
def test_a_threshold_that_is_not_positive_is_refused(value: Any) -> None:
    text = f"max_norm must be a positive number: the largest norm of the averaged gradient; got {value!r}."
    with pytest.raises(ValueError, match=re.escape(text)):
        ClipLocalNorm(value)
