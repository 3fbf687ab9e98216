"""The largest elements of a sum, found in a sketch of it: no rank needs to know what the others hold."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_sparsecomm.checks import check_switches, is_number
from lightning_sparsecomm.codecs.selectors import k_of
from lightning_sparsecomm.codecs.sketch import CountSketch
from lightning_sparsecomm.exchange.base import Exchange, Exchanged, NonFiniteGradientError, Outgoing
from lightning_sparsecomm.exchange.dense import WIRE_DTYPES, DenseAllReduce, addend_limit
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
    each of the P·k candidates, and for each tensor. Where that is more than the vector itself has, the vector: 4 for
    each element and each tensor.

    Source: Sketched-SGD (Ivkin et al. 2019), algorithm 3 and section 5.1, where all ranks use one sketch's hashes for
    good; here they are drawn anew in each step. The whole vector is one sketch.

    Args:
        density: Fraction of elements shared, in (0, 1], or a schedule of it; at least one. None is 0.001.
        k: How many elements are shared, instead of a density; None for none.
        rows: Rows of the sketch: the more, the surer is each estimate.
        columns: Columns: the more, the closer. None for ten times k, as in the paper's larger runs.
        candidates: P, how many times k elements have their sums exchanged.
        wire_dtype: Dtype of the sketch on the wire: "same" as the vector, "float16" or "bfloat16". What it rounds off
            makes the search less sure, and no sum less exact; "float16" does not see values below 6e-8, nor tell apart
            those above 65,504 by the number of ranks.
        always_sketch: Whether the sketch is used even where sketch and candidates are longer than the vector. Else the
            vector itself is summed there, and the k largest are exact.

    Raises:
        ValueError: A density outside (0, 1], or with a k; k, rows, columns or candidates below 1; an unknown dtype.
    """

    def __init__(
        self,
        density: Density | None = None,
        k: int | None = None,
        rows: int = 5,
        columns: int | None = None,
        candidates: float = 36,
        wire_dtype: SketchDtype = "same",
        always_sketch: bool = False,
    ) -> None:
        if density is not None and k is not None:
            raise ValueError(
                f"density and k both say how many elements are shared; got {density!r} and {k!r}. Give one."
            )
        check_switches(always_sketch=always_sketch)
        density = 0.001 if density is None else density
        check_density("density", density)
        if k is not None and (type(k) is not int or k < 1):
            raise ValueError(f"k must be a whole number, at least 1: how many elements are shared; got {k!r}.")
        if not (is_number(candidates) and 1 <= candidates < math.inf):
            raise ValueError(
                "candidates must be at least 1: how many times k elements have their sums exchanged; got"
                f" {candidates!r}. The paper has 16 to 36."
            )
        if wire_dtype not in get_args(SketchDtype):
            raise ValueError(
                f"sketch_dtype must be one of {', '.join(get_args(SketchDtype))}; got {wire_dtype!r}."
                " 'same' sends the sketch in the vector's dtype."
            )
        self.density = density
        self.k = k
        self.rows = CountSketch(rows, 1).rows
        self.columns = None if columns is None else CountSketch(1, columns).columns
        self.candidates = candidates
        self.wire_dtype = wire_dtype
        self.always_sketch = always_sketch

    def objection(self, layout: Layout) -> str | None:
        if self.k is None or self.k <= layout.size:
            return None
        return (
            f"k must be at most the {layout.size:,} elements that are exchanged with it; got {self.k:,}."
            " Give a density instead."
        )

    def run(self, outgoing: Outgoing, round: Round, wire: Wire) -> Exchanged:
        _, present, nonfinite_segment, *_ = outgoing
        x = self.dense(outgoing)
        n, seed = x.numel(), round.shared_seed()
        k = self._k(n, round)
        sketch = CountSketch(self.rows, max(1, 10 * k) if self.columns is None else self.columns)
        asked = math.ceil(min(n, self.candidates * k))
        element_bytes = (WIRE_DTYPES[self.wire_dtype] or x.dtype).itemsize
        sketch_bytes = sketch.rows * sketch.columns * element_bytes + asked * x.element_size()
        if sketch_bytes >= x.numel() * x.element_size() and not self.always_sketch:
            return self._run_without(x, k, outgoing, round, wire)

        table = sketch.empty(x.device, x.dtype)
        sketch.insert_(table, x, seed)
        total = self._sum(table, present, nonfinite_segment, round, wire)
        table.copy_(total[: table.numel()].view_as(table))
        found = sketch.largest(table, n, asked, seed)

        # Divided before the sum, as DDP does.
        means = x[found].div_(wire.world_size)
        if means.numel():
            wire.all_reduce_(means)
        chosen = kernels_for(means.device, means.dtype).largest(means, k, seed)
        indices = found[chosen]
        anyone = (total[table.numel() :] > 0).tolist()
        return Exchanged(SparseVector(indices, means[chosen], n), SparseVector(indices, x[indices], n), anyone)

    def _k(self, n: int, round: Round) -> int:
        if self.k is None:
            return k_of(round.density(self.density), n)
        # A warm-up is of a density; without one, k is k.
        return self.k if round.warmup is None else k_of(round.density(self.k / n), n)

    def _run_without(self, x: Tensor, k: int, outgoing: Outgoing, round: Round, wire: Wire) -> Exchanged:
        """What a sketch would find at best, by sending less than it would: the vector itself."""
        whole = DenseAllReduce().run(outgoing, round, wire)
        assert isinstance(whole.shared, Tensor)
        found = kernels_for(x.device, x.dtype).largest(whole.shared, k, round.shared_seed())
        kept, sent = (SparseVector(found, vector[found], x.numel()) for vector in (whole.shared, x))
        return Exchanged(kept, sent, whole.present)

    def _sum(
        self, table: Tensor, present: Sequence[bool], nonfinite_segment: int | None, round: Round, wire: Wire
    ) -> Tensor:
        """The sum over ranks of their sketches, and of how many have a gradient for each segment."""
        size = table.numel()
        buffer = table.new_empty(size + len(present), dtype=WIRE_DTYPES[self.wire_dtype])
        # As much as all ranks together may reach: what counts of a bucket beyond is that it is large.
        limit = addend_limit(buffer.dtype, wire.world_size)
        buffer[:size] = table.view(-1).clamp_(-limit, limit)
        buffer[size:] = torch.tensor(present, dtype=buffer.dtype)
        if nonfinite_segment is not None:
            # Spreads to all ranks by the sum.
            buffer[size + nonfinite_segment] = float("nan")
        wire.all_reduce_(buffer)
        if bool(buffer[size:].isnan().any()):
            raise NonFiniteGradientError.found_on_any(nonfinite_segment, round, wire, table.device)
        return buffer

    def __repr__(self) -> str:
        size = f"density={self.density}" if self.k is None else f"k={self.k}"
        return (
            f"SketchedTopK({size}, rows={self.rows}, columns={self.columns}, candidates={self.candidates},"
            f" wire_dtype={self.wire_dtype!r}{', always_sketch=True' if self.always_sketch else ''})"
        )
