"""An exchange: random elements at positions that all ranks draw alike, so that only values travel."""

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Density, Round, Vector, Wire
from lightning_sparsecomm.codecs import k_of
from lightning_sparsecomm.exchange import PlainExchange


class SharedRandomK(PlainExchange):
    """Sums the same random fraction of the elements over all ranks, and new ones in each round.

    Args:
        density: Fraction of elements sent, in (0, 1], or a schedule of it.
    """

    def __init__(self, density: Density = 0.01) -> None:
        self.density = density

    def reduce(self, x: Vector, context: Round, wire: Wire) -> tuple[Tensor, Tensor]:
        order = torch.randperm(context.layout.size, generator=context.shared_generator())
        positions = order[: k_of(context.density(self.density), context.layout.size)].to(x.values.device)
        shared, sent = torch.zeros_like(x.values), torch.zeros_like(x.values)
        sent[positions] = x.values[positions]
        shared[positions] = wire.all_reduce_(sent[positions] / wire.world_size)
        return shared, sent
