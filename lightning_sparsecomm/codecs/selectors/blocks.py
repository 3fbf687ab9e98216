"""Whole blocks of elements: the rows of an embedding, or runs of a row."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lightning_sparsecomm.basis.arguments import check_whole_number, is_number
from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.schedules import Density, check_density
from lightning_sparsecomm.codecs.selectors.base import Selector, k_of
from lightning_sparsecomm.kernels import kernels_for, position_kernels_for


@dataclass(frozen=True)
class TopBlocks(Selector):
    """Selects the blocks of largest Euclidean norm in each tensor; all non-zero blocks if the tensor is sparse already.

    Of a tensor's B blocks, the min(k, non-zero ones) largest are sent, with k = max(1, round(density·B)). If fewer than
    `sparse_below`·B of its blocks are non-zero, all of these are sent. This is decided in each step from the gradient:
    an embedding table, of which a step touches few rows, is sent whole and leaves no residual.

    A block is a row of the tensor: the elements that share its first index. Longer rows are cut into runs of `size`
    elements, the last of which may be shorter. A tensor of one dimension is one row. Blocks of zeros are never sent.
    Ties between blocks are broken as `TopK` breaks them between elements. Biased, unless `density` is 1: use it with
    error feedback.

    Source: S2 Reducer, section 2.2: K blocks of largest l2 norm, 1/32 of them. The paper also sends embeddings'
    gradients whole, but a training has either those or selected blocks, not both.

    >>> from lightning_sparsecomm.basis.layout import Layout
    >>> context = Round(Layout([("table", (4, 2)), ("weight", (2, 2))]))
    >>> x = torch.tensor([0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 2.0, 0.5])
    >>> TopBlocks(density=0.5).select(x, context)
    tensor([ 2,  3, 10, 11])

    Args:
        density: Fraction of each tensor's blocks to send, in (0, 1], or a schedule of it. 1 sends all non-zero blocks.
        size: Greatest number of elements in a block.
        sparse_below: The fraction of non-zero blocks below which a tensor is sent whole, in [0, 1].

    Raises:
        ValueError: `density` is outside (0, 1], `size` is not a whole number of at least 1, or `sparse_below` is not a
            number in [0, 1].
        TypeError: `density` is neither a number nor a schedule.
    """

    density: Density = 1 / 32
    size: int = 256
    sparse_below: float = 0.5

    def __post_init__(self) -> None:
        check_density("density", self.density)
        meaning, remedy = "the greatest number of elements in a block", "Use 256, or the length of an embedding."
        check_whole_number("size", self.size, 1, meaning, remedy)
        if not (is_number(self.sparse_below) and 0 <= self.sparse_below <= 1):
            raise ValueError(
                "sparse_below must be in [0, 1]: the fraction of non-zero blocks below which a tensor is sent whole;"
                f" got {self.sparse_below!r}. Use 0 to apply the density to every tensor."
            )

    def bounds(self, layout: Layout, device: torch.device) -> Tensor:
        """Where each block begins, and where the last one ends: `[blocks + 1]` int64 on `device`."""
        return _bounds(layout, self.size)[0].to(device)

    def blocks(self, values: Tensor, context: Round, indices: Tensor | None = None) -> Tensor:
        """The numbers of the blocks to send: int64, strictly increasing.

        `values` are the whole vector, or only its elements at `indices` (`[k]` int64, sorted).
        """
        starts, firsts = _bounds(context.layout, self.size)
        density = context.density(self.density)
        ranking = kernels_for(values.device, values.dtype)
        if indices is not None:
            # Norms are computed only for blocks with elements, as a step touches few rows of a table.
            owners = torch.searchsorted(starts.to(indices.device), indices, right=True) - 1
            held, counts = torch.unique_consecutive(owners, return_counts=True)
            some = ranking.energies(values, torch.nn.functional.pad(counts.cumsum(0), (1, 0)))
            nonzero: Tensor = held[some > 0]
            if density == 1:
                return nonzero
            energies = some.new_zeros(starts.numel() - 1).index_copy_(0, held, some)
        else:
            energies = ranking.energies(values, starts.to(values.device))
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
                largest = kernels.largest(energies[first : first + blocks], k, context.shared_seed() + ordinal)
                parts.append(largest.add_(first))
            else:
                parts.append(found)
        return torch.cat(parts) if parts else nonzero

    def select(self, x: Tensor, context: Round) -> Tensor:
        return elements(self.blocks(x, context), self.bounds(context.layout, x.device))

    def count(self, context: Round) -> int:
        return context.layout.size


def elements(blocks: Tensor, bounds: Tensor) -> Tensor:
    """The positions of all elements in `blocks` (`[b]` int64, strictly increasing), given `TopBlocks.bounds`."""
    starts = bounds[blocks]
    return position_kernels_for(bounds.device).spans(starts, bounds[blocks + 1] - starts)


@lru_cache(maxsize=16)
def _bounds(layout: Layout, size: int) -> tuple[Tensor, Tensor]:
    """Where each block begins, and the number of each tensor's first block. Both have one entry more, for the end."""
    parts, firsts = [], [0]
    for segment in layout.segments:
        rows = segment.shape[0] if len(segment.shape) > 1 else 1
        length = segment.size // rows if rows else 0
        runs = torch.arange(0, length, size)
        starts = torch.arange(rows)[:, None] * length + runs
        parts.append(starts.view(-1) + segment.offset)
        firsts.append(firsts[-1] + parts[-1].numel())
    return torch.cat([*parts, torch.tensor([layout.size])]), torch.tensor(firsts)
