"""A vector cut into a region for each rank, and how many elements each rank keeps of its region."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Round, SparseVector, Wire
from lightning_sparsecomm.codecs import Envelope, PayloadError
from lightning_sparsecomm.codecs.payload import open_envelope, seal

# Of what a rank has selected. They bound regions to 1/64 of what one rank holds with 8 ranks; above 128 ranks there are
# no more, so that none sends more than 8 kB.
_SAMPLES_FOR_EACH_RANK, _FEWEST_SAMPLES, _MOST_SAMPLES = 8, 64, 1024
# Into which a rank divides its region's elements by magnitude, and keeps or drops them together.
_CLASSES = 64


def agreed_bounds(own: SparseVector, context: Round, wire: Wire) -> Tensor:
    """Where regions begin and end, so that each holds about as many of the elements that all ranks have selected.

    Each rank tells how many it has, and where a few of them are, at equal distances in their order. One all-gather.

    Args:
        own: What this rank has selected.
        context: The round.
        wire: Where to communicate.

    Returns:
        `[W + 1]` int64 on the CPU, from 0 to the vector's length, in order; equal on all ranks.

    Raises:
        PayloadError: What a rank told was altered.
    """
    count, n, world_size = own.indices.numel(), own.size, wire.world_size
    asked = min(max(_SAMPLES_FOR_EACH_RANK * world_size, _FEWEST_SAMPLES), _MOST_SAMPLES)
    samples = torch.zeros(asked, dtype=torch.int64)
    if count:
        samples = own.indices[(torch.arange(asked, device=own.indices.device) * count + count // 2) // asked].cpu()
    told = torch.stack(
        [each.view(torch.int64) for each in _told(torch.cat([torch.tensor([count]), samples]), context, wire, own)]
    )
    positions, order = told[:, 1:].reshape(-1).sort(stable=True)
    if int(told.min()) < 0 or int(positions.max()) >= max(1, n):
        raise PayloadError(f"regions: a rank selected position {int(positions.max())}, expected less than {n}.")
    # A sample stands for so many elements of its rank, times the number of samples.
    before = told[:, 0].repeat_interleave(asked)[order].cumsum(0)
    if not int(before[-1]):
        return torch.arange(world_size + 1) * n // world_size
    inner = positions[torch.searchsorted(before, before[-1] * torch.arange(1, world_size) // world_size, right=True)]
    return torch.cat([torch.tensor([0]), inner, torch.tensor([n])])


class Kept(NamedTuple):
    """How many elements each rank has of its region, and how many of the largest of these it keeps."""

    available: list[int]
    counts: list[int]


def kept_of(region: SparseVector, k: int, context: Round, wire: Wire) -> Kept:
    """Ranks agree on how many of their largest elements they keep, so that these are about the k largest of all.

    Each rank divides its elements by magnitude into 64 classes of equal size, and tells the least magnitude in each.
    The classes with the greatest of these are kept, as long as they have k elements at most. One all-gather.

    Args:
        region: This rank's elements.
        k: How many elements of all ranks together.
        context: The round.
        wire: Where to communicate.

    Returns:
        Equal on all ranks. All elements are kept, if there are at most k.

    Raises:
        PayloadError: What a rank told was altered.
    """
    count, least = torch.tensor([region.values.numel()]), torch.zeros(_CLASSES, dtype=torch.float32)
    if region.values.numel():
        ordered = region.values.abs().float().sort(descending=True).values
        least = ordered[(_ends(count) - 1).clamp(min=0).view(-1).to(ordered.device)].cpu()
    told = _told(torch.cat([count.view(torch.uint8), least.view(torch.uint8)]), context, wire, region)
    counts = torch.cat([_counted(each[:8], rank) for rank, each in enumerate(told)])
    if int(counts.sum()) <= k:
        return Kept(counts.tolist(), counts.tolist())
    sizes = _ends(counts).diff(dim=1, prepend=torch.zeros(len(told), 1, dtype=torch.int64)).t().reshape(-1)
    # Equal magnitudes by class and then by rank, so that all ranks keep as many of them.
    magnitudes = torch.stack([each[8:].view(torch.float32) for each in told]).t().reshape(-1)
    order = magnitudes.argsort(descending=True, stable=True)
    within = order[sizes[order].cumsum(0) <= k]
    kept = torch.zeros(len(told), dtype=torch.int64).index_add_(0, within % len(told), sizes[within])
    if not bool(kept.any()):
        # The first class alone has more: many ranks have selected what one owns.
        kept[order[0] % len(told)] = k
    return Kept(counts.tolist(), kept.tolist())


def counts_of(region: SparseVector, context: Round, wire: Wire) -> list[int]:
    """How many elements each rank has of its region; equal on all ranks. One all-gather.

    Raises:
        PayloadError: What a rank told was altered.
    """
    told = _told(torch.tensor([region.values.numel()]), context, wire, region)
    return [int(_counted(each, rank)) for rank, each in enumerate(told)]


def cut(vector: SparseVector, bounds: Tensor) -> list[SparseVector]:
    """What a vector holds in each region."""
    return _between(vector, torch.searchsorted(vector.indices, bounds.to(vector.indices.device)).tolist())


def shared_out(vector: SparseVector, counts: Sequence[int], rank: int) -> list[SparseVector]:
    """What each rank gets of this rank's elements, so that all have as many: neighbours stay together, in order.

    Args:
        vector: `counts[rank]` elements.
        counts: How many elements each rank has.
        rank: This one.
    """
    share, before = -(-sum(counts) // len(counts)), sum(counts[:rank])
    return _between(vector, [min(max(i * share - before, 0), counts[rank]) for i in range(len(counts) + 1)])


def joined(parts: Sequence[SparseVector]) -> SparseVector:
    """What the parts hold, each beyond the one before. Raises `PayloadError` where positions are not in order."""
    indices = torch.cat([part.indices for part in parts])
    if bool((indices.diff() <= 0).any()):
        raise PayloadError("ranks sent results for the same positions: the regions that they have differ.")
    return SparseVector(indices, torch.cat([part.values for part in parts]), parts[0].size)


def _counted(told: Tensor, rank: int) -> Tensor:
    count = told.view(torch.int64)
    if int(count) < 0:
        raise PayloadError(f"rank {rank} has {int(count)} elements, expected 0 or more.")
    return count


def _told(numbers: Tensor, context: Round, wire: Wire, like: SparseVector) -> list[Tensor]:
    """The bytes of every rank's `numbers`, which are as many on all; with a checksum. On the CPU."""
    sealed = seal(Envelope(numbers.view(torch.uint8)), context.layout)
    gathered = wire.all_gather(sealed.to(like.indices.device)).cpu()
    # Copied, they can be viewed in any dtype.
    bodies = [open_envelope(each, context.layout, rank).body.clone() for rank, each in enumerate(gathered)]
    for rank, body in enumerate(bodies):
        if body.numel() != numbers.nbytes:
            raise PayloadError(f"rank {rank}'s payload: has {body.numel()} bytes, expected {numbers.nbytes}.")
    return bodies


def _ends(counts: Tensor) -> Tensor:
    """`[W, classes]`: how many elements each class ends with, for each of `counts`."""
    return counts[:, None] * torch.arange(1, _CLASSES + 1) // _CLASSES


def _between(vector: SparseVector, ends: Sequence[int]) -> list[SparseVector]:
    return [
        SparseVector(vector.indices[begin:end], vector.values[begin:end], vector.size) for begin, end in pairwise(ends)
    ]
