"""The largest elements of a sum, found in a sketch of it: no rank needs to know what the others hold."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_sparsecomm.codecs.selectors import k_of
from lightning_sparsecomm.codecs.sketch import CountSketch
from lightning_sparsecomm.exchange.base import Exchange, Exchanged, NonFiniteGradientError, Outgoing
from lightning_sparsecomm.exchange.dense import WIRE_DTYPES, check_wire_dtype
from lightning_sparsecomm.kernels import kernels_for
from lightning_sparsecomm.layout import Layout, SparseVector
from lightning_sparsecomm.rounds import Round
from lightning_sparsecomm.schedules import Density, check_density
from lightning_sparsecomm.wire import Wire

SketchDtype = Literal["same", "float16", "bfloat16"]


class SketchedTopK(Exchange):
    """The k elements of largest sum over ranks, as a count sketch finds them; their sums are exact.

    In the first round the ranks' sketches are added up, in the second their elements at the P·k places where the sum's
    estimate is largest; the k largest sums are what is shared. With a sketch large enough they are the k largest of
    the sum itself. Biased, as every top-k is: use it with error feedback.

    Bytes handed over, whatever the number of ranks: 4 for each of rows × columns numbers (2 in half precision), for
    each of the P·k candidates, and for each tensor.

    Source: Sketched-SGD (Ivkin et al. 2019), algorithm 3 and section 5.1, where all ranks use one sketch's hashes for
    good; here they are drawn anew in each step. The whole vector is one sketch.

    Args:
        density: Fraction of elements shared, in (0, 1], or a schedule of it; at least one.
        k: How many elements are shared, instead of a density; None for none.
        rows: Rows of the sketch: the more, the surer is each estimate.
        columns: Columns: the more, the closer. None for ten times k, as in the paper's larger runs.
        candidates: P, how many times k elements have their sums exchanged.
        wire_dtype: Dtype of the sketch on the wire: "same" as the vector, "float16" or "bfloat16". What it rounds off
            makes the search less sure, and no sum less exact.

    Raises:
        ValueError: A density outside (0, 1], k, rows, columns or candidates below 1, or an unknown dtype.
    """

    def __init__(
        self,
        density: Density = 0.001,
        k: int | None = None,
        rows: int = 5,
        columns: int | None = None,
        candidates: float = 36,
        wire_dtype: SketchDtype = "same",
    ) -> None:
        check_density("density", density)
        if k is not None and (type(k) is not int or k < 1):
            raise ValueError(f"k must be a whole number, at least 1: how many elements are shared; got {k!r}.")
        number = isinstance(candidates, (int, float)) and not isinstance(candidates, bool)
        if not (number and 1 <= candidates < math.inf):
            raise ValueError(
                "candidates must be at least 1: how many times k elements have their sums exchanged; got"
                f" {candidates!r}. The paper has 16 to 36."
            )
        check_wire_dtype(wire_dtype)
        self.density = density
        self.k = k
        self.rows = CountSketch(rows, 1).rows
        self.columns = None if columns is None else CountSketch(1, columns).columns
        self.candidates = candidates
        self.wire_dtype = wire_dtype

    def objection(self, layout: Layout) -> str | None:
        if self.k is None or self.k <= layout.size:
            return None
        return (
            f"k must be at most the {layout.size:,} elements that are exchanged with it; got {self.k:,}."
            " Give a density instead."
        )

    def run(self, outgoing: Outgoing, round: Round, wire: Wire) -> Exchanged:
        _, present, nonfinite_segment, _ = outgoing
        x = self.dense(outgoing)
        n, seed = x.numel(), round.shared_seed()
        k = k_of(round.density(self.density), n) if self.k is None else self.k
        sketch = CountSketch(self.rows, max(1, 10 * k) if self.columns is None else self.columns)

        table = sketch.empty(x.device, x.dtype)
        sketch.insert_(table, x, seed)
        total = self._sum(table, present, nonfinite_segment, round, wire)
        table.copy_(total[: table.numel()].view_as(table))
        found = sketch.largest(table, n, min(n, math.ceil(self.candidates * k)), seed)

        # Divided before the sum, as DDP does.
        means = x[found].div_(wire.world_size)
        if means.numel():
            wire.all_reduce_(means)
        chosen = kernels_for(means.device, means.dtype).largest(means, k, seed)
        indices = found[chosen]
        anyone = (total[table.numel() :] > 0).tolist()
        return Exchanged(SparseVector(indices, means[chosen], n), SparseVector(indices, x[indices], n), anyone)

    def _sum(
        self, table: Tensor, present: Sequence[bool], nonfinite_segment: int | None, round: Round, wire: Wire
    ) -> Tensor:
        """The sum over ranks of their sketches, and of how many have a gradient for each segment."""
        size = table.numel()
        buffer = table.new_empty(size + len(present), dtype=WIRE_DTYPES[self.wire_dtype])
        # As much as all ranks together may reach: what counts of a bucket beyond is that it is large.
        limit = 0.99 * torch.finfo(buffer.dtype).max / wire.world_size
        buffer[:size] = table.view(-1).clamp_(-limit, limit)
        buffer[size:] = torch.tensor(present, dtype=buffer.dtype)
        if nonfinite_segment is not None:
            # Spreads to all ranks by the sum.
            buffer[size + nonfinite_segment] = float("nan")
        wire.all_reduce_(buffer)
        unusable = buffer[size:].isnan().nonzero()
        if unusable.numel():
            raise NonFiniteGradientError.of(int(unusable[0]), round)
        return buffer

    def __repr__(self) -> str:
        size = f"density={self.density}" if self.k is None else f"k={self.k}"
        return (
            f"SketchedTopK({size}, rows={self.rows}, columns={self.columns}, candidates={self.candidates},"
            f" wire_dtype={self.wire_dtype!r})"
        )
