"""Ranks add up sparse vectors in pairs, in a number of rounds that grows with the logarithm of their number."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparsecomm.codecs.indices import Raw32
from lightning_sparsecomm.codecs.payload import Envelope, PayloadError, check_length, most_bytes, open_envelope, seal
from lightning_sparsecomm.codecs.selectors import Selector
from lightning_sparsecomm.codecs.sparse import decode_sparse, encode_sparse
from lightning_sparsecomm.codecs.values import Float32, Float64
from lightning_sparsecomm.compensation import Wanted
from lightning_sparsecomm.exchange.base import Exchange, Exchanged, NonFiniteGradientError, Outgoing
from lightning_sparsecomm.kernels import kernels_for
from lightning_sparsecomm.layout import Layout, SparseVector
from lightning_sparsecomm.rounds import Round
from lightning_sparsecomm.wire import Wire


class RecursiveDoubling(Exchange):
    """All-reduce of sparse vectors as positions and values, which becomes dense where the sums have filled in.

    Of 2^r ranks, each swaps what it has with the one whose number differs in bit i, i = 0 … r − 1, and both add; the
    others of W ranks hand theirs over before and get the sum afterwards. A vector of which half the elements are held
    is filled up: then its positions, which cost as much as its values, are not sent any more. Exact for what is sent,
    and bit-equal on all ranks, since all add in the same order.

    Bytes handed over: in each of the r rounds 8 for each element of the sum so far, at most 4 for each of the vector,
    and 40 of headers; once more by a rank that gives one of the others the sum. These others hand over what they have.

    Source: SparCML (Renggli et al. 2019), sparse all-reduce by recursive doubling, with the switch to dense vectors at
    half of the elements.

    Args:
        selector: Chooses what each rank brings.
    """

    def __init__(self, selector: Selector) -> None:
        self.selector = selector

    def wanted(self, round: Round) -> Sequence[Wanted]:
        return self.selector.wanted(round)

    def run(self, outgoing: Outgoing, round: Round, wire: Wire) -> Exchanged:
        _, present, nonfinite_segment, candidates, _ = outgoing
        x = self.dense(outgoing)
        chosen = x.new_empty(0, dtype=torch.int64)
        if nonfinite_segment is None:
            chosen = self.selector.select(x, round, candidates)
        sent = SparseVector(chosen, x[chosen], x.numel())
        held = self._sum_over_ranks(_Held(sent, list(present), nonfinite_segment), round.layout, wire)
        if held.nonfinite_segment is not None:
            raise NonFiniteGradientError.found_on_any(nonfinite_segment, round, wire, x.device)
        values = held.vector.values / wire.world_size
        shared = values if values.numel() == x.numel() else held.vector._replace(values=values)
        return Exchanged(shared, sent, held.present)

    def _sum_over_ranks(self, held: "_Held", layout: Layout, wire: Wire) -> "_Held":
        rank, world_size, device = wire.rank, wire.world_size, held.vector.values.device

        def check(length: int, sender: int) -> None:
            check_length(length, most_bytes(layout), sender)

        paired = 1 << (world_size.bit_length() - 1)
        if rank >= paired:
            wire.send(held.written(layout), rank - paired)
            return held.read(wire.receive(rank - paired, device, check), layout, rank - paired)
        follower = rank + paired if rank + paired < world_size else None
        if follower is not None:
            held = held + held.read(wire.receive(follower, device, check), layout, follower)
        for bit in range(paired.bit_length() - 1):
            peer = rank ^ 1 << bit
            other = held.read(wire.swap(held.written(layout), peer, check), layout, peer)
            held = held + other if rank < peer else other + held
        if follower is not None:
            wire.send(held.written(layout), follower)
        return held

    def __repr__(self) -> str:
        return f"RecursiveDoubling({self.selector!r})"


class _Held(NamedTuple):
    """What some ranks have brought, added up."""

    vector: SparseVector
    present: list[bool]
    nonfinite_segment: int | None

    def written(self, layout: Layout) -> Tensor:
        """One payload for another rank."""
        body = self.vector.values.new_empty(0, dtype=torch.uint8)
        if self.nonfinite_segment is None:
            codec = Float64() if self.vector.values.dtype == torch.float64 else Float32()
            body = encode_sparse(self.vector, layout, codec, Raw32())
        present = None if all(self.present) else self.present
        return seal(Envelope(body, present, self.nonfinite_segment), layout)

    def read(self, payload: Tensor, layout: Layout, rank: int) -> "_Held":
        """What another rank has written; its values in the dtype of these."""
        envelope = open_envelope(payload, layout, rank)
        vector = SparseVector(self.vector.indices[:0], self.vector.values[:0], layout.size)
        if envelope.nonfinite_segment is None:
            try:
                vector = decode_sparse(envelope.body, layout.size)
            except PayloadError as error:
                raise PayloadError(f"rank {rank}'s payload: {error}") from error
            vector = vector._replace(values=vector.values.to(self.vector.values.dtype))
        return _Held(vector, envelope.present or [True] * len(layout.segments), envelope.nonfinite_segment)

    def __add__(self, other: "_Held") -> "_Held":  # type: ignore[override]
        nonfinite = self.nonfinite_segment if self.nonfinite_segment is not None else other.nonfinite_segment
        present = [any(pair) for pair in zip(self.present, other.present, strict=True)]
        return _Held(_added(self.vector, other.vector), present, nonfinite)


def _added(first: SparseVector, second: SparseVector) -> SparseVector:
    size = first.size
    if max(first.indices.numel(), second.indices.numel()) < size:
        values = torch.cat([first.values, second.values])
        kernels = kernels_for(values.device, values.dtype)
        total = SparseVector(*kernels.add_up(torch.cat([first.indices, second.indices]), values), size)
        if 2 * total.indices.numel() < size:
            return total
        dense = total.dense()
    else:
        dense = first.dense() + second.dense()
    return SparseVector(torch.arange(size, device=dense.device), dense, size)
