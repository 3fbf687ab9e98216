"""Every tensor of a layout cut into as many pieces as there are ranks; and put together again."""

import itertools
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout, SparseVector
from lightning_sparsecomm.basis.allocation import empty, zeros
from lightning_sparsecomm.basis.layout import count_of, values_of
from lightning_sparsecomm.kernels import Moves, kernels_for, position_kernels_for


class Pieces:
    """A piece is a part of each tensor; all pieces are equally long. The last parts are filled up with zeros.

    >>> pieces = Pieces(Layout([("weight", (5,)), ("bias", (2,))]), 2)
    >>> cut = pieces.cut(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]))
    >>> cut
    tensor([[1., 2., 3., 6.],
            [4., 5., 0., 7.]])
    >>> pieces.joined(list(cut))
    tensor([1., 2., 3., 4., 5., 6., 7.])

    Args:
        layout: That of the whole vector.
        count: How many pieces.
    """

    def __init__(self, layout: Layout, count: int) -> None:
        self.whole, self.count = layout, count
        self.layout = Layout((segment.name, (-(-segment.size // count),)) for segment in layout.segments)

    @staticmethod
    @lru_cache(maxsize=64)
    def of(layout: Layout, count: int) -> "Pieces":
        """The same object for the same arguments."""
        return Pieces(layout, count)

    def cut(self, vector: Tensor) -> Tensor:
        """`[count, p]`: the pieces of `[n]`; in other memory."""
        pieces = empty(self.count * self.layout.size, vector).view(self.count, self.layout.size)
        for flat, part in zip(self.whole.flats(vector), self.layout.segments):
            into = pieces[:, part.offset : part.offset + part.size]
            full = flat.numel() // part.size if part.size else 0
            into[:full].copy_(flat[: full * part.size].view(full, part.size))
            if full < self.count:
                into[full:].zero_()
                into[full : full + 1, : flat.numel() - full * part.size].copy_(flat[full * part.size :])
        return pieces

    def clear_filling_(self, piece: Tensor, number: int) -> None:
        """Sets to zero, in a piece, the elements that it was filled up with."""
        for flat, valid in zip(self.layout.flats(piece), self._valid[number].tolist()):
            if valid < flat.numel():
                flat[valid:] = 0

    def joined(self, pieces: Iterable[SparseVector | Tensor]) -> SparseVector | Tensor:
        """`[n]`: pieces in the order in which they were cut. The dtype is that of the first one.

        It is sparse if all pieces are, and hold at most an eighth of the elements together. Otherwise it is dense: then
        pieces are consumed one by one, and none is kept.
        """
        sparse: list[SparseVector] = []
        whole: Tensor | None = None
        # Not by `enumerate`, which holds one piece while the next is made.
        numbers = itertools.count()
        for piece in pieces:
            number = next(numbers)
            if whole is None and isinstance(piece, SparseVector):
                sparse.append(piece)
                if sum(map(count_of, sparse)) <= self.whole.size // 8:
                    continue
                piece = sparse.pop()
            if whole is None:
                whole = zeros(self.whole.size, values_of(sparse[0] if sparse else piece))
                for earlier, each in enumerate(sparse):
                    self._write(whole, earlier, each)
                sparse.clear()
            self._write(whole, number, piece)
            del piece
        if whole is not None:
            return whole
        return self._merged([self._in_place(number, each) for number, each in enumerate(sparse)])

    def _write(self, whole: Tensor, number: int, piece: SparseVector | Tensor) -> None:
        """Writes a piece to its place in the whole vector."""
        if isinstance(piece, SparseVector):
            kernels = kernels_for(whole.device, whole.dtype)
            kernels.put_at_(whole, piece.indices, piece.values.to(whole.dtype), self._moves(number, piece.indices))
            return
        for into, part in zip(self.whole.flats(whole), self.layout.flats(piece)):
            into = into[number * len(part) : (number + 1) * len(part)]
            into.copy_(part[: len(into)])

    @cached_property
    def _valid(self) -> Tensor:
        """`[count, segments]` int64: how many elements of a piece's part are elements of the whole."""
        sizes = self.whole.bounds.diff()
        widths = self.layout.bounds.diff()
        return torch.stack([(sizes - number * widths).clamp(min=0).minimum(widths) for number in range(self.count)])

    def _in_place(self, number: int, piece: SparseVector) -> "_Placed":
        """A piece's elements where they are in the whole vector; without those that it was filled up with."""
        first, counts, shifts = self._moves(number, piece.indices)
        indices, values = piece.indices, piece.values
        if int(counts.sum()) < indices.numel():
            # In the order of segments, so that what is left stays sorted.
            kept = position_kernels_for(first.device).spans(first, counts)
            indices, values = indices[kept], values[kept]
        return indices + shifts.repeat_interleave(counts), values, counts

    def _moves(self, number: int, indices: Tensor) -> Moves:
        """From a piece's sorted indices to those of the whole; without elements that it was filled up with."""
        device = indices.device
        starts = self.layout.bounds[:-1].to(device)
        first = torch.searchsorted(indices, starts)
        counts = torch.searchsorted(indices, starts + self._valid[number].to(device)) - first
        shifts = self.whole.bounds[:-1].to(device) - starts + number * self.layout.bounds.diff().to(device)
        return Moves(first, counts, shifts)

    def _merged(self, placed: "Sequence[_Placed]") -> SparseVector:
        """Sorted: for each tensor, its parts in order."""
        indices, values = torch.cat([each[0] for each in placed]), torch.cat([each[1] for each in placed])
        counts = torch.stack([each[2] for each in placed])
        first = (counts.view(-1).cumsum(0) - counts.view(-1)).view_as(counts)
        spans = position_kernels_for(first.device).spans
        order = spans(first.t().reshape(-1), counts.t().reshape(-1))
        return SparseVector(indices[order], values[order], self.whole.size)


_Placed = tuple[Tensor, Tensor, Tensor]
"""Indices and values, each `[k]`, and how many are in each segment."""
