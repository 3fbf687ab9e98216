"""The largest elements of every chunk."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparsecomm.basis.arguments import check_whole_number
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.schedules import Density, check_density
from lightning_sparsecomm.codecs.selectors.base import Selector, k_of


@dataclass(frozen=True)
class ChunkTopK(Selector):
    """Selects the elements of largest magnitude in every chunk of every tensor.

    A chunk is `chunk` consecutive elements of a tensor; the last one may have fewer. Of m elements, exactly the
    min(k, non-zeros) largest are sent, with k = min(m, max(1, round(density·m))). Zeros are never sent. `torch.topk`
    breaks ties for the last places, possibly differently on different devices; ranks need not agree, as each sends the
    positions it chose. Exact and biased, like `TopK`, but every part of a tensor is represented.

    Source: SparseLoCo (Sarfi et al. 2025), with 64 of 4096. Here a chunk is consecutive in row-major order, whatever
    the tensor's shape.

    >>> from lightning_sparsecomm.basis.layout import Layout
    >>> x = torch.tensor([3.0, -4.0, 0.0, 2.0, -0.5, 1.0])
    >>> ChunkTopK(0.5, chunk=2).select(x, Round(Layout([("weight", (5,)), ("bias", (1,))])))
    tensor([1, 3, 4, 5])

    Args:
        density: Fraction of each chunk to send, in (0, 1], or a schedule of it.
        chunk: Elements in a chunk.

    Raises:
        ValueError: `density` is outside (0, 1], or `chunk` is not a whole number of at least 1.
        TypeError: `density` is neither a number nor a schedule.
    """

    density: Density = 1 / 64
    chunk: int = 4096

    def __post_init__(self) -> None:
        check_density("density", self.density)
        check_whole_number("chunk", self.chunk, 1, "the elements in a chunk", "Use 4096, as the paper does.")

    def select(self, x: Tensor, context: Round) -> Tensor:
        parts = []
        density = context.density(self.density)
        for segment in context.layout.segments:
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

    def count(self, context: Round) -> int:
        density = context.density(self.density)
        counts = (divmod(segment.size, self.chunk) for segment in context.layout.segments)
        return sum(chunks * k_of(density, self.chunk) + k_of(density, rest) for chunks, rest in counts)


def _largest_in_rows(rows: Tensor, k: int) -> Tensor:
    """Sorted positions, in the flattened rows, of each row's min(k, non-zeros) largest magnitudes."""
    largest = rows.abs().topk(k, dim=1, sorted=False)
    columns = torch.where(largest.values > 0, largest.indices, rows.shape[1]).sort(1).values
    starts = torch.arange(0, rows.numel(), rows.shape[1], device=rows.device)
    return (columns + starts[:, None])[columns < rows.shape[1]]
