"""An all-reduce in a few bits for each element: each rank sums one piece of the vector."""

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Round, Vector, Wire, phase
from lightning_sparsecomm.codecs import Envelope, PayloadError, dense_codec
from lightning_sparsecomm.codecs.blockwise import Bits
from lightning_sparsecomm.codecs.payload import open_envelope, readable, seal
from lightning_sparsecomm.exchange.base import Exchange, Exchanged, dense_values
from lightning_sparsecomm.exchange.gather import count_clamped
from lightning_sparsecomm.exchange.status import masked, read_envelopes, sealed_status


class QuantizedAllReduce(Exchange):
    """The mean of whole vectors, in 8, 4 or 2 bits for each element; by an all-to-all and an all-gather. Biased.

    The vector is cut into W equal pieces. Each rank rounds all pieces of its own vector, and sends one to each rank. A
    rank adds up those it receives, in rank order, rounds their mean, and sends that to all. Each block has a scale, or
    two magnitudes with 2 bits.

    With error feedback, both roundings stay in residuals. What a mean loses is kept by the rank that rounded it, W
    times, since one rank's residual enters the next mean divided by W; also where that rank has no gradient.

    Bytes on the link: 2 (W − 1) / W for each element (a half with 4 bits, a quarter with 2), as many times 4 for each
    block, 16 of headers for each of 2 (W − 1) messages, and a bit for each tensor in half of them. A rank hands over W
    pieces, then one.

    >>> QuantizedAllReduce(bits=4)
    QuantizedAllReduce(bits=4, block=256)

    Args:
        bits: 8, 4 or 2, for each element.
        block: Elements that share a scale; None for 256, or 128 with 2 bits.

    Raises:
        ValueError: `bits` is none of these, or `block` is below 1 (or above 255, with 2 bits).
    """

    sums_pieces = True

    def __init__(self, bits: Bits = 8, block: int | None = None) -> None:
        self._codec = dense_codec(bits, block)
        self.bits = bits
        self.block = self._codec.block

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        values, world_size = dense_values(x, self), wire.world_size
        n = values.numel()
        length = -(-n // world_size)
        with phase("encode"):
            pieces = torch.nn.functional.pad(values, (0, world_size * length - n)).view(world_size, length)
            bodies = [self._codec.encode(piece) for piece in pieces]
            messages = torch.stack([sealed_status(body, x, context) for body in bodies])
        received = readable(wire.all_to_all(messages), on_gpus=True)
        with phase("decode"):
            # Open all before using any: all ranks agree on which error comes first.
            envelopes = [open_envelope(message, context.layout, rank) for rank, message in enumerate(received)]
            present = read_envelopes(envelopes, context)
            mean = values.new_zeros(length)
            for rank, envelope in enumerate(envelopes):
                # Divided before the sum, as in DDP.
                mean.add_(self._decoded(envelope.body, length, rank, values).div_(world_size))
            # In 2 bits, no element is zero, and padding would count as more than that.
            mean[max(0, n - wire.rank * length) :] = 0
        with phase("encode"):
            rounded = self._codec.encode(mean)
            message = seal(Envelope(rounded), context.layout)
        gathered = readable(wire.all_gather(message), on_gpus=True)
        with phase("decode"):
            opened = [open_envelope(each, context.layout, rank) for rank, each in enumerate(gathered)]
            shared = torch.cat([self._decoded(each.body, length, rank, values) for rank, each in enumerate(opened)])
            sent = torch.cat([self._decoded(body, length, wire.rank, values) for body in bodies])
            count_clamped(sent, self._codec, wire)
            # What the mean lost by rounding: this rank has sent that much less.
            own = slice(wire.rank * length, (wire.rank + 1) * length)
            sent[own].sub_(mean.sub_(shared[own]), alpha=world_size)
        # Also where this rank lacks a gradient: what it lost there of the mean of others' waits in its residual.
        mean_sent, own_sent = (masked(vector[:n], present, context.layout) for vector in (shared, sent))
        return Exchanged(mean_sent, own_sent, present)

    def _decoded(self, body: Tensor, length: int, rank: int, like: Tensor) -> Tensor:
        try:
            return self._codec.decode(body, length).to(like)
        except PayloadError as error:
            raise PayloadError(f"rank {rank}'s payload: {error}") from error
