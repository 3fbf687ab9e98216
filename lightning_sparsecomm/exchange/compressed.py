"""An all-reduce whose two halves are compressed: each rank adds up one piece of every tensor."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout, Round, SparseVector, Vector, Wire, phase
from lightning_sparsecomm.basis.layout import add_to_, count_of
from lightning_sparsecomm.codecs import Compressor, Envelope
from lightning_sparsecomm.codecs.payload import open_envelope, seal
from lightning_sparsecomm.codecs.selectors.candidates import Wanted
from lightning_sparsecomm.exchange.base import Exchange, Exchanged, dense_values
from lightning_sparsecomm.exchange.gather import Gather, count_clamped, decoded, padded_bytes
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

    sums_pieces: ClassVar[bool] = True

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
        part = replace(context, layout=_piece_of(context.layout, world_size))
        with phase("encode"):
            pieces = _cut(values, context.layout, world_size)
            messages = [self._message(each, x, part, rank == own) for rank, each in enumerate(pieces)]
        received = wire.all_to_all(self._padded(messages, part, wire)).cpu()
        with phase("decode"):
            # All are opened before any is used.
            envelopes = [open_envelope(message, part.layout, rank) for rank, message in enumerate(received)]
            present = read_envelopes(envelopes, context)
            mean = pieces[own].clone()
            for rank, envelope in enumerate(envelopes):
                if rank != own:
                    add_to_(mean, self._vector(envelope, rank, x, part))
            mean.div_(world_size)
        with phase("encode"):
            message = seal(Envelope(self.compressor.encode(Vector(mean), part)), part.layout)
        gathered = wire.all_gather(self._padded([message], part, wire)[0]).cpu()
        with phase("decode"):
            opened = [open_envelope(message, part.layout, rank) for rank, message in enumerate(gathered)]
            shared, self._elements = torch.zeros_like(pieces), 0
            for rank, (into, envelope) in enumerate(zip(shared, opened)):
                vector = self._vector(envelope, rank, x, part)
                add_to_(into, vector)
                self._elements += count_of(vector) if rank == own else 0
            self._replace_by_sent_(pieces, messages, mean.sub_(shared[own]), x, part, wire)
        whole, sent = (masked(_joined(each, context.layout), present, context.layout) for each in (shared, pieces))
        return Exchanged(whole, sent, present)

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
        return masked(vector, () if x.carries else envelope.present, part.layout)

    def _replace_by_sent_(
        self, pieces: Tensor, messages: Sequence[Tensor], lost: Tensor, x: Vector, part: Round, wire: Wire
    ) -> None:
        """Of others' pieces, what they decode; of the own piece all, but for what its mean has lost, once per rank."""
        pieces[wire.rank].sub_(lost, alpha=wire.world_size)
        for rank, message in enumerate(messages):
            if rank != wire.rank:
                sent = self._vector(open_envelope(message, part.layout, wire.rank), wire.rank, x, part)
                count_clamped(sent, self.compressor, wire)
                add_to_(pieces[rank].zero_(), sent)
                self._elements += count_of(sent)

    def __repr__(self) -> str:
        return f"CompressedAllReduce({self.compressor!r})"


@lru_cache(maxsize=64)
def _piece_of(layout: Layout, world_size: int) -> Layout:
    """The layout of every piece: a part of each tensor. The last ones are filled up with zeros, which are not sent."""
    return Layout((segment.name, (-(-segment.size // world_size),)) for segment in layout.segments)


def _cut(vector: Tensor, layout: Layout, world_size: int) -> Tensor:
    """`[W, p]`: the pieces of `[n]`; in other memory."""
    filled = [torch.nn.functional.pad(flat, (0, -flat.numel() % world_size)) for flat in layout.flats(vector)]
    parts = [flat.view(world_size, flat.numel() // world_size) for flat in filled]
    return torch.cat(parts, 1) if parts else vector.new_empty(world_size, 0)


def _joined(pieces: Tensor, layout: Layout) -> Tensor:
    """`[n]`: what `_cut` has cut."""
    widths = [segment.size for segment in _piece_of(layout, len(pieces)).segments]
    flats = [part.reshape(-1) for part in pieces.split(widths, 1)]
    return torch.cat([flat[: segment.size] for flat, segment in zip(flats, layout.segments)]) if flats else pieces[0]
