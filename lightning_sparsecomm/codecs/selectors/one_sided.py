"""The largest elements of one sign."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.schedules import Density, check_density
from lightning_sparsecomm.codecs.selectors.base import k_of
from lightning_sparsecomm.codecs.selectors.candidates import HintedSelector, Hints, Wanted, candidates_of
from lightning_sparsecomm.kernels import kernels_for

# Candidates of both signs, in units of k. They include k of each sign, unless most large elements have the same sign.
_CANDIDATES = 3


@dataclass(frozen=True)
class OneSidedTopK(HintedSelector):
    """Selects the k largest positive or the k most negative elements of each tensor: the side of larger mean magnitude.

    For a tensor of n elements, k = min(n, max(1, round(density·n))). If a side has fewer than k elements, all are sent.
    If both means are equal, the positive side is sent. Means are computed in float64; the mean of no elements is 0.
    Zeros are never sent. Ties within a side are broken as in `TopK`. Exact and biased, like `TopK`. With `SharedMean`
    and `Golomb`, this is Sparse Binary Compression.

    Source: Sparse Binary Compression (Sattler et al. 2018), algorithm 2.

    >>> from lightning_sparsecomm.basis.layout import Layout
    >>> x = torch.tensor([3.0, -4.0, 0.0, 2.0, -0.5, 1.0])
    >>> OneSidedTopK(0.34).select(x, Round(Layout([("weight", (2, 3))])))
    tensor([0, 3])

    Args:
        density: Greatest fraction of each tensor to send, in (0, 1], or a schedule of it.

    Raises:
        ValueError: `density` is outside (0, 1].
        TypeError: `density` is neither a number nor a schedule.
    """

    density: Density = 0.01

    def __post_init__(self) -> None:
        check_density("density", self.density)

    def wanted(self, context: Round) -> list[Wanted]:
        return [_with_room(side) for side in self._sides(context)]

    def select_hinted(self, x: Tensor, context: Round, hints: Hints) -> Tensor:
        seed = context.shared_seed()
        parts = [_larger_side(x, side, seed, hints.get(_with_room(side))) for side in self._sides(context)]
        return torch.cat(parts) if parts else x.new_empty(0, dtype=torch.int64)

    def count(self, context: Round) -> int:
        return sum(side.k for side in self._sides(context))

    def _sides(self, context: Round) -> list[Wanted]:
        """For each tensor with elements, its stretch, and k: how many elements of one sign to send at most."""
        density = context.density(self.density)
        return [Wanted(s.offset, s.offset + s.size, k_of(density, s.size)) for s in context.layout.segments if s.size]


def _with_room(side: Wanted) -> Wanted:
    """The same stretch, with as many candidates as it usually takes to find k elements of either sign."""
    return side._replace(k=min(side.stop - side.start, _CANDIDATES * side.k))


def _larger_side(x: Tensor, wanted: Wanted, seed: int, candidates: Tensor | None) -> Tensor:
    """Sorted positions of the side with the larger mean in one stretch of `x`."""
    start, stop, k = wanted
    stretch, room = x[start:stop], _with_room(wanted).k
    found = candidates_of(stretch, room) if candidates is None else candidates - start
    sides = []
    for sign in (1, -1):
        side = None if found is None else of_sign(stretch, sign, found)
        # Fewer candidates than asked for are all the non-zeros: then the side really has fewer than k elements.
        if side is None or (side.numel() < k and found is not None and found.numel() >= room):
            side = of_sign(stretch, sign)
        side = side[kernels_for(x.device, x.dtype).largest(stretch[side], k, seed)]
        sides.append((side, float(stretch[side].to(torch.float64).abs().mean()) if side.numel() else 0.0))
    (positive, above), (negative, below) = sides
    return (positive if above >= below else negative) + start


def of_sign(x: Tensor, sign: int, among: Tensor | None = None) -> Tensor:
    """Positions of the elements of one sign; if `among` is given, only of those at these positions."""
    values = x if among is None else x[among]
    positions = (values > 0 if sign > 0 else values < 0).nonzero().view(-1)
    return positions if among is None else among[positions]
