"""Blocks that are mostly zero on all ranks: ranks agree on those that are not, and all-reduce them."""

import math
from typing import Literal

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Round, SparseVector, Vector, Wire, phase
from lightning_sparsecomm.basis.arguments import check_booleans, is_number
from lightning_sparsecomm.codecs import CountSketch, TopBlocks
from lightning_sparsecomm.codecs.selectors.blocks import elements
from lightning_sparsecomm.exchange.base import Exchanged, SparseExchange
from lightning_sparsecomm.exchange.status import union_of

SizedBy = Literal["union", "rank"]


class BlockReduce(SparseExchange):
    """An all-reduce (OR) of a bitmap of the blocks that ranks send; then an all-reduce (sum) of the union's blocks.

    The sum is of the union's blocks themselves, which is exact, or of a count sketch of them where that is shorter. The
    sketch is unbiased; each element's error has a mean square of ‖sum‖²/c for c columns. In either case memories forget
    the blocks that this rank sent, to the bit: the sketch's error is not fed back. (Fed back, it grows from step to
    step where the sketch is small.)

    Bytes handed over: one bit for each block and two for each tensor, then 4 for each element of the union's blocks or
    of the sketch, and 8 with `sized_by="rank"`. They depend on the number of ranks only through the union.

    Source: S2 Reducer, algorithm 1. The paper keeps its hashes; we draw new ones in each step, and the sketch holds the
    union's elements one after the other. Without a sketch this sends what OmniReduce (Fei et al. 2021) sends, without
    its aggregators.

    >>> BlockReduce(TopBlocks(1 / 32), sketch_ratio=0.5).sketch_ratio
    0.5

    Args:
        blocks: Chooses the blocks that each rank sends; all non-zero ones by default.
        sketch_ratio: λ, the sketch's size relative to what it holds; None for no sketch. With 1 and more, the blocks
            themselves are shorter.
        rows: Rows of the sketch; an estimate is their median.
        sized_by: What λ is relative to: the elements of the union, or of the rank that has most, as in the paper.
        always_sketch: Whether to use the sketch even where it is longer than the blocks that it holds.

    Raises:
        ValueError: A ratio that is not positive, `rows` below 1, or an unknown `sized_by`.
    """

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
                "sketch_ratio must be a positive number, the sketch's size relative to what it holds; got"
                f" {sketch_ratio!r}. Use the paper's 0.5, or None to send the blocks themselves."
            )
        if sized_by not in ("union", "rank"):
            raise ValueError(
                f"sized_by must be 'union' (all that is sent) or 'rank' (the most that one sends); got {sized_by!r}."
            )
        check_booleans(always_sketch=always_sketch)
        if always_sketch and sketch_ratio is None:
            raise ValueError("always_sketch=True needs a sketch; got sketch_ratio=None. Use the paper's 0.5.")
        self.blocks = TopBlocks(density=1.0) if blocks is None else blocks
        self.sketch_ratio = sketch_ratio
        self.rows = CountSketch(rows, 1).rows
        self.sized_by = sized_by
        self.always_sketch = always_sketch

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        values = x.values
        with phase("select"):
            bounds = self.blocks.bounds(context.layout, values.device)
            mine = values.new_empty(0, dtype=torch.int64)
            if x.nonfinite_segment is None:
                mine = self.blocks.blocks(values, context, x.indices)
        union, present = union_of(mine, bounds.numel() - 1, x, context, wire)
        with phase("encode"):
            lengths = bounds[mine + 1] - bounds[mine]

            together = elements(union, bounds)
            packed = values.new_zeros(together.numel())
            # What to add to a position in the vector for its place among the union's blocks.
            sizes = bounds[union + 1] - bounds[union]
            shifts = sizes.cumsum(0) - sizes - bounds[union]
            if x.indices is not None:
                owners = torch.searchsorted(bounds, x.indices, right=True) - 1
                kept = torch.isin(owners, mine)
                sent, owners = SparseVector(x.indices[kept], values[kept], context.layout.size), owners[kept]
                packed[sent.indices + shifts[torch.searchsorted(union, owners)]] = sent.values
            else:
                chosen = elements(mine, bounds)
                sent = SparseVector(chosen, values[chosen], values.numel())
                at = shifts[torch.searchsorted(union, mine)]
                packed[chosen + torch.repeat_interleave(at, lengths)] = sent.values
        if packed.numel():
            self._average_(packed, int(lengths.sum()), context, wire)
        return Exchanged(SparseVector(together, packed, context.layout.size), sent, present)

    def _average_(self, packed: Tensor, own_elements: int, context: Round, wire: Wire) -> None:
        """Replaces the union's elements by their means over ranks, exactly or by a sketch."""
        # Divided before the sum, as in DDP.
        packed.div_(wire.world_size)
        if self.sketch_ratio is not None:
            held = packed.numel()
            if self.sized_by == "rank":
                most = int(wire.all_gather(torch.tensor([own_elements], device=packed.device)).max())
                # Rounded up to four significant bits, as in payloads of former versions: trainings keep their bits.
                shift = max(0, most.bit_length() - 4)
                held = min(held, -(-most >> shift) << shift)
            columns = max(1, math.ceil(self.sketch_ratio * held / self.rows))
            if self.always_sketch or self.rows * columns < packed.numel():
                sketch, seed = CountSketch(self.rows, columns), context.shared_seed()
                with phase("encode"):
                    table = sketch.empty(packed.device, packed.dtype)
                    sketch.insert_(table, packed, seed)
                wire.all_reduce_(table)
                with phase("decode"):
                    packed.copy_(sketch.query(table, packed.numel(), seed))
                return
        wire.all_reduce_(packed)
