"""The largest elements of each tensor, of which one that has more to send gets a larger share."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_sparsecomm.basis.arguments import check_one_of
from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.schedules import Density, check_density
from lightning_sparsecomm.codecs.selectors.base import Selector, k_of
from lightning_sparsecomm.codecs.selectors.candidates import Wanted
from lightning_sparsecomm.codecs.selectors.top_k import largest_of_each

Share = Literal["norm", "entropy"]


@dataclass(frozen=True)
class LayerwiseTopK(Selector):
    """Selects the largest elements of each tensor; how many follows in each round from the tensor's norm or entropy.

    All tensors together have k = max(T, k of the whole vector) elements, T being the number of tensors that have any.
    Each tensor has 1 of them. The others are shared out in proportion to a weight, as far as a tensor has that many:

    - "norm": the tensor's Euclidean norm. Of tensors with the same root mean square, this is the square root of the
      size, as in `TopK(scope="balanced")`; a tensor with a larger one is sent more densely.
    - "entropy": exp(H), with H the entropy of |x| / Σ|x| over the tensor's elements. It is the number of elements of
      equal magnitude that would have this entropy. So a tensor of which few elements hold nearly all needs few.

    Ranks share out by their own vectors, so they may differ. Nothing depends on that: a payload has its positions, k is
    the same on all ranks, and what a rank does not send waits in its residual. Ties are broken as in `TopK`. Zeros are
    never sent: a tensor with fewer elements than its share leaves some of k unused. Biased, like `TopK`.

    Source: ours. Entropy of layers to set thresholds: Kuang et al. 2019, Entropy-Based Gradient Compression.

    >>> from lightning_sparsecomm.basis.layout import Layout
    >>> context = Round(Layout([("weight", (2, 2)), ("bias", (4,))]))
    >>> x = torch.tensor([9.0, -8.0, 7.0, -6.0, 0.4, 0.3, 0.2, 0.1])
    >>> LayerwiseTopK(0.5).select(x, context), LayerwiseTopK(0.5, by="entropy").select(x, context)
    (tensor([0, 1, 2, 4]), tensor([0, 1, 4, 5]))

    Args:
        density: Fraction of all elements to send, in (0, 1], or a schedule of it.
        by: What a tensor's share follows from.

    Raises:
        ValueError: `density` is outside (0, 1], or `by` is unknown.
        TypeError: `density` is neither a number nor a schedule.
    """

    density: Density = 0.01
    by: Share = "norm"

    def __post_init__(self) -> None:
        check_density("density", self.density)
        check_one_of("by", self.by, get_args(Share), "'norm' is the cheaper one.")

    def select(self, x: Tensor, context: Round) -> Tensor:
        counts = zip(context.layout.segments, self.counts(x, context))
        wanted = [Wanted(s.offset, s.offset + s.size, k) for s, k in counts if s.size]
        return largest_of_each(x, wanted, context.shared_seed(), {})

    def counts(self, x: Tensor, context: Round) -> list[int]:
        """How many elements of each tensor to send, at most; arguments as for `select`."""
        layout, total = context.layout, self.count(context)
        if total == layout.size:
            return [segment.size for segment in layout.segments]
        weights = self._weights(x, layout)
        sizes = [segment.size for segment in layout.segments]
        more = _shared_out(total - sum(map(bool, sizes)), weights, [max(0, size - 1) for size in sizes])
        return [bool(size) + each for size, each in zip(sizes, more)]

    def count(self, context: Round) -> int:
        layout = context.layout
        return max(k_of(context.density(self.density), layout.size), sum(1 for s in layout.segments if s.size))

    def _weights(self, x: Tensor, layout: Layout) -> list[float]:
        # Relative to the largest, so that no sum is too large or too small.
        unit = x.abs().amax() if x.numel() else x.new_zeros(())
        unit = torch.where(unit > 0, unit, 1)
        weigh = _norm if self.by == "norm" else _effective_size
        nothing = x.new_zeros((), dtype=torch.float64)
        weights = [weigh(part / unit) if part.numel() else nothing for part in layout.flats(x)]
        # Read at once: on an accelerator, each read waits.
        return torch.stack(weights).tolist() if weights else []


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm


def _effective_size(x: Tensor) -> Tensor:
    """exp of the entropy of the magnitudes: from 1 to the number of elements; 0 for zeros."""
    magnitudes = x.abs().to(torch.float64)
    total = magnitudes.sum()
    chances = magnitudes.div_(torch.where(total > 0, total, 1))
    size: Tensor = torch.special.entr(chances).sum().exp()
    return torch.where(total > 0, size, torch.zeros_like(size))


def _shared_out(total: int, weights: list[float], most: list[int]) -> list[int]:
    """`total`, or as much of it as `most` allows, in whole numbers, in proportion to `weights`."""
    able = [i for i, (weight, each) in enumerate(zip(weights, most)) if weight > 0 and each]
    # Those with the greatest weight for each element are the first that cannot take more.
    able.sort(key=lambda i: most[i] / weights[i])
    # Of the ones that come after; added up from the least, so that none is lost.
    rests = list(accumulate(weights[i] for i in reversed(able)))[::-1]
    shares, left = [0.0] * len(most), float(total)
    for i, rest in zip(able, rests):
        shares[i] = min(float(most[i]), left * (weights[i] / rest))
        left -= shares[i]
    # Rounded so that the sum is: each number is its share, rounded up or down.
    ends = [round(reached) for reached in accumulate(shares)]
    return [min(end - begin, each) for begin, end, each in zip([0, *ends], ends, most)]
