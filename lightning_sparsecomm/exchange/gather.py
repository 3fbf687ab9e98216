"""Each rank sends one payload to all others, and all decode all of them."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_sparsecomm.codecs.compressor import Compressor
from lightning_sparsecomm.codecs.payload import (
    Envelope,
    PayloadError,
    check_length,
    most_bytes,
    open_envelope,
    seal,
    sealed_bytes,
)
from lightning_sparsecomm.compensation import Wanted
from lightning_sparsecomm.exchange.base import Exchange, Exchanged, NonFiniteGradientError, Outgoing
from lightning_sparsecomm.exchange.dense import DenseAllReduce
from lightning_sparsecomm.layout import SparseVector, mean
from lightning_sparsecomm.rounds import Round
from lightning_sparsecomm.wire import Wire, link_bytes


class Gather(Exchange):
    """All-gather of one self-contained payload per rank.

    Where the compressor bounds its payloads, they are padded to the bound and travel in one collective; else lengths
    are gathered first and the payloads padded to the longest. Either way all bytes, padding too, are in the ledger.
    Every rank adds the decoded payloads in rank order, so the result is bit-equal on all of them.

    Where that would put more on the link than an all-reduce of the whole vector, as it does early in a warm-up with
    many ranks, what was selected is all-reduced instead. The memory for it does not grow with ranks.

    Args:
        compressor: Turns the vector into bytes.
    """

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor

    def wanted(self, round: Round) -> Sequence[Wanted]:
        return self.compressor.wanted(round)

    def run(self, outgoing: Outgoing, round: Round, wire: Wire) -> Exchanged:
        present, x = outgoing.present, self.dense(outgoing)
        body = x.new_empty(0, dtype=torch.uint8)
        if outgoing.nonfinite_segment is None:
            body = self.compressor.encode(x, round, outgoing.candidates)
        payload = seal(
            Envelope(body, None if all(present) else list(present), outgoing.nonfinite_segment), round.layout
        )
        capacity = self._capacity(payload, round, wire)
        all_bytes = x.element_size() * (x.numel() + len(present))
        if link_bytes("all_gather", capacity, wire.world_size) > link_bytes("all_reduce", all_bytes, wire.world_size):
            return self._reduced(x, body, outgoing, round, wire)
        if payload.numel() < capacity:
            payload = torch.cat([payload, payload.new_zeros(capacity - payload.numel())])
        # Bytes are checked and parsed on the CPU, whatever the device.
        gathered = wire.all_gather(payload).cpu()
        # In a warm-up they are large.
        del body, payload

        # All are opened before any is used: ranks agree on which error comes first, and nothing is half done.
        envelopes = [open_envelope(gathered[rank], round.layout, rank) for rank in range(wire.world_size)]
        for rank, received in enumerate(envelopes):
            if received.nonfinite_segment is not None:
                raise NonFiniteGradientError.of(received.nonfinite_segment, round, rank)
        own: list[SparseVector | Tensor] = []

        def decoded() -> Iterator[SparseVector | Tensor]:
            for rank, received in enumerate(envelopes):
                vector = self._decode(received.body, round, rank, x.device)
                if rank == wire.rank:
                    own.append(vector)
                yield vector

        shared = mean(decoded(), x.dtype)
        anyone = [received.present or [True] * len(present) for received in envelopes]
        return Exchanged(shared, own[0], [any(column) for column in zip(*anyone)])

    def _reduced(self, x: Tensor, body: Tensor, outgoing: Outgoing, round: Round, wire: Wire) -> Exchanged:
        """The mean of what ranks have selected, each as its payload decodes."""
        own: SparseVector | Tensor = x
        if outgoing.nonfinite_segment is None:
            own = self._decode(body, round, wire.rank, x.device)
        whole = (own.dense() if isinstance(own, SparseVector) else own).to(x.dtype)
        return DenseAllReduce().run(outgoing._replace(x=whole), round, wire)._replace(sent=own)

    def _capacity(self, payload: Tensor, round: Round, wire: Wire) -> int:
        """The bytes that each rank's payload takes in an all-gather; the same on all ranks."""
        bound = self.compressor.bound_bytes(round)
        if bound is not None:
            return sealed_bytes(bound, round.layout)
        lengths: list[int] = wire.all_gather(torch.tensor([payload.numel()], device=payload.device)).view(-1).tolist()
        # All ranks see the same lengths, so all refuse the same one.
        for rank, length in enumerate(lengths):
            check_length(length, most_bytes(round.layout), rank)
        return max(lengths)

    def _decode(self, body: Tensor, round: Round, rank: int, device: torch.device) -> SparseVector | Tensor:
        try:
            decoded = self.compressor.decode(body, round.layout.size)
        except PayloadError as error:
            raise PayloadError(f"rank {rank}'s payload: {error}") from error
        if isinstance(decoded, SparseVector):
            return SparseVector(decoded.indices.to(device), decoded.values.to(device), decoded.size)
        return decoded.to(device)

    def __repr__(self) -> str:
        return f"Gather({self.compressor!r})"
