"""Numbers that change during training. A schedule is accepted wherever a density is."""

from abc import ABC, abstractmethod
from dataclasses import dataclass


class Schedule(ABC):
    """A number for each optimizer step of a run. Frozen and pure: it has no state of its own."""

    @abstractmethod
    def at(self, step: int, epoch: float) -> float:
        """The number for the step after `step` finished ones, `epoch` epochs (with fraction) into training."""


Density = float | Schedule


@dataclass(frozen=True)
class InverseTimeWarmup(Schedule):
    """Drop ratio `(1 - density)^max(1, T/t)` at step t: a density of
    1 - (1 - density)^T at first (all but everything by default), `density` from step T on.

    Source: Combining Global Sparse Gradients with Local Gradients, section 3.4 (R = 0.99, T = 1000).

    Args:
        density: Fraction of elements sent once warm, in (0, 1].
        warmup_steps: T, at least 1.
    """

    density: float
    warmup_steps: int = 1000

    def __post_init__(self) -> None:
        check_density("density", self.density)
        if self.warmup_steps < 1:
            raise ValueError(
                f"warmup_steps must be at least 1; got {self.warmup_steps}. Give the plain density for no warm-up."
            )

    def at(self, step: int, epoch: float) -> float:
        return 1 - float((1 - self.density) ** max(1.0, self.warmup_steps / (step + 1)))


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
