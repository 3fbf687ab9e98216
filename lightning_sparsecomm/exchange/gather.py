"""Each rank sends one payload to all others, and all ranks decode all payloads."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Round, SparseVector, Vector, Wire, link_bytes, phase
from lightning_sparsecomm.basis.layout import mean, values_of
from lightning_sparsecomm.codecs import Compressor, Envelope, PayloadError
from lightning_sparsecomm.codecs.payload import (
    most_bytes,
    open_envelope,
    open_length,
    readable,
    seal,
    seal_length,
    sealed_bytes,
)
from lightning_sparsecomm.exchange.base import Exchange, Exchanged, dense_values
from lightning_sparsecomm.exchange.dense import DenseAllReduce
from lightning_sparsecomm.exchange.status import masked, read_envelopes

# Of the widest dtypes, in bytes.
_ALIGNMENT = 16


class Gather(Exchange):
    """All-gather of one self-contained payload per rank.

    Payloads are padded to the compressor's bound, if it has one, and travel in one collective. Otherwise ranks gather
    lengths first, and pad to the longest. The ledger counts all bytes, padding included. Every rank adds the decoded
    payloads in rank order, so the result is bit-equal on all ranks.

    Where an all-reduce of the whole vector would put fewer bytes on the link (early in a warm-up, with many ranks),
    what was selected is all-reduced instead. Its memory does not grow with the number of ranks.

    >>> Gather(SparseCodec(TopK(0.001))).compressor.selector
    TopK(density=0.001, scope='model')

    Args:
        compressor: Turns the vector into bytes.

    Raises:
        TypeError: `compressor` is not a Compressor.
    """

    may_reduce: bool = True
    """Whether what was selected may be all-reduced: not where more than its mean is needed."""

    takes_sparse: ClassVar[bool] = False
    """Whether its compressor takes sparse vectors too."""

    def __init__(self, compressor: Compressor) -> None:
        if not isinstance(compressor, Compressor):
            raise TypeError(
                f"compressor must be a Compressor; got {compressor!r}. A selector needs a codec around it:"
                " SparseCodec(TopK(0.01)), for example."
            )
        self.compressor = compressor

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        values, layout = x.values if self.takes_sparse else dense_values(x, self), context.layout
        with phase("encode"):
            body = values.new_empty(0, dtype=torch.uint8)
            if x.nonfinite_segment is None:
                body = self.compressor.encode(x, context)
            payload = seal(Envelope(body, None if all(x.present) else list(x.present), x.nonfinite_segment), layout)
        capacity = padded_bytes(self.compressor, payload.numel(), context, wire, payload.device)
        all_bytes = values.element_size() * (values.numel() + len(layout.segments))
        fewer = link_bytes("all_reduce", all_bytes, wire.world_size)
        if self.may_reduce and link_bytes("all_gather", capacity, wire.world_size) > fewer:
            return self._reduced(x, body, context, wire)
        if payload.numel() < capacity:
            payload = torch.cat([payload, payload.new_zeros(capacity - payload.numel())])
        gathered = readable(wire.all_gather(payload), self.compressor.reads_on_gpus)
        # In a warm-up they are large.
        del body, payload
        with phase("decode"):
            return self._mean(gathered, x, context, wire)

    def _mean(self, gathered: Tensor, x: Vector, context: Round, wire: Wire) -> Exchanged:
        """The mean of what all ranks have sent: `gathered` is `[W, bytes]` uint8."""
        layout, device = context.layout, x.values.device
        # Open all before using any: ranks agree on which error comes first, and nothing is half done.
        envelopes = [open_envelope(gathered[rank], layout, rank) for rank in range(wire.world_size)]
        present = read_envelopes(envelopes, context)
        # What this rank has sent is kept. A sum of two is the same in either order, so that can come last.
        order = [1 - wire.rank, wire.rank] if wire.world_size == 2 else list(range(wire.world_size))

        def vectors() -> Iterator[SparseVector | Tensor]:
            for rank in order:
                here = () if x.carries else envelopes[rank].present
                yield masked(decoded(self.compressor, envelopes[rank].body, layout.size, rank, device), here, layout)

        shared, sent = self.combined(vectors(), order.index(wire.rank), x.values.dtype)
        count_clamped(sent, self.compressor, wire)
        return Exchanged(shared, sent, present)

    def combined(
        self, vectors: Iterator[SparseVector | Tensor], own: int, dtype: torch.dtype
    ) -> tuple[SparseVector | Tensor, SparseVector | Tensor]:
        """What all share, in `dtype`, of what each rank has sent; and what this rank has.

        Args:
            vectors: One for each rank, in the same order on all; of two, those of this rank come last.
            own: The place of this rank's.
            dtype: Of the result.
        """
        kept: list[SparseVector | Tensor] = []

        def noting() -> Iterator[SparseVector | Tensor]:
            # Not by `enumerate`, which holds one vector while the next is decoded.
            places = itertools.count()
            for vector in vectors:
                if next(places) == own:
                    kept.append(vector)
                yield vector
                del vector

        return mean(noting(), dtype), kept[0]

    def _reduced(self, x: Vector, body: Tensor, context: Round, wire: Wire) -> Exchanged:
        """The mean of what ranks have selected, each as its payload decodes."""
        own: SparseVector | Tensor = x.values
        if x.nonfinite_segment is None:
            here = () if x.carries else x.present
            with phase("decode"):
                whole = decoded(self.compressor, body, x.values.numel(), wire.rank, x.values.device)
                own = masked(whole, here, context.layout)
        summand = (own.dense() if isinstance(own, SparseVector) else own).to(x.values.dtype)
        count_clamped(own, self.compressor, wire)
        return DenseAllReduce().exchange(x._replace(values=summand), context, wire)._replace(sent=own)

    def __repr__(self) -> str:
        return f"Gather({self.compressor!r})"


def padded_bytes(compressor: Compressor, length: int, context: Round, wire: Wire, device: torch.device) -> int:
    """The bytes to which all ranks pad their payloads: a bound, or else the longest `length`, which ranks gather.

    Raises:
        PayloadError: A rank's length was damaged; raised on all of them.
    """
    bound = compressor.bound_bytes(context)
    if bound is not None:
        return sealed_bytes(bound, context.layout)
    return longest(length, context, wire, device)


def longest(length: int, context: Round, wire: Wire, device: torch.device) -> int:
    """The greatest `length` of any rank's payload. A collective of 8 bytes.

    Raises:
        PayloadError: A rank's length was damaged; raised on all of them.
    """
    seed, most = context.shared_seed(), most_bytes(context.layout)
    sealed = torch.tensor([seal_length(length, seed + wire.rank)], device=device)
    numbers = wire.all_gather(sealed).view(-1).tolist()
    sources = [wire.rank] * len(numbers) if wire.mirrors else range(len(numbers))
    # All ranks see the same lengths, so all refuse the same one.
    return max(open_length(number, seed + rank, most, rank) for rank, number in zip(sources, numbers))


def handed_over(messages: Sequence[Tensor], context: Round, wire: Wire) -> list[Tensor]:
    """What each rank has for this one, given one message for each rank. Two collectives: of lengths, and of messages.

    Raises:
        PayloadError: A length was damaged; raised on this rank.
    """
    seed, most, ranks = context.shared_seed(), most_bytes(context.layout), wire.world_size
    # No number passes for that of another rank, or of another receiver.
    sealed = [seal_length(len(each), seed + ranks * (1 + wire.rank) + to) for to, each in enumerate(messages)]
    told = wire.all_to_all(torch.tensor(sealed, device=messages[0].device).view(-1, 1)).view(-1).tolist()
    lengths = []
    for sender, number in enumerate(told):
        source, to = (wire.rank, (wire.rank + 1) % ranks) if wire.mirrors else (sender, wire.rank)
        lengths.append(open_length(number, seed + ranks * (1 + source) + to, most, sender))
    return wire.all_to_all_of(messages, lengths)


def decoded(compressor: Compressor, body: Tensor, size: int, rank: int, device: torch.device) -> SparseVector | Tensor:
    """The vector of `size` elements in a rank's payload. Raises `PayloadError`, which names the rank."""
    # A body lies anywhere in what was gathered. Copied, it can be viewed in any dtype.
    body = body.clone() if body.storage_offset() % _ALIGNMENT else body
    try:
        vector = compressor.decode(body, size)
    except PayloadError as error:
        raise PayloadError(f"rank {rank}'s payload: {error}") from error
    if isinstance(vector, Tensor):
        return vector.to(device)
    return SparseVector(vector.indices.to(device), vector.values.to(device), vector.size)


class Limited(Protocol):
    """What can send no magnitude above its largest one."""

    @property
    def largest(self) -> float: ...


def count_clamped(sent: SparseVector | Tensor, compressor: Limited, wire: Wire) -> None:
    """Counts in the ledger what was too large to be sent as it was."""
    values, largest = values_of(sent), compressor.largest
    if largest == math.inf or not values.numel():
        return
    least, most = values.aminmax()
    # Usually none is, and to count them takes ten times as long. Written so that NaN does not hide others.
    if not bool((most < largest) & (least > -largest)):
        # A sum of booleans, or magnitudes, would take the memory of one or two more vectors.
        clamped = torch.count_nonzero(values >= largest) + torch.count_nonzero(values <= -largest)
        wire.ledger.clamp(int(clamped), largest)
