"""Densities and steps between exchanges: plain numbers, or schedules of them; and what replaces densities early on."""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from lightning_sparsecomm.basis.arguments import check_whole_number, is_number, is_whole_number

# The least number that counts as one step.
_LEAST = 0.5


class Schedule(ABC):
    """A number for each optimizer step of a run. Frozen and pure: it has no state of its own.

    >>> class Halved(Schedule):
    ...     def at(self, step: int, epoch: float) -> float:
    ...         return 0.1 * 0.5**int(epoch)
    >>> Halved().at(step=0, epoch=2.5)
    0.025
    """

    @abstractmethod
    def at(self, step: int, epoch: float) -> float:
        """The number for the optimizer step after `step` finished ones, `epoch` epochs (with fraction) into the run."""

    def for_length(self, steps: float) -> "float | Schedule":
        """The schedule of a run of so many optimizer steps, infinite where unknown; itself unless it depends on it."""
        return self

    @property
    def warmup(self) -> "Warmup | None":
        """The warm-up after which the schedule keeps its last value; None where no such warm-up is known."""
        return None

    @property
    def bounds(self) -> Sequence[float]:
        """The least and the greatest number that `at` returns; empty where they are not known."""
        return ()


Density = float | Schedule
"""A fraction of elements in (0, 1], or a schedule of such fractions."""

Every = int | Schedule
"""A number of optimizer steps, at least 1, or a schedule of such numbers. A schedule's numbers are rounded."""


def check_density(name: str, density: Density) -> None:
    """Raises `ValueError` for a number, or a schedule with numbers, outside (0, 1], and `TypeError` for anything else.

    A schedule without known bounds passes.
    """
    if isinstance(density, Schedule):
        for number in density.bounds:
            if not 0 < number <= 1:
                raise _scheduled_wrong(f"{name} must be in (0, 1]", number, density)
        return
    if not is_number(density):
        raise TypeError(f"{name} must be a number in (0, 1] or a Schedule; got {density!r}. {_number_in(density)}")
    if not 0 < density <= 1:
        likely = 1 < density < math.inf
        hint = f"Did you mean {1 / density:g}?" if likely else "Use 0.01 for a hundredth, or dense() for everything."
        raise ValueError(f"{name} must be in (0, 1]: the fraction of elements sent; got {density!r}. {hint}")


def _number_in(density: object) -> str:
    """What to write instead of a text such as "0.1%"."""
    if isinstance(density, str):
        text, percent = density.strip().removesuffix("%").strip(), density.strip().endswith("%")
        try:
            number = float(text) / (100 if percent else 1)
        except ValueError:
            number = math.nan
        if 0 < number <= 1:
            return f"Did you mean {number:g}, without quotes?"
    return "Use 0.01 for a hundredth."


def check_every(name: str, every: Every) -> None:
    """Raises `ValueError` unless `every` is a whole number, at least 1, or a schedule of numbers that round to such.

    A schedule without known bounds passes.
    """
    if isinstance(every, Schedule):
        for number in every.bounds:
            if number < _LEAST:
                raise _scheduled_wrong(f"{name} must be a number of optimizer steps, at least 1", number, every)
    elif not is_whole_number(every) or every < 1:
        rule = "must be a whole number of optimizer steps, at least 1"
        raise ValueError(f"{name} {rule}; got {every!r}. Use 1 or more.")


def density_at(density: Density, step: int, epoch: float) -> float:
    """The density for one optimizer step. Raises `ValueError` if a schedule returns no number in (0, 1]."""
    if not isinstance(density, Schedule):
        return density
    number = density.at(step, epoch)
    if not (isinstance(number, (int, float)) and 0 < number <= 1):
        raise _scheduled_wrong("density must be in (0, 1]", number, density, f" for step {step}, epoch {epoch:.2f}")
    return number


def every_at(every: Every, step: int, epoch: float) -> int:
    """How many optimizer steps to wait. Raises `ValueError` if a schedule's number does not round to 1 or more."""
    if not isinstance(every, Schedule):
        return every
    number = every.at(step, epoch)
    if not (isinstance(number, (int, float)) and _LEAST <= number <= sys.float_info.max):
        rule = "every must be a number of optimizer steps, at least 1"
        raise _scheduled_wrong(rule, number, every, f" for step {step}, epoch {epoch:.2f}")
    return max(1, round(number))


def every_for(every: Every, length: float) -> Every:
    """The steps between exchanges in a run of so many optimizer steps, infinite where unknown."""
    if not isinstance(every, Schedule):
        return every
    known = every.for_length(length)
    return known if isinstance(known, Schedule) else max(1, round(known))


def exchanges_in(step: int, every: int, since: int, ends_epoch: bool) -> bool:
    """Whether ranks exchange in a step, if they do in every so-many-th one and in the last one of each epoch.

    One that would follow an epoch's end by no more than half of these steps is left out, so that ends of epochs cost
    few exchanges.

    Args:
        step: Optimizer steps finished before.
        every: Steps between two exchanges.
        since: Steps since the last exchange, this one included.
        ends_epoch: Whether an epoch ends with this step.
    """
    return ends_epoch or (step % every == 0 and 2 * since > every)


def least_every(every: Every) -> int:
    """The least number that `every_at` can return; 1 where the schedule's bounds are not known."""
    return max(1, round(min(every.bounds, default=1))) if isinstance(every, Schedule) else every


def most_every(every: Every) -> float:
    """The largest number that `every_at` can return; infinity where the schedule's bounds are not known."""
    if not isinstance(every, Schedule):
        return every
    return max(1.0, round(max(every.bounds))) if every.bounds else math.inf


def _scheduled_wrong(rule: str, number: object, schedule: Schedule, when: str = "") -> ValueError:
    return ValueError(f"{rule}; got {number!r} from {schedule!r}{when}. Correct the schedule.")


@dataclass(frozen=True)
class Warmup:
    """Sends more in the first steps or epochs, while weights and gradients change quickly.

    - "exponential": T is cut into one stage for each epoch, or into 4 stages if it is counted in steps. The density in
      stage e of E is p^((e+1)/(E+1)). For p = 0.001 and 4 stages: 0.251, 0.063, 0.016, 0.004, and then 0.001.
    - "inverse_time": the drop ratio at step t (1, 2, …) is (1 - p)^max(1, T/t). At first almost everything is sent.

    Source: Deep Gradient Compression, section 3.3; Combining Global Sparse Gradients with Local Gradients, section 3.4.

    >>> [round(Warmup(epochs=4).density(0.001, 0, epoch), 3) for epoch in range(6)]
    [0.251, 0.063, 0.016, 0.004, 0.001, 0.001]

    Args:
        steps: T in optimizer steps; 0 if it is counted in epochs.
        epochs: T in epochs; 0 if it is counted in steps.
        shape: How the density falls, or a list of densities for stages of equal length.

    Raises:
        ValueError: `steps` and `epochs` are both 0 or both positive, or one is negative; `shape` is an unknown name, an
            empty list, or holds a density outside (0, 1].
        TypeError: `shape` is neither a name nor a list of numbers.
    """

    steps: int = 0
    epochs: int = 0
    shape: Literal["exponential", "inverse_time"] | Sequence[float] = "exponential"

    def __post_init__(self) -> None:
        check_whole_number("steps", self.steps, 0, "the warm-up's length", "Use 1000, for example.")
        check_whole_number("epochs", self.epochs, 0, "the warm-up's length", "Use 4, for example.")
        if (self.steps == 0) == (self.epochs == 0):
            raise ValueError(
                "steps or epochs must be at least 1, and only one of them: the warm-up's length; got"
                f" steps={self.steps}, epochs={self.epochs}. Give one of them."
            )
        if isinstance(self.shape, str):
            if self.shape not in ("exponential", "inverse_time"):
                raise ValueError(
                    f"shape must be 'exponential', 'inverse_time' or a list of densities; got {self.shape!r}."
                    " Use 'exponential', for example."
                )
        elif not isinstance(self.shape, Sequence):
            raise TypeError(
                f"shape must be a name or a list of densities; got {self.shape!r}. Use [0.25, 0.05], for example."
            )
        else:
            densities = tuple(cast("Sequence[float]", self.shape))
            object.__setattr__(self, "shape", densities)
            if not densities:
                raise ValueError("shape must not be an empty list. Give one density for each stage.")
            for index, density in enumerate(densities):
                check_density(f"shape[{index}]", density)

    def density(self, density: float, step: int, epoch: float) -> float:
        """What to send instead of `density`, the method's own; `step` and `epoch` as in `Schedule.at`."""
        length = self.steps or self.epochs
        done = step if self.steps else epoch
        if self.shape == "inverse_time":
            # Steps count from 1. Epochs count from 0, by which nothing can be divided.
            time = step + 1 if self.steps else max(epoch, 1e-9)
            return 1 - float((1 - density) ** max(1.0, length / time))
        if done >= length:
            return density
        if isinstance(self.shape, str):
            # Counted in steps, as many stages as the paper's warm-up has epochs.
            stages = self.epochs or 4
            return float(density ** ((int(done * stages / length) + 1) / (stages + 1)))
        return self.shape[int(done * len(self.shape) / length)]

    def unfinished(self, steps: float, epochs: float) -> str | None:
        """Says that the warm-up outlasts a run of so many steps and epochs; None if it does not."""
        for name, length, available in (("steps", self.steps, steps), ("epochs", self.epochs, epochs)):
            if length and length >= available:
                return f"{length:,} {name} of warm-up in a run of {available:,.0f}"
        return None
