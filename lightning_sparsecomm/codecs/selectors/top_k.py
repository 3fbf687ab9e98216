"""The elements of largest magnitude."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.schedules import Density, check_density
from lightning_sparsecomm.codecs.selectors.base import k_of
from lightning_sparsecomm.codecs.selectors.candidates import HintedSelector, Hints, Wanted, candidates_of
from lightning_sparsecomm.kernels import kernels_for


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
            least 1 if the tensor has elements.

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
                f" got {self.scope!r}. Use 'model', for example."
            )

    def wanted(self, context: Round) -> list[Wanted]:
        density, layout = context.density(self.density), context.layout
        if self.scope == "model":
            stretches = [(0, layout.size)] if layout.size else []
        else:
            stretches = [(s.offset, s.offset + s.size) for s in layout.segments if s.size]
        return [Wanted(start, stop, k_of(density, stop - start)) for start, stop in stretches]

    def select_hinted(self, x: Tensor, context: Round, hints: Hints) -> Tensor:
        seed = context.shared_seed()
        parts = [_largest(x, stretch, seed, hints.get(stretch)) for stretch in self.wanted(context)]
        return torch.cat(parts) if parts else x.new_empty(0, dtype=torch.int64)

    def count(self, context: Round) -> int:
        return sum(stretch.k for stretch in self.wanted(context))


def _largest(x: Tensor, stretch: Wanted, seed: int, candidates: Tensor | None) -> Tensor:
    """Sorted positions of a stretch's min(k, non-zeros) largest magnitudes. Ties are broken as `TopK` says."""
    start, stop, k = stretch
    kernels = kernels_for(x.device, x.dtype)
    if candidates is not None:
        return candidates[kernels.largest(x[candidates], k, seed)]
    values = x[start:stop]
    candidates = candidates_of(values, k)
    if candidates is None:
        return kernels.largest(values, k, seed).add_(start)
    return candidates[kernels.largest(values[candidates], k, seed)].add_(start)
