"""One round of communication, as every part sees it: layout, step, ranks and seeds."""

import math
from dataclasses import dataclass

import torch

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.schedules import (
    Density,
    DensityWarmup,
    Every,
    Schedule,
    Warmup,
    density_at,
    every_at,
    supposed_length,
)
from lightning_sparsecomm.kernels.sketch.reference import GOLDEN, mixed


def _seed(*numbers: int) -> int:
    """A 63-bit seed. The mixing of SplitMix64 gives neighbouring steps unrelated ones."""
    state = 0
    for number in numbers:
        state = mixed((state ^ number) + GOLDEN)
    return state >> 1


@dataclass(frozen=True)
class Round:
    """One round of communication. All randomness derives from it, so no generator state needs saving.

    >>> context = Round(Layout([("weight", (2, 3))]), step=7, rank=1, world_size=2)
    >>> context.density(0.01)
    0.01
    >>> context.shared_seed() == Round(context.layout, step=7, rank=0, world_size=2).shared_seed()
    True

    Attributes:
        layout: Layout of the vectors exchanged.
        step: Optimizer steps finished before this one.
        epoch: Epochs finished, including a fraction.
        seed: The run's seed, equal on all ranks.
        rank: This process's rank.
        world_size: Number of ranks.
        warmup: Overrides the parts' densities early in training; None for no such warm-up.
        quantity: What the vectors hold, for messages.
        length: Optimizer steps of the whole run; infinite where unknown.
        may_end_sooner: Whether the run may end at any time before that.
        dtype: Of the vectors: float32, or wider where the model is.
    """

    layout: Layout
    step: int = 0
    epoch: float = 0.0
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    warmup: Warmup | None = None
    quantity: str = "gradient"
    length: float = math.inf
    may_end_sooner: bool = False
    dtype: torch.dtype = torch.float32

    def density(self, density: Density) -> float:
        """The fraction to send in this round: `density` at this step, or what `warmup` makes of it."""
        if isinstance(density, Schedule):
            length = min(self.length, supposed_length(self.step)) if self.may_end_sooner else self.length
            density = density.for_length(length)
        if self.warmup is None:
            return density_at(density, self.step, self.epoch)
        # It replaces the method's own warm-up.
        own = density.density if isinstance(density, DensityWarmup) else density_at(density, self.step, self.epoch)
        return self.warmup.density(own, self.step, self.epoch)

    def steps(self, number: Every) -> int:
        """A number of optimizer steps, given as such or as a schedule, in this round."""
        if isinstance(number, Schedule):
            known = number.for_length(self.length)
            number = known if isinstance(known, Schedule) else max(1, round(known))
        return every_at(number, self.step, self.epoch)

    def shared_seed(self) -> int:
        """A 63-bit seed, equal on all ranks and new in each round."""
        return _seed(self.seed, self.step)

    def rank_seed(self) -> int:
        """A 63-bit seed that differs between ranks and between rounds."""
        return _seed(self.seed, self.step, self.rank + 1)

    def shared_generator(self) -> torch.Generator:
        """A CPU generator seeded with `shared_seed`: it draws the same numbers on all ranks."""
        return torch.Generator().manual_seed(self.shared_seed())

    def rank_generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """A generator on a device, seeded with `rank_seed`: each rank draws its own numbers, others on CUDA."""
        return torch.Generator(device).manual_seed(self.rank_seed())
