"""Numbers that change during training. A schedule is accepted wherever a density or a number of steps is."""

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_sparsecomm.basis.arguments import check_whole_number, is_number, is_whole_number
from lightning_sparsecomm.basis.scheduled import Density as Density
from lightning_sparsecomm.basis.scheduled import Every as Every
from lightning_sparsecomm.basis.scheduled import Schedule as Schedule
from lightning_sparsecomm.basis.scheduled import Warmup as Warmup
from lightning_sparsecomm.basis.scheduled import check_density as check_density
from lightning_sparsecomm.basis.scheduled import check_every as check_every
from lightning_sparsecomm.basis.scheduled import density_at as density_at
from lightning_sparsecomm.basis.scheduled import every_at as every_at
from lightning_sparsecomm.basis.scheduled import every_for as every_for
from lightning_sparsecomm.basis.scheduled import exchanges_in as exchanges_in
from lightning_sparsecomm.basis.scheduled import least_every as least_every

_AHEAD, _FEWEST_STEPS, LIKELY_STEPS = 4, 1000, 5000


def supposed_length(step: int) -> int:
    """The length that densities suppose after `step` steps of a run that may end at any time: four times as many."""
    return min(LIKELY_STEPS, max(_FEWEST_STEPS, _AHEAD * (step + 1)))


@dataclass(frozen=True)
class Stages(Schedule):
    """One number after another, each from a given step or epoch on.

    >>> [Stages([1, 10, 100], steps=[0, 50, 500]).at(step, 0.0) for step in (0, 49, 50, 1000)]
    [1, 1, 10, 100]

    Args:
        numbers: In order, such as densities, or steps between two exchanges.
        steps: When each begins, in optimizer steps: 0 first, then increasing.
        epochs: When each begins, in epochs; instead of `steps`.

    Raises:
        ValueError: `steps` and `epochs` are both given or both missing, do not start at 0, do not increase, or differ
            from `numbers` in length; or a number is not positive and finite.
        TypeError: `numbers` or `epochs` is not a list of numbers, or `steps` not one of whole numbers.
    """

    numbers: Sequence[float]
    steps: Sequence[int] = ()
    epochs: Sequence[float] = ()

    def __post_init__(self) -> None:
        for name, allowed in (("numbers", is_number), ("steps", is_whole_number), ("epochs", is_number)):
            given = getattr(self, name)
            listed = isinstance(given, Sequence) and not isinstance(given, str)
            if not (listed and all(map(allowed, given))):
                kind = "whole numbers" if name == "steps" else "numbers"
                example = [1, 10] if name == "numbers" else [0, 1000]
                raise TypeError(f"{name} must be a list of {kind}; got {given!r}. Use {example}, for example.")
            object.__setattr__(self, name, tuple(given))
        if bool(self.steps) == bool(self.epochs):
            raise ValueError(
                "steps or epochs must say when each number begins, and only one of them; got"
                f" steps={list(self.steps)}, epochs={list(self.epochs)}. Give steps=[0, 1000], for example."
            )
        if not all(0 < number < math.inf for number in self.numbers):
            raise ValueError(
                f"numbers must be positive and finite: densities, or optimizer steps; got {list(self.numbers)!r}."
                " Use [0.1, 0.001], for example."
            )
        name, begins = ("steps", self.steps) if self.steps else ("epochs", self.epochs)
        rising = all(a < b < math.inf for a, b in itertools.pairwise(begins))
        if len(begins) != len(self.numbers) or begins[0] != 0 or not rising:
            raise ValueError(
                f"{name} must start at 0 and increase, with one for each of the {len(self.numbers)} numbers; got"
                f" {list(begins)}. Use {name}=[0, 1000] for two numbers, for example."
            )

    def at(self, step: int, epoch: float) -> float:
        done = step if self.steps else epoch
        return self.numbers[bisect.bisect_right(self.steps or self.epochs, done) - 1]

    @property
    def bounds(self) -> Sequence[float]:
        return min(self.numbers), max(self.numbers)


@dataclass(frozen=True)
class Exponential(Schedule):
    """Goes from one number to another exponentially, and stays there.

    >>> [Exponential(0.1, 0.001, steps=100).at(step, 0.0) for step in (0, 50, 100, 200)]
    [0.1, 0.01, 0.001, 0.001]

    Args:
        first: The number of step 0.
        last: The number from step `steps` on.
        steps: How many optimizer steps it takes.

    Raises:
        ValueError: `first` or `last` is not a positive, finite number, or `steps` is below 1.
    """

    first: float
    last: float
    steps: int

    def __post_init__(self) -> None:
        for name, number in (("first", self.first), ("last", self.last)):
            if not (is_number(number) and 0 < number < math.inf):
                raise ValueError(
                    f"{name} must be a positive, finite number, as every number of an exponential is; got {number!r}."
                    " Use 0.1, for example."
                )
        check_every("steps", self.steps)

    def at(self, step: int, epoch: float) -> float:
        if step >= self.steps:
            return self.last
        # Rounded: halfway from 0.1 to 0.001 is then exactly 0.01.
        return float(f"{self.first * (self.last / self.first) ** (step / self.steps):.15g}")

    @property
    def bounds(self) -> Sequence[float]:
        return min(self.first, self.last), max(self.first, self.last)


@dataclass(frozen=True)
class ByLength(Schedule):
    """A density for the length of the run: the shorter it is, the more often each element has to be sent.

    A run of T optimizer steps sends `density · (steps / T)^exponent` of the elements in each, within bounds. In 4,000
    steps an element is then sent 46 times, in 300 steps 20 times.

    >>> [round(ByLength().for_length(steps), 4) for steps in (300, 1000, 4000, 100_000, 1_000_000)]
    [0.0669, 0.0295, 0.0115, 0.0013, 0.001]

    A run whose length is not known may end at any time. It counts as one of four times the steps that it has made, of
    1,000 at least and 5,000 at most.

    >>> [round(ByLength().at(step, epoch=0), 4) for step in (0, 249, 500, 1249, 100_000)]
    [0.0295, 0.0295, 0.0184, 0.0099, 0.0099]

    Args:
        density: Fraction of elements sent in each exchange of a run of so many `steps`, in (0, 1].
        exponent: How fast the density falls with the run's length: 0 for not at all, 1 for as many sends in any run.
        least: The least density, for long runs, in (0, 1].
        most: The greatest density, for short runs, in (0, 1].
        unknown: The density where the run's length is not known, in (0, 1]. None supposes a length, as above.
        steps: The length of a run in optimizer steps for which `density` is meant.

    Raises:
        ValueError: A density is outside (0, 1], the exponent outside [0, 1], or `steps` not positive.
        TypeError: A density is not a number.
    """

    density: float = 0.0295
    exponent: float = 0.68
    least: float = 0.001
    most: float = 0.1
    unknown: float | None = None
    steps: float = 1000

    def __post_init__(self) -> None:
        for name in ("density", "least", "most") + ("unknown",) * (self.unknown is not None):
            if isinstance(getattr(self, name), Schedule):
                raise TypeError(
                    f"{name} must be a number in (0, 1]; got {getattr(self, name)!r}. Use 0.01, for example."
                )
            check_density(name, getattr(self, name))
        if not (is_number(self.exponent) and 0 <= self.exponent <= 1):
            raise ValueError(f"exponent must be in [0, 1]; got {self.exponent!r}. Use 0.68, which suits SGD.")
        if not (is_number(self.steps) and 0 < self.steps < math.inf):
            raise ValueError(f"steps must be a positive number of optimizer steps; got {self.steps!r}. Use 1000.")

    def at(self, step: int, epoch: float) -> float:
        if self.unknown is not None:
            return self.unknown
        return self._in(supposed_length(step))

    def for_length(self, steps: float) -> "float | Schedule":
        return self._in(steps) if 0 < steps < math.inf else self if self.unknown is None else self.unknown

    def _in(self, steps: float) -> float:
        density: float = self.density * (self.steps / steps) ** self.exponent
        return min(self.most, max(self.least, density))

    @property
    def bounds(self) -> Sequence[float]:
        numbers = self.least, self.most, *([] if self.unknown is None else [self.unknown])
        return min(numbers), max(numbers)


@dataclass(frozen=True)
class PartOfRun(Schedule):
    """A number of optimizer steps that is a part of the run's length.

    >>> [PartOfRun(0.15).for_length(steps) for steps in (1000, 40, float("inf"))]
    [150.0, 6.0, 1000]

    Args:
        part: Of all steps of the run, in (0, 1].
        unknown: How many steps where the run's length is not known.

    Raises:
        ValueError: `part` is outside (0, 1], or `unknown` is below 1.
        TypeError: `part` is not a number.
    """

    part: float
    unknown: int = 1000

    def __post_init__(self) -> None:
        if not is_number(self.part):
            raise TypeError(f"part must be a number in (0, 1]: a part of the run; got {self.part!r}. Use 0.15.")
        if not 0 < self.part <= 1:
            raise ValueError(f"part must be in (0, 1]: a part of the run; got {self.part!r}. Use 0.15 for 15%.")
        check_every("unknown", self.unknown)

    def at(self, step: int, epoch: float) -> float:
        return self.unknown

    def for_length(self, steps: float) -> float:
        return self.part * steps if 0 < steps < math.inf else self.unknown

    @property
    def bounds(self) -> Sequence[float]:
        # A run may be so short that its part is less than one step, which counts as one.
        return (1,)


@dataclass(frozen=True)
class DensityWarmup(Schedule):
    """A density that follows a warm-up.

    >>> [round(DensityWarmup(0.001, epochs=4).at(0, epoch), 3) for epoch in range(6)]
    [0.251, 0.063, 0.016, 0.004, 0.001, 0.001]

    Args:
        density: Fraction of elements sent after the warm-up, in (0, 1].
        steps: The warm-up's length in optimizer steps; 0 if it is counted in epochs.
        epochs: The warm-up's length in epochs; 0 if it is counted in steps.
        shape: How the density falls: "exponential", "inverse_time", or a list of densities for stages of equal length.

    Raises:
        ValueError: As for `Warmup`; or `density` is outside (0, 1].
        TypeError: As for `Warmup`; or `density` is not a number.
    """

    density: float
    steps: int = 0
    epochs: int = 0
    shape: Literal["exponential", "inverse_time"] | Sequence[float] = "exponential"

    def __post_init__(self) -> None:
        if isinstance(self.density, Schedule):
            raise TypeError(f"density must be a number in (0, 1]; got {self.density!r}. Use that schedule by itself.")
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


def warmed(
    density: Density,
    warmup_steps: int | None,
    warmup_epochs: int | None,
    otherwise: int = 0,
    shape: Literal["exponential", "inverse_time"] = "exponential",
) -> Density:
    """`density` with a warm-up before it, of so many steps or epochs; of `otherwise` steps where neither is given.

    A schedule is returned unchanged, as it already says what to send when; so is a density if the length is 0.
    """
    check_density("density", density)
    for name, length in (("warmup_steps", warmup_steps), ("warmup_epochs", warmup_epochs)):
        if length is not None:
            check_whole_number(name, length, 0, "", "Use 0 for no warm-up.")
    if warmup_steps and warmup_epochs:
        raise ValueError(
            "warmup_steps and warmup_epochs both say how long the warm-up is; got"
            f" {warmup_steps} and {warmup_epochs}. Give one of them."
        )
    steps, epochs = warmup_steps or 0, warmup_epochs or 0
    if warmup_steps is None and warmup_epochs is None:
        steps = otherwise
    if isinstance(density, Schedule) or steps == epochs == 0:
        return density
    return DensityWarmup(density, steps, epochs, shape)
