"""The largest elements of every chunk."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparsecomm.codecs.selectors import Selector, k_of
from lightning_sparsecomm.rounds import Round
from lightning_sparsecomm.schedules import Density, check_density


@dataclass(frozen=True)
class ChunkTopK(Selector):
    """Of each segment's every `chunk` consecutive elements, exactly the min(k, non-zeros) of largest magnitude, with
    k = max(1, round(density·chunk)); of its last ones, if they are only m, of min(m, max(1, round(density·m))).

    Zeros are never sent. Which of those that tie for a chunk's last places are taken is left to `torch.topk`, and may
    differ between devices: ranks need not agree, as each sends what it chose. Exact and biased, like `TopK`; but no
    part of a tensor goes without.

    Source: SparseLoCo (Sarfi et al. 2025), with 64 of 4096. Here a chunk is consecutive in row-major
    order, whatever the tensor's shape.

    >>> from lightning_sparsecomm.layout import Layout
    >>> x = torch.tensor([3.0, -4.0, 0.0, 2.0, -0.5, 1.0])
    >>> ChunkTopK(0.5, chunk=2).select(x, Round(Layout([("weight", (5,)), ("bias", (1,))])))
    tensor([1, 3, 4, 5])

    Args:
        density: Fraction of a chunk's elements that is sent, in (0, 1], or a schedule of it.
        chunk: How many elements a chunk has.

    Raises:
        ValueError: `density` is outside (0, 1], or `chunk` is not a whole number of at least 1.
        TypeError: `density` is neither a number nor a schedule.
    """

    density: Density = 1 / 64
    chunk: int = 4096

    def __post_init__(self) -> None:
        check_density("density", self.density)
        if type(self.chunk) is not int or self.chunk < 1:
            raise ValueError(
                f"chunk must be a whole number, at least 1: how many elements a chunk has; got {self.chunk!r}. The"
                " paper has 4096."
            )

    def select(self, x: Tensor, round: Round, candidates: Sequence[Tensor | None] = ()) -> Tensor:
        parts = []
        density = round.density(self.density)
        for segment in round.layout.segments:
            stretch = x[segment.offset : segment.offset + segment.size]
            chunks, rest = divmod(segment.size, self.chunk)
            whole = segment.size - rest
            if chunks:
                rows = stretch[:whole].view(chunks, self.chunk)
                parts.append(_largest_in_rows(rows, k_of(density, self.chunk)).add_(segment.offset))
            if rest:
                last = _largest_in_rows(stretch[None, whole:], k_of(density, rest))
                parts.append(last.add_(segment.offset + whole))
        return torch.cat(parts) if parts else x.new_empty(0, dtype=torch.int64)

    def count(self, round: Round) -> int:
        density = round.density(self.density)
        counts = (divmod(segment.size, self.chunk) for segment in round.layout.segments)
        return sum(chunks * k_of(density, self.chunk) + k_of(density, rest) for chunks, rest in counts)


def _largest_in_rows(rows: Tensor, k: int) -> Tensor:
    """Sorted positions, in rows one after the other, of each row's min(k, non-zeros) largest magnitudes."""
    largest = rows.abs().topk(k, dim=1, sorted=False)
    columns = torch.where(largest.values > 0, largest.indices, rows.shape[1]).sort(1).values
    starts = torch.arange(0, rows.numel(), rows.shape[1], device=rows.device)
    return (columns + starts[:, None])[columns < rows.shape[1]]
