"""Whole blocks of elements: the rows of an embedding, or runs of a row."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lightning_sparsecomm.codecs.selectors import Selector, k_of
from lightning_sparsecomm.kernels import kernels_for, position_kernels_for
from lightning_sparsecomm.layout import Layout, SparseVector
from lightning_sparsecomm.rounds import Round
from lightning_sparsecomm.schedules import Density, check_density


@dataclass(frozen=True)
class TopBlocks(Selector):
    """Of each tensor's B blocks the min(k, non-zero ones) of largest Euclidean norm, k = max(1, round(density·B)); all
    non-zero ones of a tensor where they are fewer than `sparse_below`·B.

    So the gradient of an embedding table, of which a step touches few rows, goes whole, with nothing left behind, and
    other tensors lose all but the largest blocks; which is which, the gradient tells in each step. A block is a row of
    the tensor (what remains when its first index is fixed), cut into runs of `size` elements where it is longer; the
    last run of a row may be shorter. A tensor of one dimension is one row.

    Blocks of zeros are never sent; blocks that tie are taken as `TopK` takes elements. Biased: use it with error
    feedback, unless `density` is 1.

    Source: S2 Reducer, section 2.2: K blocks of largest l2 norm, 1/32 of them. What is sparse by itself is sent whole
    there too; the two are trained apart.

    >>> from lightning_sparsecomm.layout import Layout
    >>> round = Round(Layout([("table", (4, 2)), ("weight", (2, 2))]))
    >>> x = torch.tensor([0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 2.0, 0.5])
    >>> TopBlocks(density=0.5).select(x, round)
    tensor([ 2,  3, 10, 11])

    Args:
        density: Fraction of a tensor's blocks to send, in (0, 1], or a schedule of it. 1 sends all that are not zero.
        size: The most elements of a block.
        sparse_below: The fraction of non-zero blocks below which a tensor is sparse by itself, in [0, 1].

    Raises:
        ValueError: `density` outside (0, 1], `size` below 1, or `sparse_below` outside [0, 1].
    """

    density: Density = 1 / 32
    size: int = 256
    sparse_below: float = 0.5

    def __post_init__(self) -> None:
        check_density("block_density", self.density)
        if type(self.size) is not int or self.size < 1:
            raise ValueError(
                f"block_size must be a whole number, at least 1: the most elements of a block; got {self.size!r}."
                " Use 256, or the length of an embedding."
            )
        if not (type(self.sparse_below) in (int, float) and 0 <= self.sparse_below <= 1):
            raise ValueError(
                "sparse_below must be in [0, 1]: the fraction of non-zero blocks below which a tensor is sent whole;"
                f" got {self.sparse_below!r}. Use 0 to keep to block_density in every tensor."
            )

    def bounds(self, layout: Layout, device: torch.device) -> Tensor:
        """Where each block begins, and where the last one ends. `[blocks + 1]` int64."""
        return _bounds(layout, self.size)[0].to(device)

    def blocks(self, x: Tensor | SparseVector, round: Round) -> Tensor:
        """The numbers of the blocks to send, int64, strictly increasing; arguments as for `select`."""
        starts, firsts = _bounds(round.layout, self.size)
        density = round.density(self.density)
        if isinstance(x, SparseVector):
            # Of the blocks that are held alone: few of a table's rows.
            owners = torch.searchsorted(starts.to(x.indices.device), x.indices, right=True) - 1
            held, counts = torch.unique_consecutive(owners, return_counts=True)
            some = kernels_for(x.values.device, x.values.dtype).energies(
                x.values, torch.nn.functional.pad(counts.cumsum(0), (1, 0))
            )
            nonzero: Tensor = held[some > 0]
            if density == 1:
                return nonzero
            energies = some.new_zeros(starts.numel() - 1).index_copy_(0, held, some)
        else:
            energies = kernels_for(x.device, x.dtype).energies(x, starts.to(x.device))
            nonzero = energies.nonzero().view(-1)
            if density == 1:
                return nonzero
        kernels = kernels_for(energies.device, energies.dtype)
        parts = []
        counts = torch.searchsorted(nonzero, firsts.to(nonzero.device)).diff().tolist()
        of_tensors = zip(nonzero.split(counts), firsts.tolist(), firsts.diff().tolist(), strict=False)
        for ordinal, (found, first, blocks) in enumerate(of_tensors):
            k = k_of(density, blocks)
            if found.numel() > k and found.numel() >= self.sparse_below * blocks:
                largest = kernels.largest(energies[first : first + blocks], k, round.shared_seed() + ordinal)
                parts.append(largest.add_(first))
            else:
                parts.append(found)
        return torch.cat(parts) if parts else nonzero

    def select(self, x: Tensor, round: Round, candidates: Sequence[Tensor | None] = ()) -> Tensor:
        return elements(self.blocks(x, round), self.bounds(round.layout, x.device))

    def count(self, round: Round) -> int:
        return round.layout.size


def elements(blocks: Tensor, bounds: Tensor) -> Tensor:
    """The positions of all elements of `blocks` (`[b]` int64, increasing), which lie as `bounds` says; int64."""
    starts = bounds[blocks]
    return position_kernels_for(bounds.device).spans(starts, bounds[blocks + 1] - starts)


@lru_cache(maxsize=16)
def _bounds(layout: Layout, size: int) -> tuple[Tensor, Tensor]:
    """Where each block begins, and the number of each tensor's first block; both with an end."""
    parts, firsts = [], [0]
    for segment in layout.segments:
        rows = segment.shape[0] if len(segment.shape) > 1 else 1
        length = segment.size // rows if rows else 0
        runs = torch.arange(0, length, size)
        starts = torch.arange(rows)[:, None] * length + runs
        parts.append(starts.view(-1) + segment.offset)
        firsts.append(firsts[-1] + parts[-1].numel())
    return torch.cat([*parts, torch.tensor([layout.size])]), torch.tensor(firsts)
