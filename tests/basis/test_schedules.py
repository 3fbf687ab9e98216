"""Schedules: their numbers, and what they refuse."""

import dataclasses
import math
import re
from typing import Any

import pytest

from lightning_sparsecomm.basis import Layout, Round
from lightning_sparsecomm.basis.schedules import (
    ByLength,
    DensityWarmup,
    Exponential,
    Stages,
    Warmup,
    check_every,
    density_at,
    warmed,
)
from tests.basis.test_scheduled import Odd


def test_inverse_time_warmup() -> None:
    schedule = DensityWarmup(density=0.01, steps=1000, shape="inverse_time")
    # R_t = R^max(1, T/t) with R = 0.99, T = 1000, at t = 1, 500, 1000, 5000.
    for step, ratio in ((0, 1000.0), (499, 2.0), (999, 1.0), (4999, 1.0)):
        assert schedule.at(step, 0.0) == pytest.approx(1 - 0.99**ratio)
    densities = [schedule.at(step, 0.0) for step in range(1200)]
    assert densities == sorted(densities, reverse=True)
    assert all(0 < density <= 1 for density in densities)
    assert density_at(schedule, 999, 0.0) == pytest.approx(0.01)


def test_exponential_warmup() -> None:
    # p^((e+1)/(E+1)) with p = 0.001 and E = 4 epochs, whatever the step.
    epochs = DensityWarmup(0.001, epochs=4)
    expected = [0.001 ** (stage / 5) for stage in (1, 1, 2, 3, 4, 5, 5)]
    assert [epochs.at(7, epoch) for epoch in (0, 0.99, 1, 2.5, 3, 4, 9)] == pytest.approx(expected)
    # Counted in steps, four stages of equal length.
    steps = DensityWarmup(0.001, steps=1000)
    assert [steps.at(step, 99.0) for step in (0, 249, 250, 500, 750, 1000, 5000)] == pytest.approx(expected)
    listed = DensityWarmup(0.001, steps=10, shape=[0.5, 0.1])
    assert [listed.at(step, 0.0) for step in (0, 4, 5, 9, 10)] == [0.5, 0.5, 0.1, 0.1, 0.001]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Stages(["a"], steps=[0]), TypeError, "numbers must be a list of numbers; got ['a']. Use [1, 10]"),
        (lambda: Stages([1], epochs=[None]), TypeError, "epochs must be a list of numbers; got [None]. Use [0, 1000]"),
        *[
            (
                lambda steps=steps: Stages([1, 2], steps=steps),
                TypeError,
                f"steps must be a list of whole numbers; got {steps!r}. Use [0, 1000]",
            )
            for steps in ([0, 1.5], [0, True], 5, "01")
        ],
        *[
            (
                lambda numbers=numbers: Stages(numbers, steps=range(len(numbers))),
                ValueError,
                f"numbers must be positive and finite: densities, or optimizer steps; got {numbers!r}. Use",
            )
            for numbers in ([1, math.nan], [0, 1], [-1], [math.inf])
        ],
        (
            lambda: Stages([1]),
            ValueError,
            "steps or epochs must say when each number begins, and only one of them; got",
        ),
        (lambda: Stages([1], [0], [0]), ValueError, "and only one of them; got steps=[0], epochs=[0]. Give steps=[0"),
        (lambda: Stages([1, 2], steps=[0, 0]), ValueError, "steps must start at 0 and increase, with one for each of"),
        (lambda: Stages([1, 2], steps=[1, 2]), ValueError, "the 2 numbers; got [1, 2]. Use steps=[0, 1000]"),
        (lambda: Stages([1, 2], epochs=[0, math.nan]), ValueError, "epochs must start at 0 and increase, with one for"),
        (lambda: Stages([1, 2], epochs=[0]), ValueError, "epochs must start at 0 and increase, with one for each of"),
        (lambda: Exponential(1, math.inf, 10), ValueError, "last must be a positive, finite number, as every"),
        (lambda: Exponential("1", 2, steps=10), ValueError, "first must be a positive, finite number, as every"),
        (lambda: Exponential(0, 2, steps=10), ValueError, "number of an exponential is; got 0. Use 0.1"),
        (lambda: Exponential(1, 2, steps=0), ValueError, "steps must be a whole number of optimizer steps, at least 1"),
        (
            lambda: Warmup(),
            ValueError,
            "steps or epochs must be at least 1, and only one of them: the warm-up's length",
        ),
        (lambda: Warmup(5, 5), ValueError, "the warm-up's length; got steps=5, epochs=5. Give one of them."),
        (lambda: Warmup(-1), ValueError, "steps must be a whole number, 0 or more: the warm-up's length; got -1. Use"),
        (lambda: Warmup(epochs=1.5), ValueError, "epochs must be a whole number, 0 or more: the warm-up's length; got"),
        (lambda: Warmup(True), ValueError, "steps must be a whole number, 0 or more: the warm-up's length; got True."),
        (lambda: Warmup(5, shape="linear"), ValueError, "shape must be 'exponential', 'inverse_time' or a list of"),
        (lambda: Warmup(5, shape=0.5), TypeError, "shape must be a name or a list of densities; got 0.5. Use [0.25"),
        (lambda: Warmup(5, shape=[]), ValueError, "shape must not be an empty list. Give one density for each stage."),
        (lambda: Warmup(5, shape=[0.1, 25]), ValueError, "shape[1] must be in (0, 1]: the fraction of elements sent;"),
        (lambda: Warmup(5, shape=["a"]), TypeError, "shape[0] must be a number in (0, 1] or a Schedule; got 'a'."),
        (lambda: ByLength(steps=0), ValueError, "steps must be a positive number of optimizer steps; got 0. Use 1000"),
        (
            lambda: DensityWarmup(100, 5),
            ValueError,
            "density must be in (0, 1]: the fraction of elements sent; got 100.",
        ),
        (
            lambda: DensityWarmup(Odd(1), 5),
            TypeError,
            "density must be a number in (0, 1]; got Odd(number=1). Use that",
        ),
        (
            lambda: warmed(0.1, -1, None),
            ValueError,
            "warmup_steps must be a whole number, 0 or more; got",
        ),
        (
            lambda: warmed(0.1, 0, 1.5),
            ValueError,
            "warmup_epochs must be a whole number, 0 or more; got",
        ),
        (lambda: warmed(2, 0, None), ValueError, "density must be in (0, 1]: the fraction of elements"),
        (
            lambda: check_every("h", 0),
            ValueError,
            "h must be a whole number of optimizer steps, at least 1; got 0. Use 1",
        ),
        (
            lambda: check_every("h", True),
            ValueError,
            "h must be a whole number of optimizer steps, at least 1; got True",
        ),
    ],
)
def test_refuses(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        make()


def test_a_method_is_warmed_up_by_steps_or_epochs_or_not_at_all() -> None:
    assert warmed(0.1, 0, None) == warmed(0.1, None, 0, 7) == 0.1
    assert warmed(0.1, 9, None, 7) == DensityWarmup(0.1, steps=9)
    assert warmed(0.1, None, None, 7) == DensityWarmup(0.1, steps=7)
    assert warmed(0.1, None, None) == 0.1
    assert warmed(0.1, None, 4, 7, "inverse_time") == DensityWarmup(0.1, epochs=4, shape="inverse_time")
    schedule = Stages([1, 0.1], steps=[0, 5])
    assert warmed(schedule, 9, None) is schedule


@pytest.mark.parametrize(
    ("step", "supposed"), [(0, 1000), (249, 1000), (250, 1004), (499, 2000), (1249, 5000), (10**6, 5000)]
)
def test_a_run_of_unknown_length_counts_as_four_times_the_steps_made(step: int, supposed: int) -> None:
    density, context = ByLength(), Round(Layout([]), step=step)
    assert context.density(density) == density.for_length(supposed)
    assert context.density(ByLength(unknown=0.02)) == 0.02
    assert dataclasses.replace(context, length=300).density(density) == density.for_length(300)
    # So does one that may end sooner, up to its length.
    for length in (300, 2000, 10**6):
        sooner = dataclasses.replace(context, length=length, may_end_sooner=True)
        assert sooner.density(density) == density.for_length(min(length, supposed))
