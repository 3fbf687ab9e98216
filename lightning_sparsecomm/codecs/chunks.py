"""The largest elements of every chunk."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparsecomm.codecs.selectors import Selector
from lightning_sparsecomm.rounds import Round


@dataclass(frozen=True)
class ChunkTopK(Selector):
    """Of each segment's every `chunk` consecutive elements, exactly the min(k, non-zeros) of largest magnitude; of its
    last ones, if they are only m, of min(m, max(1, round(k·m/chunk))).

    Zeros are never sent. Which of those that tie for a chunk's last places are taken is left to `torch.topk`, and may
    differ between devices: ranks need not agree, as each sends what it chose. Exact and biased, like `TopK`; but no
    part of a tensor goes without. k / chunk is its density, which a warm-up falls to.

    Source: SparseLoCo (Sarfi et al. 2025), with k = 64 of 4096. Here a chunk is consecutive in row-major
    order, whatever the tensor's shape.

    >>> from lightning_sparsecomm.layout import Layout
    >>> x = torch.tensor([3.0, -4.0, 0.0, 2.0, -0.5, 1.0])
    >>> ChunkTopK(k=1, chunk=2).select(x, Round(Layout([("weight", (5,)), ("bias", (1,))])))
    tensor([1, 3, 4, 5])

    Args:
        k: How many elements of a chunk are sent.
        chunk: How many elements a chunk has.

    Raises:
        ValueError: `k` is not a whole number from 1 to `chunk`.
    """

    k: int = 64
    chunk: int = 4096

    def __post_init__(self) -> None:
        for name, number in (("k", self.k), ("chunk", self.chunk)):
            if type(number) is not int or number < 1:
                raise ValueError(f"{name} must be a whole number, at least 1: a count of elements; got {number!r}.")
        if self.k > self.chunk:
            raise ValueError(
                f"k must be at most chunk, {self.chunk}: it is how many of a chunk's elements are sent; got {self.k}."
                " Give k = chunk to send them all."
            )

    def select(self, x: Tensor, round: Round, candidates: Sequence[Tensor | None] = ()) -> Tensor:
        parts = []
        k = self._k(self.chunk, round)
        for segment in round.layout.segments:
            stretch = x[segment.offset : segment.offset + segment.size]
            chunks, rest = divmod(segment.size, self.chunk)
            whole = segment.size - rest
            if chunks:
                rows = stretch[:whole].view(chunks, self.chunk)
                parts.append(_largest_in_rows(rows, k).add_(segment.offset))
            if rest:
                last = _largest_in_rows(stretch[None, whole:], self._k(rest, round))
                parts.append(last.add_(segment.offset + whole))
        return torch.cat(parts) if parts else x.new_empty(0, dtype=torch.int64)

    def count(self, round: Round) -> int:
        counts = (divmod(segment.size, self.chunk) for segment in round.layout.segments)
        k = self._k(self.chunk, round)
        return sum(chunks * k + self._k(rest, round) for chunks, rest in counts)

    def _k(self, size: int, round_: Round) -> int:
        """How many are sent of a chunk, which may be a shorter one, or none at all."""
        density = round_.density(self.k / self.chunk)
        return min(size, max(1, round(density * size)))


def _largest_in_rows(rows: Tensor, k: int) -> Tensor:
    """Sorted positions, in rows one after the other, of each row's min(k, non-zeros) largest magnitudes."""
    largest = rows.abs().topk(k, dim=1, sorted=False)
    columns = torch.where(largest.values > 0, largest.indices, rows.shape[1]).sort(1).values
    starts = torch.arange(0, rows.numel(), rows.shape[1], device=rows.device)
    return (columns + starts[:, None])[columns < rows.shape[1]]
