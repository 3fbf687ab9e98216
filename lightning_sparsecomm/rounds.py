"""What every part may know of the round of communication that it takes part in."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lightning_sparsecomm.layout import Layout
from lightning_sparsecomm.schedules import Density, DensityWarmup, Warmup, value_at

# Weyl and mixing constants of SplitMix64 (Steele, Lea, Flood 2014): neighbouring steps get unrelated seeds.
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def _mix(*numbers: int) -> int:
    state = 0
    for number in numbers:
        state = (state ^ number) + _GOLDEN & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


class MomentumRule(NamedTuple):
    """One parameter's momentum, as torch.optim.SGD has it in this step.

    Attributes:
        momentum: Factor on the velocity; 0 for none.
        dampening: 1 minus the factor on the gradient.
        nesterov: Whether the step looks ahead.
        begun: Whether the optimizer holds a momentum buffer already, so that this is not the velocity's first step.
    """

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    begun: bool = False


@dataclass(frozen=True)
class Round:
    """One round of communication. All randomness derives from it, so there is no generator state to save.

    Attributes:
        layout: Layout of the vector that is exchanged.
        step: Optimizer steps of this run that were finished before this one.
        epoch: Epochs finished, with fraction.
        seed: The run's seed, equal on all ranks.
        rank: This process's rank.
        world_size: Number of ranks.
        momentum: The user's own momentum of each segment; empty where no memory asks for it.
        gradient_norm: Euclidean norm of this rank's whole gradient, all of the optimizer's parameters together; nan
            where no memory asks for it.
        max_norm: The threshold that the user gives for clipping the averaged gradient; None for none.
        warmup: What takes the place of densities early in training; None for nothing.
        quantity: What the vector is, for messages.
    """

    layout: Layout
    step: int = 0
    epoch: float = 0.0
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    momentum: Sequence[MomentumRule] = ()
    gradient_norm: float = math.nan
    max_norm: float | None = None
    warmup: Warmup | None = None
    quantity: str = "gradient"

    def density(self, density: Density) -> float:
        """The fraction to send in this round."""
        if self.warmup is None:
            return value_at(density, self.step, self.epoch)
        # In the place of a warm-up that the method has itself.
        own = density.density if isinstance(density, DensityWarmup) else value_at(density, self.step, self.epoch)
        return self.warmup.density(own, self.step, self.epoch)

    def shared_seed(self) -> int:
        """63 bits that are equal on all ranks and new in each round."""
        return _mix(self.seed, self.step) >> 1

    def rank_seed(self) -> int:
        """63 bits that differ between ranks and rounds."""
        return _mix(self.seed, self.step, self.rank + 1) >> 1

    def shared_generator(self) -> torch.Generator:
        """A CPU generator that draws the same numbers on all ranks."""
        return torch.Generator().manual_seed(self.shared_seed())

    def rank_generator(self) -> torch.Generator:
        """A CPU generator of this rank's own."""
        return torch.Generator().manual_seed(self.rank_seed())
