"""A vector cut into a region for each rank, and how many elements each rank keeps of its region."""

from collections.abc import Sequence
from itertools import pairwise

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

    Each rank tells where a few of its elements are, at equal distances in their order. One all-gather.

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
    samples = torch.full((asked,), -1, dtype=torch.int64)
    if count:
        samples = own.indices[(torch.arange(asked, device=own.indices.device) * count + count // 2) // asked].cpu()
    pooled = torch.cat([each.view(torch.int64) for each in _told(samples, context, wire, own.indices.device)])
    pooled = pooled[pooled >= 0].sort().values
    if not pooled.numel():
        return torch.arange(world_size + 1) * n // world_size
    if int(pooled[-1]) >= n:
        raise PayloadError(f"regions: a rank selected position {int(pooled[-1])}, expected less than {n}.")
    inner = pooled[torch.arange(1, world_size) * pooled.numel() // world_size]
    return torch.cat([torch.tensor([0]), inner, torch.tensor([n])])


def kept_of(values: Tensor, k: int, context: Round, wire: Wire) -> list[int]:
    """How many of its largest elements each rank keeps, so that together they keep the k largest of all, about.

    Each rank divides its elements by magnitude into 64 classes of equal size, and tells the least magnitude in each.
    The classes with the greatest of these are kept, as long as they have k elements at most. One all-gather.

    Args:
        values: `[c]`, this rank's elements.
        k: How many elements of all ranks together.
        context: The round.
        wire: Where to communicate.

    Returns:
        A count for each rank; equal on all ranks. All elements, if there are at most k.

    Raises:
        PayloadError: What a rank told was altered.
    """
    count = torch.tensor([values.numel()])
    least = torch.zeros(_CLASSES)
    if values.numel():
        ordered = values.abs().float().sort(descending=True).values
        least = ordered[(_ends(count) - 1).clamp(min=0).view(-1).to(values.device)].cpu()
    told = _told(torch.cat([count.view(torch.uint8), least.view(torch.uint8)]), context, wire, values.device)
    counts = torch.cat([each[:8].view(torch.int64) for each in told])
    if bool((counts < 0).any()) or int(counts.sum()) <= k:
        return [max(0, number) for number in counts.tolist()]
    sizes = _ends(counts).diff(dim=1, prepend=torch.zeros(len(told), 1, dtype=torch.int64))
    # Stable, so that all ranks order equal magnitudes alike.
    order = torch.stack([each[8:].view(torch.float32) for each in told]).view(-1).argsort(descending=True, stable=True)
    within = sizes.view(-1)[order].cumsum(0) <= k
    kept = torch.zeros(len(told), dtype=torch.int64)
    kept.index_add_(0, order[within] // _CLASSES, sizes.view(-1)[order[within]])
    if not bool(kept.any()):
        # The first class alone has more: many ranks have selected what one owns.
        kept[order[0] // _CLASSES] = k
    return kept.tolist()


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


def _told(numbers: Tensor, context: Round, wire: Wire, device: torch.device) -> list[Tensor]:
    """The bytes of every rank's `numbers`, which are as many on all; with a checksum. On the CPU."""
    sealed = seal(Envelope(numbers.view(torch.uint8)), context.layout)
    gathered = wire.all_gather(sealed.to(device)).cpu()
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
