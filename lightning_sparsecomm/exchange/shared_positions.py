"""Positions that all ranks have in common, so that values are summed without them."""

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Density, Layout, Round, SparseVector, Vector, Wire, phase
from lightning_sparsecomm.basis.arguments import check_booleans, check_whole_number
from lightning_sparsecomm.basis.schedules import check_density
from lightning_sparsecomm.codecs import k_of
from lightning_sparsecomm.codecs.selectors.blocks import elements
from lightning_sparsecomm.exchange.base import Exchange, Exchanged, dense_values
from lightning_sparsecomm.exchange.status import masked, read_counts, write_counts_
from lightning_sparsecomm.kernels import kernels_for


class RandomK(Exchange):
    """The mean at k random positions, which all ranks draw alike: one all-reduce, and no position on the wire.

    The vector is cut into k parts of equal length, to an element, and one position is drawn from each. So every element
    has the same chance, a draw costs k numbers, and no element waits longer than chance has it.

    Bytes handed over, with any number of ranks: 4 for each of the k elements and for each tensor.

    Source: Stich et al. 2018, Sparsified SGD with Memory, whose k positions are independent.

    >>> def exchange(rank):
    ...     context = Round(Layout([("weight", (4,))]), rank=rank, world_size=2)
    ...     return RandomK(0.5).exchange(Vector(torch.ones(4)), context, Wire()).shared.values.tolist()
    >>> run_ranks(2, exchange)
    [[1.0, 1.0], [1.0, 1.0]]

    Args:
        density: Fraction of elements sent, in (0, 1], or a schedule of it; at least one.
        unbiased: Whether a value is multiplied by the number of elements that it stands for. For use without error
            feedback, which needs the values as they are.

    Raises:
        ValueError: A density outside (0, 1].
        TypeError: `unbiased` is neither True nor False.
    """

    def __init__(self, density: Density = 0.01, unbiased: bool = False) -> None:
        check_density("density", density)
        check_booleans(unbiased=unbiased)
        self.density = density
        self.unbiased = unbiased

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        values = dense_values(x, self)
        n = values.numel()
        k = k_of(context.density(self.density), n)
        with phase("select"):
            positions, lengths = (each.to(values.device) for each in drawn(n, k, context))
            own = values[positions]
            if self.unbiased:
                own.mul_(lengths)
        means = values.new_empty(k + len(context.layout.segments))
        # Divided before the sum, as in DDP.
        torch.div(own, wire.world_size, out=means[:k])
        write_counts_(means[k:], x)
        wire.all_reduce_(means)
        present = read_counts(means[k:], x, context, wire)
        return _at(positions, means[:k], own, present, context.layout)


class AlignedTopK(Exchange):
    """The mean of the blocks of largest norm in the sum over ranks, as a projection of each block finds them.

    Each rank multiplies every block of `block_size` elements by the same few vectors of random signs, which are drawn
    anew in each step, and all-reduces the products. The squares of the sums estimate the energy of the ranks' sum in
    each block, without bias. The k blocks of largest estimate in each tensor are all-reduced, so that no position
    travels. Biased, as every top-k is: use it with error feedback.

    Bytes handed over, with any number of ranks: 4 for each of `projections` numbers of a block, for each element of the
    chosen blocks, and for each tensor.

    Source: ARC-Top-K (2025), whose blocks are the rows of a matrix and whose signs are normal numbers. Blocks of equal
    length suit tensors of any shape.

    >>> AlignedTopK(density=0.05).density
    0.05

    Args:
        density: Fraction of each tensor's blocks sent, in (0, 1], or a schedule of it; at least one.
        block_size: Elements in a block; the last one of a tensor may have fewer. Smaller blocks are chosen better, and
            their projections take more bytes.
        projections: Numbers for each block. More of them estimate its energy better: the relative error of one is about
            √(2 / projections).

    Raises:
        ValueError: A density outside (0, 1], or `block_size` or `projections` below 1.
    """

    def __init__(self, density: Density = 0.01, block_size: int = 256, projections: int = 2) -> None:
        check_density("density", density)
        check_whole_number("block_size", block_size, 1, "elements in a block", "Use 256.")
        check_whole_number("projections", projections, 1, "numbers for each block", "Use 2.")
        self.density = density
        self.block_size = block_size
        self.projections = projections

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        values, layout = dense_values(x, self), context.layout
        bounds, firsts = _bounds(layout, self.block_size)
        count = firsts[-1] * self.projections
        sums = values.new_empty(count + len(layout.segments))
        with phase("select"):
            torch.div(self._projected(values, context), wire.world_size, out=sums[:count].view(-1, self.projections))
        write_counts_(sums[count:], x)
        wire.all_reduce_(sums)
        present = read_counts(sums[count:], x, context, wire)
        with phase("select"):
            energies = sums[:count].view(-1, self.projections).double().square_().sum(1)
            chosen = _largest(energies, firsts, context.density(self.density), context.shared_seed())
            positions = elements(chosen, bounds.to(values.device))
            own = values[positions]
        means = own / wire.world_size
        if means.numel():
            wire.all_reduce_(means)
        return _at(positions, means, own, present, layout)

    def _projected(self, values: Tensor, context: Round) -> Tensor:
        """`[blocks, projections]`: each block times the signs."""
        signs = torch.randint(0, 2, (self.block_size, self.projections), generator=context.shared_generator())
        signs = signs.mul_(2).sub_(1).to(values)
        parts = [values.new_empty(0, self.projections)]
        for flat in context.layout.flats(values):
            whole = flat.numel() // self.block_size * self.block_size
            parts.append(flat[:whole].view(-1, self.block_size) @ signs)
            if whole < flat.numel():
                parts.append((flat[whole:] @ signs[: flat.numel() - whole])[None])
        return torch.cat(parts)


def drawn(n: int, k: int, context: Round) -> tuple[Tensor, Tensor]:
    """k of n positions, one from each of k parts; equal on all ranks.

    Returns:
        `[k]` int64, strictly increasing; and `[k]` int64, the length of the part that each was drawn from.
    """
    bounds = torch.arange(k + 1) * n // max(1, k)
    lengths = bounds[1:] - bounds[:-1]
    chances = torch.rand(k, dtype=torch.float64, generator=context.shared_generator())
    return bounds[:-1] + torch.minimum((chances * lengths).long(), lengths - 1), lengths


def _at(positions: Tensor, means: Tensor, own: Tensor, present: list[bool], layout: Layout) -> Exchanged:
    """Without what belongs to tensors for which no rank has a gradient: that stays in the residuals."""
    shared, sent = (SparseVector(positions, values, layout.size) for values in (means, own))
    return Exchanged(masked(shared, present, layout), masked(sent, present, layout), present)


def _largest(energies: Tensor, firsts: list[int], density: float, seed: int) -> Tensor:
    """The blocks of largest energy in each tensor; all of a tensor's where as many are asked for."""
    ranking = kernels_for(energies.device, energies.dtype)
    chosen = [torch.empty(0, dtype=torch.int64, device=energies.device)]
    for first, end in pairwise(firsts):
        k = k_of(density, end - first)
        if k == end - first:
            chosen.append(torch.arange(first, end, device=energies.device))
        else:
            chosen.append(first + ranking.largest(energies[first:end], k, seed))
    return torch.cat(chosen)


@lru_cache(maxsize=16)
def _bounds(layout: Layout, size: int) -> tuple[Tensor, list[int]]:
    """Where each block begins, and the number of each tensor's first one. Both have an entry more, for the end."""
    parts, firsts = [], [0]
    for segment in layout.segments:
        parts.append(torch.arange(segment.offset, segment.offset + segment.size, size))
        firsts.append(firsts[-1] + parts[-1].numel())
    return torch.cat([*parts, torch.tensor([layout.size])]), firsts
