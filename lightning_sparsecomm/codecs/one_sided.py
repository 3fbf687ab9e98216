"""The larger elements of one sign."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparsecomm.codecs.selectors import Selector, k_of
from lightning_sparsecomm.compensation import Wanted, candidates_of
from lightning_sparsecomm.kernels import kernels_for
from lightning_sparsecomm.rounds import Round
from lightning_sparsecomm.schedules import Density, check_density

# Candidates of either sign, in units of k: enough for k of each, unless most of what is large has the other sign.
_CANDIDATES = 3


@dataclass(frozen=True)
class OneSidedTopK(Selector):
    """Of each segment, the k largest positive elements or the k most negative ones, whichever have the larger mean
    magnitude; the positive ones where those are equal. k = min(n, max(1, round(density·n))), n being its size.

    Fewer where a side has fewer; zeros are never sent. Ties for a side's last places are settled among its own
    elements, as `TopK` does it. Means are taken in float64, and that of no elements is 0. With `SharedMean` and
    `Golomb` this is Sparse Binary Compression. Exact and biased, like `TopK`.

    Source: Sparse Binary Compression (Sattler et al. 2018), algorithm 2.

    >>> from lightning_sparsecomm.layout import Layout
    >>> x = torch.tensor([3.0, -4.0, 0.0, 2.0, -0.5, 1.0])
    >>> OneSidedTopK(0.34).select(x, Round(Layout([("weight", (2, 3))])))
    tensor([0, 3])

    Args:
        density: The most that is sent of each segment, in (0, 1], or a schedule of it.

    Raises:
        ValueError: `density` is outside (0, 1].
        TypeError: `density` is neither a number nor a schedule.
    """

    density: Density = 0.01

    def __post_init__(self) -> None:
        check_density("density", self.density)

    def wanted(self, round: Round) -> list[Wanted]:
        return [Wanted(start, stop, min(stop - start, _CANDIDATES * k)) for start, stop, k in self._sought(round)]

    def select(self, x: Tensor, round: Round, candidates: Sequence[Tensor | None] = ()) -> Tensor:
        sought, seed = self._sought(round), round.shared_seed()
        known = candidates or [None] * len(sought)
        parts = [_larger_side(x, want, seed, found) for want, found in zip(sought, known, strict=True)]
        return torch.cat(parts) if parts else x.new_empty(0, dtype=torch.int64)

    def count(self, round: Round) -> int:
        return sum(want.k for want in self._sought(round))

    def _sought(self, round: Round) -> list[Wanted]:
        """Each segment that has elements, and how many of a side are sought there."""
        density = round.density(self.density)
        return [Wanted(s.offset, s.offset + s.size, k_of(density, s.size)) for s in round.layout.segments if s.size]


def _larger_side(x: Tensor, want: Wanted, seed: int, candidates: Tensor | None) -> Tensor:
    start, stop, k = want
    stretch = x[start:stop]
    enough = min(stop - start, _CANDIDATES * k)
    found = candidates_of(stretch, enough) if candidates is None else candidates - start
    sides = []
    for sign in (1, -1):
        side = None if found is None else _side(stretch, sign, found)
        # Fewer candidates than asked for are all that is not zero.
        if side is None or (side.numel() < k and found is not None and found.numel() >= enough):
            side = _side(stretch, sign)
        side = side[kernels_for(x.device, x.dtype).largest(stretch[side], k, seed)]
        sides.append((side, float(stretch[side].to(torch.float64).abs().mean()) if side.numel() else 0.0))
    (positive, above), (negative, below) = sides
    return (positive if above >= below else negative) + start


def _side(x: Tensor, sign: int, among: Tensor | None = None) -> Tensor:
    """Positions, of all or of some, where the sign of `x` is `sign`."""
    values = x if among is None else x[among]
    positions = (values > 0 if sign > 0 else values < 0).nonzero().view(-1)
    return positions if among is None else among[positions]
