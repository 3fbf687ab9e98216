"""What every part may know of the round of communication that it takes part in."""

from dataclasses import dataclass

import torch

from lightning_sparsecomm.layout import Layout
from lightning_sparsecomm.schedules import Density, value_at

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
    """

    layout: Layout
    step: int = 0
    epoch: float = 0.0
    seed: int = 0
    rank: int = 0
    world_size: int = 1

    def number(self, schedule: Density) -> float:
        """The schedule's value in this round."""
        return value_at(schedule, self.step, self.epoch)

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
