"""Which elements of a vector are sent."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_sparsecomm.compensation import Wanted, candidates_of
from lightning_sparsecomm.kernels import kernels_for
from lightning_sparsecomm.rounds import Round
from lightning_sparsecomm.schedules import Density, check_density


class Selector(ABC):
    """Chooses the elements to send. Frozen and pure."""

    @abstractmethod
    def select(self, x: Tensor, round: Round, candidates: Sequence[Tensor | None] = ()) -> Tensor:
        """The positions to send.

        Args:
            x: `[round.layout.size]` float32 or float64, finite. Not changed.
            round: Gives layout, step and seeds.
            candidates: For each of `wanted`, sorted positions that hold what is wanted; None, or none at all, where
                they are not known.

        Returns:
            `[k]` int64, strictly increasing, on the device of `x`; `k` is at most `count(round)`.
        """

    def wanted(self, round: Round) -> Sequence[Wanted]:
        """What `select` seeks by magnitude, in order, if it does."""
        return ()

    @abstractmethod
    def count(self, round: Round) -> int:
        """The most positions that `select` can return in this round; equal on all ranks."""


@dataclass(frozen=True)
class TopK(Selector):
    """Exactly the min(k, non-zeros) elements of largest magnitude, k = min(n, max(1, round(density·n))).

    Zeros (of either sign) are never sent. Where T elements tie for the last m places, they are numbered in order of
    position and those numbered (s + ⌊j·T/m⌋) mod T are taken, j = 0 … m − 1: evenly spaced from a start
    s = `round.shared_seed()` mod T that is new in each round, so no position is favoured.

    Exact at any density: a strided sample only finds which elements need not be ranked. Biased, as every top-k is: use
    it with error feedback. Density 1 (k = n) sends all non-zeros and ranks nothing.

    Source: Combining Global Sparse Gradients with Local Gradients (scope "model"); Deep Gradient Compression,
    section 3 (scope "tensor", threshold from a sample). There, whatever passes the sampled threshold or a second one is
    sent; here exactly k are.

    >>> from lightning_sparsecomm.layout import Layout
    >>> round = Round(Layout([("weight", (2, 2)), ("bias", (2,))]))
    >>> x = torch.tensor([3.0, -4.0, 0.0, 1.0, 0.5, -2.0])
    >>> TopK(0.5).select(x, round), TopK(0.5, scope="tensor").select(x, round)
    (tensor([0, 1, 5]), tensor([0, 1, 5]))
    >>> TopK(0.34).select(x, round), TopK(0.34, scope="tensor").select(x, round)
    (tensor([0, 1]), tensor([1, 5]))

    Args:
        density: Fraction of elements sent, in (0, 1], or a schedule of it.
        scope: "model" ranks the whole vector at once; "tensor" ranks each segment of the layout by itself, with a k
            of its own (at least 1 where the segment has elements).

    Raises:
        ValueError: `density` is outside (0, 1], or `scope` is neither.
        TypeError: `density` is neither a number nor a schedule.
    """

    density: Density = 0.01
    scope: Literal["model", "tensor"] = "model"

    def __post_init__(self) -> None:
        check_density("density", self.density)
        if self.scope not in ("model", "tensor"):
            raise ValueError(
                "scope must be 'model' (rank all elements together) or 'tensor' (each tensor by itself);"
                f" got {self.scope!r}."
            )

    def wanted(self, round: Round) -> list[Wanted]:
        density, layout = round.density(self.density), round.layout
        if self.scope == "model":
            stretches = [(0, layout.size)] if layout.size else []
        else:
            stretches = [(s.offset, s.offset + s.size) for s in layout.segments if s.size]
        return [Wanted(start, stop, k_of(density, stop - start)) for start, stop in stretches]

    def select(self, x: Tensor, round: Round, candidates: Sequence[Tensor | None] = ()) -> Tensor:
        wanted, seed = self.wanted(round), round.shared_seed()
        known = candidates or [None] * len(wanted)
        parts = [_largest(x, want, seed, found) for want, found in zip(wanted, known, strict=True)]
        return torch.cat(parts) if parts else x.new_empty(0, dtype=torch.int64)

    def count(self, round: Round) -> int:
        return sum(want.k for want in self.wanted(round))


def k_of(density: float, size: int) -> int:
    """How many of `size` elements a density asks for: at least one."""
    return min(size, max(1, round(density * size)))


def _largest(x: Tensor, want: Wanted, seed: int, candidates: Tensor | None) -> Tensor:
    """Sorted positions of the min(k, non-zeros) largest magnitudes of a stretch; ties as `TopK` says."""
    kernels = kernels_for(x.device, x.dtype)
    if candidates is not None:
        return candidates[kernels.largest(x[candidates], want.k, seed)]
    stretch = x[want.start : want.stop]
    found = candidates_of(stretch, want.k)
    if found is None:
        positions = kernels.largest(stretch, want.k, seed)
    else:
        positions = found[kernels.largest(stretch[found], want.k, seed)]
    return positions.add_(want.start)
