"""An all-reduce whose two halves are compressed: each rank adds up one piece of every tensor."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Round, SparseVector, Vector, Wire, phase
from lightning_sparsecomm.basis.allocation import copied
from lightning_sparsecomm.basis.layout import add_to_, count_of
from lightning_sparsecomm.codecs import Compressor, Envelope
from lightning_sparsecomm.codecs.payload import open_envelope, readable, seal
from lightning_sparsecomm.codecs.selectors.candidates import Wanted
from lightning_sparsecomm.exchange.base import Exchange, Exchanged, dense_values
from lightning_sparsecomm.exchange.gather import Gather, count_clamped, decoded, padded_bytes
from lightning_sparsecomm.exchange.pieces import Pieces
from lightning_sparsecomm.exchange.status import masked, read_envelopes


class CompressedAllReduce(Exchange):
    """The mean by an all-to-all and an all-gather of payloads: the bytes on the link hardly grow with ranks.

    Each tensor is cut into W pieces, of which rank r owns the r-th. A rank compresses the pieces that others own, and
    sends each to its owner. The owner adds them to its own piece, which is not compressed, compresses the mean, and
    sends that to all.

    What a rank did not send of others' pieces stays in its residual, as ever. So does what the owner did not send of
    the mean, W times, since one rank's residual enters the next mean divided by W: nothing is lost.

    With payloads of p bytes for a whole vector, 2 (W − 1) / W · p are on the link, and (W − 1) · p with `Gather`. Two
    ranks gather: as many bytes, and each element is rounded once. Payloads are padded to the compressor's bound, or to
    the longest: then ranks gather lengths first, before each half.

    Source: DoubleSqueeze (Tang et al. 2019) compresses both halves with error feedback, and so does 1-bit Adam (Tang et
    al. 2021). That owners do not compress their own pieces, and keep what the mean loses with their residuals, is ours.

    >>> CompressedAllReduce(SparseCodec(TopK(0.25, "balanced"), TwoBit())).compressor.values
    TwoBit(group=64)

    Args:
        compressor: Turns a piece of all tensors into bytes.
    """

    sums_pieces = True

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        # In the messages of the last round; negative where it was a gather.
        self._elements = -1

    def wanted(self, context: Round) -> Sequence[Wanted]:
        # Candidates are noted for whole tensors, and not for pieces.
        return () if context.world_size > 2 else super().wanted(context)

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        values, world_size, own = dense_values(x, self), wire.world_size, wire.rank
        if world_size < 3:
            self._elements = -1
            return Gather(self.compressor).exchange(x, context, wire)
        pieces = Pieces.of(context.layout, world_size)
        part = replace(context, layout=pieces.layout)
        with phase("encode"):
            brought = pieces.cut(values)
            messages = [self._message(each, x, part, rank == own) for rank, each in enumerate(brought)]
        received = readable(wire.all_to_all(self._padded(messages, part, wire)), self.compressor.reads_on_gpus)
        kept = copied(brought[own])
        # From here on, as little as possible is held at once.
        del brought
        with phase("decode"):
            # All are opened before any is used.
            envelopes = [open_envelope(message, part.layout, rank) for rank, message in enumerate(received)]
            present = read_envelopes(envelopes, context)
            mean = copied(kept)
            for rank, envelope in enumerate(envelopes):
                if rank != own:
                    add_to_(mean, self._vector(envelope, rank, x, part))
            mean.div_(world_size)
            # A sign stands for each element that a piece was filled up with.
            pieces.clear_filling_(mean, own)
            del received, envelopes
        with phase("encode"):
            message = seal(Envelope(self.compressor.encode(Vector(mean), part)), part.layout)
        gathered = wire.all_gather(self._padded([message], part, wire)[0])
        gathered = readable(gathered, self.compressor.reads_on_gpus)
        with phase("decode"):
            opened = [open_envelope(message, part.layout, rank) for rank, message in enumerate(gathered)]
            lost: list[Tensor] = []

            def means() -> Iterator[SparseVector | Tensor]:
                for rank, envelope in enumerate(opened):
                    vector = self._vector(envelope, rank, x, part)
                    if rank == own:
                        self._elements = count_of(vector)
                        lost.append(add_to_(mean, vector, -1))
                    yield vector
                    del vector

            def sent() -> Iterator[SparseVector | Tensor]:
                for rank, message in enumerate(messages):
                    # Of the own piece all was sent, but for what its mean has lost, once per rank.
                    yield kept.sub_(lost[0], alpha=world_size) if rank == own else self._sent(message, x, part, wire)

            shared, taken = pieces.joined(means()), pieces.joined(sent())
        whole, here = (masked(each, present, context.layout) for each in (shared, taken))
        return Exchanged(whole, here, present)

    def elements(self, exchanged: Exchanged) -> int:
        return super().elements(exchanged) if self._elements < 0 else self._elements

    def _message(self, piece: Tensor, x: Vector, part: Round, kept: bool) -> Tensor:
        """A piece for its owner, with this rank's status. Nothing of what this rank owns itself."""
        body = piece.new_empty(0, dtype=torch.uint8)
        if x.nonfinite_segment is None and not kept:
            body = self.compressor.encode(Vector(piece), part)
        return seal(Envelope(body, None if all(x.present) else list(x.present), x.nonfinite_segment), part.layout)

    def _padded(self, messages: Sequence[Tensor], part: Round, wire: Wire) -> Tensor:
        """`[messages, bytes]` uint8, as long on all ranks."""
        longest = max(message.numel() for message in messages)
        length = padded_bytes(self.compressor, longest, part, wire, messages[0].device)
        return torch.stack([torch.nn.functional.pad(each, (0, length - each.numel())) for each in messages])

    def _vector(self, envelope: Envelope, rank: int, x: Vector, part: Round) -> SparseVector | Tensor:
        vector = decoded(self.compressor, envelope.body, part.layout.size, rank, x.values.device)
        if isinstance(vector, Tensor):
            vector = vector.to(x.values.dtype)
        else:
            vector = vector._replace(values=vector.values.to(x.values.dtype))
        return masked(vector, () if x.carries else envelope.present, part.layout)

    def _sent(self, message: Tensor, x: Vector, part: Round, wire: Wire) -> SparseVector | Tensor:
        """What was sent to another rank, as it decodes it."""
        vector = self._vector(open_envelope(message, part.layout, wire.rank), wire.rank, x, part)
        count_clamped(vector, self.compressor, wire)
        self._elements += count_of(vector)
        return vector

    def __repr__(self) -> str:
        return f"CompressedAllReduce({self.compressor!r})"
