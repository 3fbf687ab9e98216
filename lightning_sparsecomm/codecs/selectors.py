"""Which elements of a vector are sent."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_sparsecomm.rounds import Round
from lightning_sparsecomm.schedules import Density, check_density

# Few enough to rank in well under a millisecond; enough to leave a few times k elements to rank at usual densities.
_SAMPLE = 2**14

# Magnitudes of this many elements stay in a processor's cache, so no temporary as long as the vector is written.
_BLOCK = 2**20


class Selector(ABC):
    """Chooses the elements to send. Frozen and pure."""

    @abstractmethod
    def select(self, x: Tensor, round: Round) -> Tensor:
        """The positions to send.

        Args:
            x: `[round.layout.size]` float32 or float64, finite. Not changed.
            round: Gives layout, step and seeds.

        Returns:
            `[k]` int64, strictly increasing, on the device of `x`; `k` is at most `count(round)`.
        """

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

    def select(self, x: Tensor, round: Round) -> Tensor:
        density, seed = round.number(self.density), round.shared_seed()
        if self.scope == "model":
            return _largest(x, _k(density, x.numel()), seed)
        parts = [
            _largest(x[s.offset : s.offset + s.size], _k(density, s.size), seed) + s.offset
            for s in round.layout.segments
        ]
        return torch.cat(parts) if parts else x.new_empty(0, dtype=torch.int64)

    def count(self, round: Round) -> int:
        density = round.number(self.density)
        if self.scope == "model":
            return _k(density, round.layout.size)
        return sum(_k(density, segment.size) for segment in round.layout.segments)


def _k(density: float, size: int) -> int:
    return min(size, max(1, round(density * size)))


def _largest(x: Tensor, k: int, seed: int) -> Tensor:
    """Sorted positions of the min(k, non-zeros) largest magnitudes; ties as `TopK` says."""
    candidates = _candidates(x, k)
    if candidates.numel() <= k:
        return candidates
    magnitudes = x[candidates].abs()
    threshold = torch.topk(magnitudes, k, sorted=False).values.min()
    reached = candidates[magnitudes >= threshold]
    if reached.numel() == k:
        return reached
    above, tied = candidates[magnitudes > threshold], candidates[magnitudes == threshold]
    places, ties = k - above.numel(), tied.numel()
    spaced = torch.arange(places, device=x.device) * ties // places
    return torch.cat([above, tied[(spaced + seed % ties) % ties]]).sort().values


def _candidates(x: Tensor, k: int) -> Tensor:
    """Sorted positions of non-zeros that contain the k largest magnitudes, and everything tied with the k-th.

    All non-zeros, unless a sample gives a threshold that at least k elements reach.
    """
    if k < x.numel() and x.numel() > 2 * _SAMPLE:
        # Odd, so that a matrix whose rows are a power of two long is not sampled in a few columns only.
        sample = x[:: x.numel() // _SAMPLE | 1].abs()
        expected = k * sample.numel() / x.numel()
        # Four standard deviations more than are expected among the k largest: too few is rare, and costs only time.
        rank = min(sample.numel(), int(expected + 4 * expected**0.5 + 8))
        threshold = torch.topk(sample, rank, sorted=False).values.min()
        if threshold > 0:
            blocks = enumerate(torch.split(x, _BLOCK))
            found = torch.cat([(block.abs() >= threshold).nonzero().view(-1) + i * _BLOCK for i, block in blocks])
            if found.numel() >= k:
                return found
    return x.nonzero().view(-1)
