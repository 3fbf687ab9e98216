"""The largest elements of a sum, found in a sketch of it: no rank needs to know what the others hold."""

import math
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lightning_sparsecomm.basis import Density, Layout, Round, SparseVector, Vector, Wire, phase
from lightning_sparsecomm.basis.arguments import check_booleans, check_one_of, check_whole_number, is_number
from lightning_sparsecomm.basis.schedules import check_density
from lightning_sparsecomm.codecs import CountSketch, k_of
from lightning_sparsecomm.exchange.base import Exchange, Exchanged, dense_values
from lightning_sparsecomm.exchange.dense import WIRE_DTYPES, DenseAllReduce, addend_limit, check_wire_dtype
from lightning_sparsecomm.exchange.status import read_counts, write_counts_
from lightning_sparsecomm.kernels import kernels_for

SketchDtype = Literal["same", "float16", "bfloat16"]
Recovery = Literal["candidates", "heavymix"]


class SketchedTopK(Exchange):
    """The k elements of largest sum over ranks, as a count sketch finds them; their sums are exact.

    A first all-reduce adds up the ranks' sketches. A second one adds up their elements at the P·k positions with the
    largest estimates; the k largest sums are shared. With a sketch large enough, these are the k largest of the sum
    itself. Biased, as every top-k is: use it with error feedback.

    Bytes handed over, with any number of ranks: 4 for each of rows × columns numbers (2 in half precision), for each of
    the P·k candidates, and for each tensor. Where the vector itself is shorter, it is sent instead: 4 for each element
    and each tensor.

    With `recovery="heavymix"`, the k elements are those whose squared estimates reach the k-th part of the estimated
    squared norm, the largest of them if they are more, and else random ones besides. Their exact sums are exchanged,
    and all of them are shared. Its bound needs no P.

    Source: Sketched-SGD (Ivkin et al. 2019), algorithm 3 and section 5.1; algorithm 1 for "heavymix". The paper keeps
    its hashes; we draw new ones in each step. One sketch holds the whole vector.

    >>> SketchedTopK(density=0.001, candidates=390).candidates
    390

    Args:
        density: Fraction of elements shared, in (0, 1], or a schedule of it; at least one. None is 0.001.
        k: How many elements are shared, instead of a density; None for none.
        rows: Rows of the sketch. More rows make large errors of an estimate rarer.
        columns: Columns of the sketch. More columns make errors smaller. None for ten times k, as in the paper's larger
            runs.
        candidates: P, how many times k elements have their sums exchanged.
        wire_dtype: Dtype of the sketch on the wire: "same" as the vector, "float16" or "bfloat16". Rounding makes the
            search less reliable, but no sum less exact. "float16" ignores values below 6e-8, and cannot tell apart
            values above 65,504 divided by the number of ranks.
        always_sketch: Whether to use the sketch even where sketch and candidates are longer than the vector. Otherwise
            the vector itself is summed there, and the k largest are exact.
        recovery: How elements are found: "candidates", as in the paper's experiments, or "heavymix", as in its theory,
            which always sketches.

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
        recovery: Recovery = "candidates",
    ) -> None:
        check_one_of("recovery", recovery, get_args(Recovery), "Use 'candidates', as the paper's experiments do.")
        if density is not None and k is not None:
            raise ValueError(
                f"density and k both say how many elements are shared; got {density!r} and {k!r}. Give one."
            )
        check_booleans(always_sketch=always_sketch)
        if k is None:
            density = 0.001 if density is None else density
            check_density("density", density)
        else:
            check_whole_number("k", k, 1, "how many elements are shared", "Give a density instead, such as 0.001.")
        if not (is_number(candidates) and 1 <= candidates < math.inf):
            raise ValueError(
                "candidates must be at least 1: how many times k elements have their sums exchanged; got"
                f" {candidates!r}. Use 16 to 36, as in the paper."
            )
        check_wire_dtype(wire_dtype, get_args(SketchDtype))
        self.density = density
        self.k = k
        self.rows = CountSketch(rows, 1).rows
        self.columns = None if columns is None else CountSketch(1, columns).columns
        self.candidates = candidates
        self.wire_dtype = wire_dtype
        self.always_sketch = always_sketch
        self.recovery = recovery

    def objection(self, layout: Layout) -> str | None:
        if self.k is None or self.k <= layout.size:
            return None
        return (
            f"k must be at most the {layout.size:,} elements that are exchanged with it; got {self.k:,}."
            " Give a density instead."
        )

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        values = dense_values(x, self)
        n, seed = values.numel(), context.shared_seed()
        k = self._k(n, context)
        columns = max(1, 10 * k) if self.columns is None else self.columns
        asked = k if self.recovery == "heavymix" else math.ceil(min(n, self.candidates * k))
        element_bytes = (WIRE_DTYPES[self.wire_dtype] or values.dtype).itemsize
        sketch_bytes = self.rows * columns * element_bytes + asked * values.element_size()
        longer = sketch_bytes >= n * values.element_size()
        if longer and not self.always_sketch and self.recovery == "candidates":
            return self._exchange_whole(x, k, context, wire)

        sketch = CountSketch(self.rows, columns)
        with phase("encode"):
            table = sketch.empty(values.device, values.dtype)
            sketch.insert_(table, values, seed)
        total, present = self._sum(table, x, context, wire)
        with phase("select"):
            table.copy_(total.view_as(table))
            mixes = self.recovery == "heavymix"
            found = _heavy_mix(sketch, table, k, context) if mixes else sketch.largest(table, n, asked, seed)
            # Divided before the sum, as in DDP.
            means = values[found].div_(wire.world_size)
        if means.numel():
            wire.all_reduce_(means)
        with phase("select"):
            if not mixes:
                chosen = kernels_for(means.device, means.dtype).largest(means, k, seed)
                found, means = found[chosen], means[chosen]
        return Exchanged(SparseVector(found, means, n), SparseVector(found, values[found], n), present)

    def _k(self, n: int, context: Round) -> int:
        if self.k is None:
            assert self.density is not None
            return k_of(context.density(self.density), n)
        # A warm-up is of a density; without one, k is k.
        return self.k if context.warmup is None else k_of(context.density(self.k / n), n)

    def _exchange_whole(self, x: Vector, k: int, context: Round, wire: Wire) -> Exchanged:
        """What a perfect sketch would find, where that takes fewer bytes: the vector itself is summed."""
        whole = DenseAllReduce().exchange(x, context, wire)
        assert isinstance(whole.shared, Tensor)
        found = kernels_for(x.values.device, x.values.dtype).largest(whole.shared, k, context.shared_seed())
        kept, sent = (SparseVector(found, vector[found], x.values.numel()) for vector in (whole.shared, x.values))
        return Exchanged(kept, sent, whole.present)

    def _sum(self, table: Tensor, x: Vector, context: Round, wire: Wire) -> tuple[Tensor, list[bool]]:
        """The sum over ranks of their sketches, flat in the wire's dtype; and who is present."""
        size = table.numel()
        buffer = table.new_empty(size + len(context.layout.segments), dtype=WIRE_DTYPES[self.wire_dtype])
        # Beyond this limit a sum could overflow; all that matters of such a bucket is that it is large.
        limit = addend_limit(buffer.dtype, wire.world_size)
        buffer[:size] = table.view(-1).clamp_(-limit, limit)
        write_counts_(buffer[size:], x)
        wire.all_reduce_(buffer)
        return buffer[:size], read_counts(buffer[size:], x, context, wire)


def _heavy_mix(sketch: CountSketch, table: Tensor, k: int, context: Round) -> Tensor:
    """Sorted positions, `[k]` int64: those of large estimates, and random ones. Equal on all ranks."""
    n, seed = context.layout.size, context.shared_seed()
    estimates = sketch.query(table, n, seed)
    # Not in torch, whose order of addition depends on the number of threads.
    rows = table.double().cpu().numpy()
    # None is sent of matrices without elements.
    least = float(np.median(np.square(rows).sum(1))) / max(1, k)
    heavy = (estimates.double().square() >= least).nonzero().view(-1) if least > 0 else estimates[:0].long()
    if heavy.numel() > k:
        return heavy[kernels_for(estimates.device, estimates.dtype).largest(estimates[heavy], k, seed)]
    light = torch.ones(n, dtype=torch.bool)
    light[heavy.cpu()] = False
    order = torch.randperm(n, generator=context.shared_generator())
    others = order[light[order]][: k - heavy.numel()].to(heavy.device)
    return torch.cat([heavy, others]).sort().values
