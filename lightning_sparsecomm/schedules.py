"""Numbers that change during training. A schedule is accepted wherever a density is."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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


Density = float | Schedule


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
            object.__setattr__(self, "shape", tuple(self.shape))
            if not self.shape:
                raise ValueError("a warm-up's list of densities must not be empty. Give one density for each stage.")
            for density in self.shape:
                check_density("each density of a warm-up", float(density))

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
    """Refuses a density outside (0, 1], naming the parameter; a schedule is trusted to stay inside.

    Raises:
        ValueError: `density` is a number outside (0, 1].
        TypeError: `density` is neither a number nor a schedule.
    """
    if isinstance(density, Schedule):
        return
    if isinstance(density, bool) or not isinstance(density, (int, float)):
        raise TypeError(f"{name} must be a number in (0, 1] or a Schedule; got {density!r}.")
    if not 0 < density <= 1:
        hint = f" Did you mean {1 / density:g}?" if density > 1 else " Use dense() to send everything."
        raise ValueError(f"{name} must be in (0, 1]: the fraction of elements sent; got {density!r}.{hint}")


def value_at(number: Density, step: int, epoch: float) -> float:
    """`number` itself, or the schedule's value."""
    return number.at(step, epoch) if isinstance(number, Schedule) else number
