"""Which ranks have a gradient, and whose is not finite: all ranks must know it before any of them changes a weight.

A rank's status is two bits for each segment of the layout. It travels with what an exchange sends anyway: in the
envelope of a payload, behind the summands of an all-reduce, or in a bitmap. `agree` sends it by itself.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout, Round, SparseVector, Vector, Wire
from lightning_sparsecomm.codecs import Envelope, PayloadError, seal, sealed_bytes
from lightning_sparsecomm.kernels import position_kernels_for


class NonFiniteGradientError(RuntimeError):
    """A gradient holds an infinity or a NaN. Raised on all ranks in the same step, before any weight changes.

    >>> def exchange(rank):
    ...     x = Vector(torch.ones(2), nonfinite_segment=0 if rank == 1 else None)
    ...     context = Round(Layout([("weight", (2,))]), rank=rank, world_size=2)
    ...     try:
    ...         DenseAllReduce().exchange(x, context, Wire())
    ...     except NonFiniteGradientError as error:
    ...         return str(error).partition(".")[0]
    >>> run_ranks(2, exchange)[0]
    "rank 1 has a gradient that is not finite, for parameter 'weight' in step 0"

    Attributes:
        rank: Whose gradient it is; None where that is not known.
    """

    rank: int | None = None

    @classmethod
    def of(cls, segment: int, context: Round, rank: int) -> "NonFiniteGradientError":
        """The error for the gradient of one segment on one rank."""
        error = cls(
            f"rank {rank} has a {context.quantity} that is not finite, for parameter"
            f" {context.layout.segments[segment].name!r} in step {context.step}."
            " Lower the learning rate, clip gradients, or look for a division by zero in the loss."
        )
        error.rank = rank
        return error

    @classmethod
    def somewhere(cls, x: Vector, context: Round, wire: Wire) -> "NonFiniteGradientError":
        """The error where ranks know that some gradient is not finite, but not whose: they gather that.

        A collective, so all ranks must know. Bytes handed over: 8.
        """
        segment = -1 if x.nonfinite_segment is None else x.nonfinite_segment
        segments = wire.all_gather(torch.tensor([segment], device=x.values.device)).view(-1).tolist()
        rank = next(rank for rank, found in enumerate(segments) if found >= 0)
        return cls.of(segments[rank], context, rank)


def agree(x: Vector, context: Round, wire: Wire) -> list[bool]:
    """For each segment, whether any rank has a gradient for it; a collective of two bits for each segment.

    Raises:
        NonFiniteGradientError: Some rank has a gradient that is not finite; raised on all of them.
    """
    return union_of(torch.empty(0, dtype=torch.int64, device=x.values.device), 0, x, context, wire)[1]


def union_of(positions: Tensor, size: int, x: Vector, context: Round, wire: Wire) -> tuple[Tensor, list[bool]]:
    """The positions that any rank gives, and for each segment whether any rank has a gradient for it.

    One all-reduce with OR: a bit for each position, then two for each segment, for "present" and for "not finite".
    Positions are `[k]` int64, increasing and below `size`, which is equal on all ranks.

    Raises:
        NonFiniteGradientError: Some rank has a gradient that is not finite; raised on all of them.
        PayloadError: The union lacks what this rank gave. Raised on this rank.
    """
    segments, device = len(context.layout.segments), positions.device
    status = [size + i for i, here in enumerate(x.present or [True] * segments) if here]
    if x.nonfinite_segment is not None:
        status.append(size + segments + x.nonfinite_segment)
    bits = torch.cat([positions, torch.tensor(status, dtype=torch.int64, device=device)])
    kernels, bitmap_size = position_kernels_for(device), size + 2 * segments
    own = kernels.write_bitmap(bits, bitmap_size)
    bitmap = wire.all_reduce_or_(own.clone())
    if bool(own.bitwise_and_(bitmap.bitwise_not()).any()):
        raise PayloadError(
            f"the union of what ranks send in step {context.step}, as received, lacks what this rank gave: it was"
            " altered on its way."
        )
    found = kernels.read_bitmap(bitmap, bitmap_size).indices
    end = int(torch.searchsorted(found, size))
    anyone = set(found[end:].sub(size).tolist())
    if any(bit >= segments for bit in anyone):
        raise NonFiniteGradientError.somewhere(x, context, wire)
    return found[:end], [i in anyone for i in range(segments)]


def write_counts_(counts: Tensor, x: Vector) -> None:
    """Writes this rank's status into `counts`, one number for each segment, to be summed over ranks.

    A NaN stands for what is not finite, and spreads to all ranks by the sum.
    """
    counts.copy_(torch.tensor(x.present or [True] * counts.numel(), dtype=counts.dtype))
    if x.nonfinite_segment is not None:
        counts[x.nonfinite_segment] = float("nan")


def read_counts(counts: Tensor, x: Vector, context: Round, wire: Wire) -> list[bool]:
    """What the sum of the ranks' `write_counts_` says: who is present, or a `NonFiniteGradientError` on all ranks."""
    if bool(counts.isnan().any()):
        raise NonFiniteGradientError.somewhere(x, context, wire)
    present: list[bool] = (counts > 0).tolist()
    return present


def sealed_status(body: Tensor, x: Vector, context: Round) -> Tensor:
    """An envelope with a body and this rank's status, as long on all ranks whose bodies are equally long."""
    present = None if all(x.present) else list(x.present)
    message = seal(Envelope(body, present, x.nonfinite_segment), context.layout)
    return torch.nn.functional.pad(message, (0, sealed_bytes(body.numel(), context.layout) - message.numel()))


def read_envelopes(envelopes: Sequence[Envelope], context: Round) -> list[bool]:
    """What all ranks' envelopes say: who is present, or the first `NonFiniteGradientError`, on all ranks."""
    for rank, received in enumerate(envelopes):
        if received.nonfinite_segment is not None:
            raise NonFiniteGradientError.of(received.nonfinite_segment, context, rank)
    anyone = [received.present or [True] * len(context.layout.segments) for received in envelopes]
    return [any(column) for column in zip(*anyone)]


def masked(vector: SparseVector | Tensor, present: Sequence[bool] | None, layout: Layout) -> SparseVector | Tensor:
    """The vector without what it holds for segments that are not present: nothing is sent for these.

    `present` is empty or None where all are. The vector given is not changed, since ranks may share it.
    """
    if not present or all(present):
        return vector
    if isinstance(vector, Tensor):
        vector = vector.clone()
        for flat, here in zip(layout.flats(vector), present):
            if not here:
                flat.zero_()
        return vector
    kept = torch.tensor(present, device=vector.indices.device).repeat_interleave(
        torch.tensor(layout.counts(vector.indices), device=vector.indices.device)
    )
    return SparseVector(vector.indices[kept], vector.values[kept], vector.size)
