"""A selector: elements drawn at random, the same on all ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Density, Round
from lightning_sparsecomm.codecs import Selector, k_of


@dataclass(frozen=True)
class RandomK(Selector):
    """Sends a random fraction of the elements. All ranks draw the same ones, and new ones in each round.

    Args:
        density: Fraction of elements sent, in (0, 1], or a schedule of it.
    """

    density: Density = 0.01

    def select(self, x: Tensor, context: Round) -> Tensor:
        order = torch.randperm(context.layout.size, generator=context.shared_generator())
        return order[: self.count(context)].sort().values.to(x.device)

    def count(self, context: Round) -> int:
        return k_of(context.density(self.density), context.layout.size)
