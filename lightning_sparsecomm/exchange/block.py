"""Blocks of which most are zero on all ranks: they agree on which are not, and all-reduce those."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_sparsecomm.checks import check_switches, is_number
from lightning_sparsecomm.codecs.blocks import TopBlocks, elements
from lightning_sparsecomm.codecs.sketch import CountSketch
from lightning_sparsecomm.exchange.base import Exchange, Exchanged, NonFiniteGradientError, Outgoing
from lightning_sparsecomm.kernels import position_kernels_for
from lightning_sparsecomm.layout import SparseVector
from lightning_sparsecomm.rounds import Round
from lightning_sparsecomm.wire import Wire

SizedBy = Literal["union", "rank"]


class BlockReduce(Exchange):
    """A bitmap of the blocks that anyone sends, by an all-reduce with OR; then those blocks, by an all-reduce with sum.

    In the second round travel either the union's blocks one after the other, which is exact, or, where that is
    shorter, a count sketch of them: unbiased, with an error of mean square ‖sum‖²/c for each element, c being its
    columns. What memories forget is the blocks that this rank sent, to the bit, in either case: what a sketch gets
    wrong is not fed back (fed back, it would grow from step to step where the sketch is small).

    Bytes handed over: one bit for each block and two for each tensor (and 30 bytes with `sized_by="rank"`), then 4 for
    each element of the union's blocks, or of the sketch; independent of the number of ranks but through the union.

    Source: S2 Reducer, algorithm 1, where hashes stay the same for all steps; here they are drawn anew in each, and the
    sketch holds the union's elements one after the other. Without a sketch it is what OmniReduce (Fei et al. 2021)
    sends, without its aggregators.

    Args:
        blocks: Chooses the blocks that each rank sends; all that are not zero by default.
        sketch_ratio: λ, the sketch's size by that of what it holds; None for no sketch. From 1 on, blocks are shorter.
        rows: The sketch's rows; the estimate is their median.
        sized_by: What λ is taken of: the elements of the union, or of the rank that has most, as in the paper.
        always_sketch: Whether the sketch is used even where it is longer than the blocks that it holds.

    Raises:
        ValueError: A ratio that is not positive, `rows` below 1, or an unknown `sized_by`.
    """

    takes_sparse = True

    def __init__(
        self,
        blocks: TopBlocks | None = None,
        sketch_ratio: float | None = None,
        rows: int = 1,
        sized_by: SizedBy = "union",
        always_sketch: bool = False,
    ) -> None:
        if sketch_ratio is not None and not (is_number(sketch_ratio) and 0 < sketch_ratio < float("inf")):
            raise ValueError(
                "sketch_ratio must be a positive number: the sketch's size by that of what it holds; got"
                f" {sketch_ratio!r}. The paper has 0.5; None sends the blocks themselves."
            )
        if sized_by not in ("union", "rank"):
            raise ValueError(
                f"sized_by must be 'union' (of what any rank sends) or 'rank' (of what one does); got {sized_by!r}."
            )
        check_switches(always_sketch=always_sketch)
        if always_sketch and sketch_ratio is None:
            raise ValueError(
                "always_sketch=True needs a sketch_ratio, such as the paper's 0.5; got None, for no sketch."
            )
        self.blocks = TopBlocks(density=1.0) if blocks is None else blocks
        self.sketch_ratio = sketch_ratio
        self.rows = CountSketch(rows, 1).rows
        self.sized_by = sized_by
        self.always_sketch = always_sketch

    def run(self, outgoing: Outgoing, round: Round, wire: Wire) -> Exchanged:
        x, present, nonfinite_segment, *_ = outgoing
        values = x.values if isinstance(x, SparseVector) else x
        bounds = self.blocks.bounds(round.layout, values.device)
        mine = values.new_empty(0, dtype=torch.int64)
        if nonfinite_segment is None:
            mine = self.blocks.blocks(x, round)
        lengths = bounds[mine + 1] - bounds[mine]
        # Only a sketch that is sized so needs to know how much a rank holds.
        held = int(lengths.sum()) if self.sketch_ratio is not None and self.sized_by == "rank" else None
        agreed = _agree(mine, held, bounds.numel() - 1, present, nonfinite_segment, wire)
        if not agreed.finite:
            raise NonFiniteGradientError.found_on_any(nonfinite_segment, round, wire, values.device)

        together = elements(agreed.blocks, bounds)
        packed = values.new_zeros(together.numel())
        # What moves a position in the vector to where it lies among the union's blocks.
        sizes = bounds[agreed.blocks + 1] - bounds[agreed.blocks]
        shifts = sizes.cumsum(0) - sizes - bounds[agreed.blocks]
        if isinstance(x, SparseVector):
            owners = torch.searchsorted(bounds, x.indices, right=True) - 1
            kept = torch.isin(owners, mine)
            sent, owners = SparseVector(x.indices[kept], x.values[kept], x.size), owners[kept]
            packed[sent.indices + shifts[torch.searchsorted(agreed.blocks, owners)]] = sent.values
        else:
            chosen = elements(mine, bounds)
            sent = SparseVector(chosen, x[chosen], x.numel())
            at = shifts[torch.searchsorted(agreed.blocks, mine)]
            packed[chosen + torch.repeat_interleave(at, lengths)] = sent.values
        if packed.numel():
            self._average_(packed, agreed.most, round, wire)
        return Exchanged(SparseVector(together, packed, round.layout.size), sent, agreed.present)

    def _average_(self, packed: Tensor, most: int, round: Round, wire: Wire) -> None:
        """The mean over ranks, in place: exactly or by a sketch; `most` is what the rank that has most has of it."""
        # Divided before the sum, as DDP does.
        packed.div_(wire.world_size)
        if self.sketch_ratio is not None:
            # What a rank has is a part of the union, also where it was rounded up.
            held = packed.numel() if self.sized_by == "union" else min(most, packed.numel())
            sketch = CountSketch(self.rows, max(1, math.ceil(self.sketch_ratio * held / self.rows)))
            if self.always_sketch or sketch.rows * sketch.columns < packed.numel():
                seed = round.shared_seed()
                table = sketch.empty(packed.device, packed.dtype)
                sketch.insert_(table, packed, seed)
                wire.all_reduce_(table)
                packed.copy_(sketch.query(table, packed.numel(), seed))
                return
        wire.all_reduce_(packed)

    def __repr__(self) -> str:
        options = "" if self.sketch_ratio is None else f", sketch_ratio={self.sketch_ratio}, rows={self.rows}"
        options += f", sized_by={self.sized_by!r}" if self.sized_by != "union" else ""
        options += ", always_sketch=True" if self.always_sketch else ""
        return f"BlockReduce({self.blocks!r}{options})"


class _Agreed(NamedTuple):
    """What all ranks know after the first round.

    Attributes:
        blocks: The numbers of the blocks that any of them sends, int64, increasing.
        present: For each segment, whether any has a gradient for it.
        finite: Whether all have finite gradients only.
        most: The most elements that any sends, rounded up by less than an eighth.
    """

    blocks: Tensor
    present: list[bool]
    finite: bool
    most: int


def _agree(
    blocks: Tensor, held: int | None, count: int, present: Sequence[bool], nonfinite_segment: int | None, wire: Wire
) -> _Agreed:
    """One all-reduce with OR, of a bit for each of `count` blocks, two for each segment, and, if asked for, a number in
    unary."""
    segments = len(present)
    level = 0 if held is None else _level(held)
    numbers = torch.tensor(
        [
            *(count + i for i, here in enumerate(present) if here),
            *(() if nonfinite_segment is None else (count + segments + nonfinite_segment,)),
            *(count + 2 * segments + i for i in range(level)),
        ],
        dtype=torch.int64,
        device=blocks.device,
    )
    kernels = position_kernels_for(blocks.device)
    size = count + 2 * segments + (0 if held is None else _LEVELS)
    bitmap = wire.all_reduce_or_(kernels.write_bitmap(torch.cat([blocks, numbers]), size))
    found = kernels.read_bitmap(bitmap, size).indices
    others = found[int(torch.searchsorted(found, count)) :].sub(count).tolist()
    anyone = {i for i in others if i < segments}
    finite = not any(segments <= i < 2 * segments for i in others)
    levels = sum(i >= 2 * segments for i in others)
    return _Agreed(
        found[: found.numel() - len(others)],
        [i in anyone for i in range(segments)],
        finite,
        _most(levels),
    )


# Numbers up to 2^32 with a leading bit and three more: a maximum of such is an OR of their levels in unary.
_LEVELS = 8 * 30


def _level(number: int) -> int:
    """The least level whose number is at least this one; whole numbers only, so that all machines agree."""
    if number <= 8:
        return number
    shift = number.bit_length() - 4
    return 8 * shift + -(-number >> shift)


def _most(level: int) -> int:
    """The number of a level."""
    return level if level <= 8 else (level % 8 + 8) << (level // 8 - 1)
