"""The largest elements of both signs."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.schedules import Density, check_density
from lightning_sparsecomm.codecs.selectors.base import k_of
from lightning_sparsecomm.codecs.selectors.candidates import HintedSelector, Hints, Wanted, candidates_of
from lightning_sparsecomm.codecs.selectors.one_sided import of_sign
from lightning_sparsecomm.kernels import kernels_for

# Candidates of both signs, in units of k. They include enough of each sign, unless signs are very uneven.
_CANDIDATES = 2


@dataclass(frozen=True)
class TwoSidedTopK(HintedSelector):
    """Selects a fixed proportion of the positive elements of each tensor, and of the negative ones: the largest.

    Of m elements of one sign, exactly min(m, max(1, round(density·m))) are sent; none if there are none. Zeros are
    never sent. So each sign has a threshold of its own, which is found anew in each round. Ties within a sign are
    broken as in `TopK`. Exact and biased, like `TopK`.

    Source: Dryden et al. 2016, Communication Quantization for Data-Parallel Training of Deep Neural Networks.

    >>> from lightning_sparsecomm.basis.layout import Layout
    >>> x = torch.tensor([3.0, -4.0, 0.0, 2.0, -0.5, 1.0, 0.5, -1.0])
    >>> TwoSidedTopK(0.5).select(x, Round(Layout([("weight", (2, 4))])))
    tensor([0, 1, 3, 7])

    Args:
        density: Fraction of each tensor's elements of one sign to send, in (0, 1], or a schedule of it.

    Raises:
        ValueError: `density` is outside (0, 1].
        TypeError: `density` is neither a number nor a schedule.
    """

    density: Density = 0.01

    def __post_init__(self) -> None:
        check_density("density", self.density)

    def wanted(self, context: Round) -> list[Wanted]:
        density = context.density(self.density)
        return [
            Wanted(s.offset, s.offset + s.size, min(s.size, _CANDIDATES * k_of(density, s.size)))
            for s in context.layout.segments
            if s.size
        ]

    def select_hinted(self, x: Tensor, context: Round, hints: Hints) -> Tensor:
        density, seed = context.density(self.density), context.shared_seed()
        parts = [_both_sides(x, stretch, density, seed, hints.get(stretch)) for stretch in self.wanted(context)]
        return torch.cat(parts) if parts else x.new_empty(0, dtype=torch.int64)

    def count(self, context: Round) -> int:
        density = context.density(self.density)
        # Two numbers are rounded, or raised to 1.
        return sum(min(s.size, max(2, math.floor(density * s.size + 1.5))) for s in context.layout.segments if s.size)


def _both_sides(x: Tensor, wanted: Wanted, density: float, seed: int, candidates: Tensor | None) -> Tensor:
    """Sorted positions of the largest elements of each sign in one stretch of `x`."""
    start, stop, room = wanted
    stretch = x[start:stop]
    if density == 1:
        return stretch.nonzero().view(-1) + start
    found = candidates_of(stretch, room) if candidates is None else candidates - start
    sides = []
    for sign, members in ((1, stretch > 0), (-1, stretch < 0)):
        k = k_of(density, int(members.sum()))
        side = None if found is None else of_sign(stretch, sign, found)
        # Fewer candidates than asked for are all the non-zeros.
        if side is None or (side.numel() < k and found is not None and found.numel() >= room):
            side = of_sign(stretch, sign)
        sides.append(side[kernels_for(x.device, x.dtype).largest(stretch[side], k, seed)])
    return torch.cat(sides).sort().values + start
