"""Numbers that change during training. A schedule is accepted wherever a density is."""

import bisect
import itertools
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from lightning_sparsecomm.checks import is_number

# Of a warm-up that is counted in steps: the paper's warm-up has four epochs.
STAGES = 4


class Schedule(ABC):
    """A number for each optimizer step of a run. Frozen and pure: it has no state of its own."""

    @abstractmethod
    def at(self, step: int, epoch: float) -> float:
        """The number for the step after `step` finished ones, `epoch` epochs (with fraction) into training."""

    @property
    def warmup(self) -> "Warmup | None":
        """When the schedule has reached its last value; None where that is not known."""
        return None

    @property
    def bounds(self) -> Sequence[float]:
        """Between which all numbers are that it gives; none where that is not known."""
        return ()


Density = float | Schedule
Every = int | Schedule


@dataclass(frozen=True)
class Stages(Schedule):
    """One number after the other, each from a given moment on.

    >>> [Stages([1, 10, 100], steps=[0, 50, 500]).at(step, 0.0) for step in (0, 49, 50, 1000)]
    [1, 1, 10, 100]

    Args:
        numbers: In order, such as densities, or steps between two exchanges.
        steps: When each begins, in optimizer steps: 0 first, then increasing.
        epochs: When each begins, in epochs, instead.

    Raises:
        ValueError: Both or neither of steps and epochs, not one for each number, or not increasing from 0; a number
            that is not positive and finite.
        TypeError: One of them is no list of numbers; of steps, of whole ones.
    """

    numbers: Sequence[float]
    steps: Sequence[int] = ()
    epochs: Sequence[float] = ()

    def __post_init__(self) -> None:
        for name in ("numbers", "steps", "epochs"):
            given, kinds = getattr(self, name), int if name == "steps" else (int, float)
            listed = isinstance(given, Sequence) and not isinstance(given, str)
            if not listed or any(isinstance(each, bool) or not isinstance(each, kinds) for each in given):
                whole = "whole numbers" if name == "steps" else "numbers"
                raise TypeError(
                    f"{name} of a schedule must be a list of {whole}; got {given!r}. Use [1, 10], for example."
                )
            object.__setattr__(self, name, tuple(given))
        if bool(self.steps) == bool(self.epochs):
            raise ValueError(
                f"stages begin either at steps or at epochs; got steps={self.steps}, epochs={self.epochs}."
                " Give one of them, such as steps=[0, 1000]."
            )
        if not all(0 < number < math.inf for number in self.numbers):
            raise ValueError(
                f"numbers of a schedule must be positive and finite: densities, or optimizer steps; got"
                f" {list(self.numbers)!r}. Use [0.1, 0.001], for example."
            )
        begins = self.steps or self.epochs
        rising = all(a < b < math.inf for a, b in itertools.pairwise(begins))
        if len(begins) != len(self.numbers) or begins[0] != 0 or not rising:
            raise ValueError(
                f"stages must begin at 0 and then later and later, one beginning for each of the {len(self.numbers)}"
                f" numbers; got {list(begins)}."
            )

    def at(self, step: int, epoch: float) -> float:
        done = step if self.steps else epoch
        return self.numbers[bisect.bisect_right(self.steps or self.epochs, done) - 1]

    @property
    def bounds(self) -> Sequence[float]:
        return min(self.numbers), max(self.numbers)


@dataclass(frozen=True)
class Exponential(Schedule):
    """From one number to another along an exponential, and then the other.

    >>> [Exponential(0.1, 0.001, steps=100).at(step, 0.0) for step in (0, 50, 100, 200)]
    [0.1, 0.01, 0.001, 0.001]

    Args:
        first: The number of step 0.
        last: The number from `steps` on.
        steps: How many optimizer steps it takes.

    Raises:
        ValueError: A number that is not positive, or `steps` below 1.
    """

    first: float
    last: float
    steps: int

    def __post_init__(self) -> None:
        if not all(is_number(number) and 0 < number < math.inf for number in (self.first, self.last)):
            raise ValueError(
                f"first and last must be positive numbers, which an exponential can join; got {self.first!r} and"
                f" {self.last!r}. Use 0.1 and 0.001, for example."
            )
        check_every("steps", self.steps)

    def at(self, step: int, epoch: float) -> float:
        if step >= self.steps:
            return self.last
        # Rounded, so that 0.1 and 0.001 meet in 0.01.
        return float(f"{self.first * (self.last / self.first) ** (step / self.steps):.15g}")

    @property
    def bounds(self) -> Sequence[float]:
        return min(self.first, self.last), max(self.first, self.last)


@dataclass(frozen=True)
class Warmup:
    """Sends more in the first steps or epochs, while weights and gradients change quickly.

    - "exponential": T is cut into as many stages as there are epochs, or into 4; in stage e of E the density is
      p^((e+1)/(E+1)). With p = 0.001 and 4 stages: 0.251, 0.063, 0.016, 0.004, and then 0.001.
    - "inverse_time": drop ratio (1 - p)^max(1, T/t) at step t (1, 2, …): all but everything at first.

    Source: Deep Gradient Compression, section 3.3; Combining Global Sparse Gradients with Local Gradients, section 3.4.

    >>> [round(Warmup(epochs=4).density(0.001, 0, epoch), 3) for epoch in range(6)]
    [0.251, 0.063, 0.016, 0.004, 0.001, 0.001]

    Args:
        steps: T in optimizer steps; 0 where it is counted in epochs.
        epochs: T in epochs; 0 where it is counted in steps.
        shape: How the density falls, or a list of densities for stages of equal length.

    Raises:
        ValueError: Both or neither of steps and epochs, one that is negative, an unknown shape, or a density outside
            (0, 1].
    """

    steps: int = 0
    epochs: int = 0
    shape: Literal["exponential", "inverse_time"] | Sequence[float] = "exponential"

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("epochs", self.epochs)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"a warm-up's {name} must be a whole number, 0 or more; got {value!r}.")
        if (self.steps == 0) == (self.epochs == 0):
            raise ValueError(
                f"a warm-up is counted either in steps or in epochs; got steps={self.steps}, epochs={self.epochs}."
                " Give one of them, at least 1."
            )
        if isinstance(self.shape, str):
            if self.shape not in ("exponential", "inverse_time"):
                raise ValueError(
                    "a warm-up's shape must be 'exponential', 'inverse_time' or a list of densities;"
                    f" got {self.shape!r}."
                )
        elif not isinstance(self.shape, Sequence):
            raise TypeError(f"a warm-up's shape must be a name or a list of densities; got {self.shape!r}.")
        else:
            densities = tuple(cast("Sequence[float]", self.shape))
            object.__setattr__(self, "shape", densities)
            if not densities:
                raise ValueError("a warm-up's list of densities must not be empty. Give one density for each stage.")
            for density in densities:
                check_density("each density of a warm-up", density)

    def density(self, density: float, step: int, epoch: float) -> float:
        """What is sent instead of `density`, which is the method's own."""
        length = self.steps or self.epochs
        done = step if self.steps else epoch
        if self.shape == "inverse_time":
            # Steps are counted from 1; of epochs, a first one has begun.
            time = step + 1 if self.steps else max(epoch, 1e-9)
            return 1 - float((1 - density) ** max(1.0, length / time))
        if done >= length:
            return density
        if isinstance(self.shape, str):
            stages = self.epochs or STAGES
            return float(density ** ((int(done * stages / length) + 1) / (stages + 1)))
        return self.shape[int(done * len(self.shape) / length)]

    def unfinished(self, steps: float, epochs: float) -> str | None:
        """How it outlasts a run of so many steps and epochs, in words; None where it does not."""
        for name, length, available in (("steps", self.steps, steps), ("epochs", self.epochs, epochs)):
            if length and length >= available:
                return f"{length:,} {name} of warm-up in a run of {available:,.0f}"
        return None


@dataclass(frozen=True)
class DensityWarmup(Schedule):
    """A density with a warm-up before it.

    Args:
        density: Fraction of elements sent once warm, in (0, 1].
        steps: The warm-up's length in optimizer steps; 0 where it is counted in epochs.
        epochs: The warm-up's length in epochs; 0 where it is counted in steps.
        shape: How the density falls: "exponential", "inverse_time", or a list of densities for stages of equal length.

    Raises:
        ValueError: As `Warmup` says, or a density outside (0, 1].
    """

    density: float
    steps: int = 0
    epochs: int = 0
    shape: Literal["exponential", "inverse_time"] | Sequence[float] = "exponential"

    def __post_init__(self) -> None:
        check_density("density", self.density)
        object.__setattr__(self, "shape", self.warmup.shape)

    @property
    def warmup(self) -> Warmup:
        return Warmup(self.steps, self.epochs, self.shape)

    def at(self, step: int, epoch: float) -> float:
        return self.warmup.density(self.density, step, epoch)

    @property
    def bounds(self) -> Sequence[float]:
        stages = (1.0,) if isinstance(self.shape, str) else self.shape
        return min(self.density, *stages), max(self.density, *stages)


def warmed(density: Density, steps: int, epochs: int | None, shape: Literal["exponential", "inverse_time"]) -> Density:
    """`density` after a warm-up of `steps`, or of `epochs` where given; none if that is 0.

    A schedule is left as it is: it has said what is sent when.

    Raises:
        ValueError: A density outside (0, 1], or a negative length.
    """
    check_density("density", density)
    for name, value in (("warmup_steps", steps), ("warmup_epochs", epochs)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ValueError(f"{name} must be a whole number, 0 or more; got {value!r}. Use 0 for no warm-up.")
    length = steps if epochs is None else epochs
    if isinstance(density, Schedule) or length == 0:
        return density
    return DensityWarmup(density, 0 if epochs is not None else steps, epochs or 0, shape)


def check_density(name: str, density: Density) -> None:
    """Refuses a density outside (0, 1], naming the parameter; a schedule whose numbers are not known is trusted.

    Raises:
        ValueError: `density` is a number outside (0, 1], or a schedule that gives one.
        TypeError: `density` is neither a number nor a schedule.
    """
    if isinstance(density, Schedule):
        for number in density.bounds:
            if not 0 < number <= 1:
                raise ValueError(f"{name} must be in (0, 1]: {_given(density, number)}")
        return
    if not is_number(density):
        raise TypeError(f"{name} must be a number in (0, 1] or a Schedule; got {density!r}. Use 0.01 for a hundredth.")
    if not 0 < density <= 1:
        likely = 1 < density < math.inf
        hint = f"Did you mean {1 / density:g}?" if likely else "Use 0.01 for a hundredth, or dense() for everything."
        raise ValueError(f"{name} must be in (0, 1]: the fraction of elements sent; got {density!r}. {hint}")


def _given(schedule: Schedule, number: object, when: str = "") -> str:
    return f"{schedule!r} gives {number!r}{when}. Mend the schedule."


def value_at(density: Density, step: int, epoch: float) -> float:
    """`density` itself, or the schedule's value.

    Raises:
        ValueError: The schedule gives something outside (0, 1].
    """
    return _at("density", "in (0, 1]", density, step, epoch) if isinstance(density, Schedule) else density


def _at(name: str, rule: str, schedule: Schedule, step: int, epoch: float) -> float:
    number = schedule.at(step, epoch)
    least, most = (0.0, 1.0) if name == "density" else (0.5, sys.float_info.max)
    if not (isinstance(number, (int, float)) and least <= number <= most and number):
        when = f" for step {step}, epoch {epoch:.2f}"
        raise ValueError(f"{name} must be {rule}; {_given(schedule, number, when)}")
    return number


_RULE = "a number of optimizer steps, at least 1"


def check_every(name: str, every: Every) -> None:
    """Refuses what is not a number of optimizer steps; a schedule whose numbers are not known is trusted.

    Raises:
        ValueError: `every` is neither a whole number of at least 1 nor a schedule of numbers that round to such.
    """
    if isinstance(every, Schedule):
        for number in every.bounds:
            if number < 0.5:
                raise ValueError(f"{name} must be {_RULE}; {_given(every, number)}")
        return
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(
            f"{name} must be a whole number of optimizer steps, at least 1; got {every!r}. Use 1 for each step."
        )


def every_at(every: Every, step: int, epoch: float) -> int:
    """`every` itself, or the schedule's value as a whole number.

    Raises:
        ValueError: The schedule gives something that is no number of steps, at least 1 when rounded.
    """
    if not isinstance(every, Schedule):
        return every
    return max(1, round(_at("every", _RULE, every, step, epoch)))


def least_every(every: Every) -> int:
    """The least that `every_at` may give at any time, as far as is known; else 1."""
    if not isinstance(every, Schedule):
        return every
    return max(1, round(min(every.bounds, default=1)))
