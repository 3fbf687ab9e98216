"""What may follow a schedule: densities, steps between exchanges, warm-ups; and what a schedule may not give."""

import math
from dataclasses import dataclass
from typing import Any

import pytest

from lightning_sparsecomm.basis.scheduled import (
    Schedule,
    Warmup,
    check_density,
    check_every,
    density_at,
    every_at,
    least_every,
    most_every,
)
from lightning_sparsecomm.basis.schedules import Exponential, Stages


def test_a_warmup_says_when_it_outlasts_the_run() -> None:
    assert Warmup(steps=100).unfinished(101, 1) is None
    assert Warmup(steps=100).unfinished(100, 1) == "100 steps of warm-up in a run of 100"
    assert Warmup(epochs=4).unfinished(1e9, 3) == "4 epochs of warm-up in a run of 3"


@dataclass(frozen=True)
class Odd(Schedule):
    number: Any

    def at(self, step: int, epoch: float) -> Any:
        return self.number


def test_schedules_must_give_numbers() -> None:
    rule = "every must be a number of optimizer steps, at least 1; got"
    for number in (math.nan, 0.2, "x", math.inf, 0, None):
        with pytest.raises(
            ValueError, match=rf"{rule} {number!r} from Odd\(.*\) for step 0, epoch 0\.00\. Correct the"
        ):
            every_at(Odd(number), 0, 0.0)
    for number in (0, 1.5, math.nan, -1, "x", None):
        text = rf"density must be in \(0, 1\]; got {number!r} from Odd\(.*\) for step 3, epoch 0\.50\. Correct the"
        with pytest.raises(ValueError, match=text):
            density_at(Odd(number), 3, 0.5)
    assert [every_at(every, 5, 0.0) for every in (7, Odd(0.5), Odd(2.6), Stages([1, 9], steps=[0, 5]))] == [7, 1, 3, 9]
    assert [density_at(density, 5, 0.0) for density in (0.5, Odd(1), Stages([1, 0.1], steps=[0, 5]))] == [0.5, 1, 0.1]
    # Bounds that are known are checked when a part is built.
    with pytest.raises(ValueError, match=r"p must be in \(0, 1\]; got 10 from Stages\(.*\)\. Correct the schedule"):
        check_density("p", Stages([0.1, 10], steps=[0, 100]))
    with pytest.raises(
        ValueError, match=r"h must be a number of optimizer steps, at least 1; got 0\.1 from Exponential"
    ):
        check_every("h", Exponential(10, 0.1, steps=100))
    check_density("p", Odd(10))
    check_every("h", Odd(0))
    assert [least_every(every) for every in (4, Stages([9, 3], steps=[0, 5]), Odd(7))] == [4, 3, 1]
    assert [most_every(every) for every in (4, Stages([3, 9], steps=[0, 5]), Odd(7))] == [4, 9, math.inf]
