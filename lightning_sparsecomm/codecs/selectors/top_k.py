"""The elements of largest magnitude."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_sparsecomm.basis.allocation import joined, picked
from lightning_sparsecomm.basis.arguments import check_one_of
from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.schedules import Density, check_density
from lightning_sparsecomm.codecs.selectors.base import k_of
from lightning_sparsecomm.codecs.selectors.candidates import HintedSelector, Hints, Wanted, candidates_of
from lightning_sparsecomm.kernels import kernels_for

Scope = Literal["model", "tensor", "balanced"]


@dataclass(frozen=True)
class TopK(HintedSelector):
    """Selects exactly the min(k, non-zeros) elements of largest magnitude, with k = min(n, max(1, round(density·n))).

    Zeros of either sign are never sent. If T elements tie for the last m places, they are numbered by position, and
    numbers (s + ⌊j·T/m⌋) mod T are taken for j = 0 … m − 1. The start s = `context.shared_seed()` mod T changes in each
    round, so no position is favoured.

    Exact at any density: a strided sample only rules out elements that need no ranking. Density 1 (k = n) sends all
    non-zeros and ranks nothing. Biased, as every top-k is: use it with error feedback.

    Source: Combining Global Sparse Gradients with Local Gradients (scope "model"); Deep Gradient Compression,
    section 3 (scope "tensor", threshold from a sample). The latter sends every element above its sampled threshold; we
    send exactly k.

    >>> from lightning_sparsecomm.basis.layout import Layout
    >>> context = Round(Layout([("weight", (2, 2)), ("bias", (2,))]))
    >>> x = torch.tensor([3.0, -4.0, 0.0, 1.0, 0.5, -2.0])
    >>> TopK(0.5).select(x, context), TopK(0.5, scope="tensor").select(x, context)
    (tensor([0, 1, 5]), tensor([0, 1, 5]))
    >>> TopK(0.34).select(x, context), TopK(0.34, scope="tensor").select(x, context)
    (tensor([0, 1]), tensor([1, 5]))

    Args:
        density: Fraction of elements to send, in (0, 1], or a schedule of it.
        scope: "model" ranks the whole vector at once. "tensor" ranks each tensor by itself, with its own k, which is at
            least 1 if the tensor has elements. "balanced" does so with a k proportional to the square root of the
            tensor's size, as far as it has that many elements: small tensors are sent more densely than large ones,
            and all together at `density`.

    Raises:
        ValueError: `density` is outside (0, 1], or `scope` is unknown.
        TypeError: `density` is neither a number nor a schedule.
    """

    density: Density = 0.01
    scope: Scope = "model"

    def __post_init__(self) -> None:
        check_density("density", self.density)
        check_one_of(
            "scope",
            self.scope,
            get_args(Scope),
            "'model' ranks all elements together, 'tensor' each tensor by itself, 'balanced' small ones more densely.",
        )

    def wanted(self, context: Round) -> list[Wanted]:
        density, layout = context.density(self.density), context.layout
        if self.scope == "model":
            return [Wanted(0, layout.size, k_of(density, layout.size))] if layout.size else []
        densities = _balanced(layout, density) if self.scope == "balanced" else repeat(density)
        return [
            Wanted(s.offset, s.offset + s.size, k_of(each, s.size))
            for s, each in zip(layout.segments, densities)
            if s.size
        ]

    def select_hinted(self, x: Tensor, context: Round, hints: Hints) -> Tensor:
        return largest_of_each(x, self.wanted(context), context.shared_seed(), hints)

    def count(self, context: Round) -> int:
        return sum(stretch.k for stretch in self.wanted(context))


@lru_cache(maxsize=256)
def _balanced(layout: Layout, density: float) -> tuple[float, ...]:
    """A density for each segment: k is proportional to the root of its size, at most its size, and adds up."""
    sizes = sorted((segment.size for segment in layout.segments if segment.size), reverse=True)
    left, roots = density * sum(sizes), sum(math.sqrt(size) for size in sizes)
    # Small tensors are sent whole; what they do not need goes to larger ones.
    while sizes and left * math.sqrt(sizes[-1]) >= sizes[-1] * roots:
        left, roots = left - sizes[-1], roots - math.sqrt(sizes[-1])
        sizes.pop()
    factor = left / roots if sizes else math.inf
    return tuple(min(1.0, factor / math.sqrt(segment.size)) if segment.size else 1.0 for segment in layout.segments)


def largest_of_each(x: Tensor, stretches: Sequence[Wanted], seed: int, hints: Hints) -> Tensor:
    """Sorted positions of each stretch's min(k, non-zeros) largest magnitudes. Ties are broken as `TopK` says."""
    kernels = kernels_for(x.device, x.dtype)
    if not hints and (kernels.many_at_once or all(stretch.wants_many for stretch in stretches)):
        return kernels.largest_of_each(x, stretches, seed)
    parts = [_largest_of(x, stretch, seed, hints.get(stretch)) for stretch in stretches]
    return joined(parts) if parts else x.new_empty(0, dtype=torch.int64)


def _largest_of(x: Tensor, stretch: Wanted, seed: int, candidates: Tensor | None) -> Tensor:
    start, stop, k = stretch
    kernels = kernels_for(x.device, x.dtype)
    if candidates is not None:
        return picked(candidates, kernels.largest(picked(x, candidates), k, seed))
    values = x[start:stop]
    candidates = None if stretch.wants_many else candidates_of(values, k)
    if candidates is None:
        return kernels.largest(values, k, seed).add_(start)
    return picked(candidates, kernels.largest(picked(values, candidates), k, seed)).add_(start)
