"""The mean of what ranks have selected, added up in regions: each rank owns one, and sends what is in it to all."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Round, SparseVector, Vector, Wire, phase
from lightning_sparsecomm.basis.arguments import check_whole_number
from lightning_sparsecomm.basis.layout import count_of, mean
from lightning_sparsecomm.codecs import (
    Bitmap,
    Envelope,
    Float32,
    Float64,
    IndexCoding,
    PayloadError,
    SparseCodec,
    ValueCodec,
)
from lightning_sparsecomm.codecs.payload import open_envelope, seal, sealed_bytes
from lightning_sparsecomm.codecs.stretch import STRETCH_BYTES, decode_stretch, encode_stretch
from lightning_sparsecomm.exchange.base import Exchange, Exchanged, dense_values
from lightning_sparsecomm.exchange.gather import count_clamped, handed_over, longest
from lightning_sparsecomm.exchange.regions import agreed_bounds, counts_of, cut, joined, shared_out
from lightning_sparsecomm.exchange.status import masked, read_envelopes

# Ranks share out the result where one has so many times the mean: as much of what they send to all is padding. With two
# ranks that costs less than sharing out.
_UNEVEN, _FEWEST_RANKS = 1.5, 3

# Regions are made anew where one has so many times the mean.
_STALE = 2


class _Regions(NamedTuple):
    """Where regions begin and end, `[W + 1]` int64 on the CPU, and for how many rounds they have been used."""

    bounds: Tensor
    rounds: int


class RegionSum(Exchange):
    """The mean of what ranks have selected; each position crosses the network once, however many ranks selected it.

    The vector is cut into W regions in which ranks have selected as many elements. Each rank sends what it has selected
    in a region to the region's owner. Owners add it up, and send it to all. The result has the bits of `Gather`'s,
    where values are rounded one by one.

    Elements on the link: a rank sends the k that it has selected, less those of its own region, and about a W-th of
    all positions that any rank has selected to each other rank, in float32. There are five collectives: lengths, the
    selection, counts, lengths, and an all-gather. Where one region has many more elements than others, ranks share
    them out, in two more.

    State, equal on all ranks: where regions begin, `[W + 1]` int64, and for how many rounds they have been used.

    Source: Renggli et al. 2019, SparCML (split all-gather), with regions of equal counts as in Ok-Topk.

    >>> RegionSum(SparseCodec(TopK(0.01))).balance_every
    64

    Args:
        codec: Selects each rank's elements, and turns them into bytes.
        balance_every: Rounds for which regions are kept; less where one gets twice as many elements as the mean.

    Raises:
        TypeError: `codec` is no `SparseCodec`.
        ValueError: `balance_every` is below 1.
    """

    renewable = True

    def __init__(self, codec: SparseCodec, balance_every: int = 64) -> None:
        if not isinstance(codec, SparseCodec):
            raise TypeError(f"codec must be a SparseCodec; got {codec!r}. Use SparseCodec(TopK(0.01)), for example.")
        check_whole_number(
            "balance_every", balance_every, 1, "the rounds for which regions are kept", "Use 64, as in Ok-Topk's paper."
        )
        self.codec = codec
        self.balance_every = balance_every
        self._regions: _Regions | None = None
        self._next: _Regions | None = None
        self._elements = 0

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        values, rank = dense_values(x, self), wire.rank
        nothing = SparseVector(torch.empty(0, dtype=torch.int64, device=values.device), values[:0], values.numel())
        own = self.codec.select(x, context) if x.nonfinite_segment is None else nothing
        bounds = self._bounds(own, context, wire)
        with phase("encode"):
            brought = cut(own, bounds)
            # An owner has its own part already.
            bodies = [self._encoded(nothing if i == rank else part, context) for i, part in enumerate(brought)]
            present = None if all(x.present) else list(x.present)
            messages = [seal(Envelope(body, present, x.nonfinite_segment), context.layout) for body in bodies]
        received = handed_over(messages, context, wire)
        with phase("decode"):
            # All are opened before any is used.
            envelopes = [open_envelope(each.cpu(), context.layout, sender) for sender, each in enumerate(received)]
            anyone = read_envelopes(envelopes, context)
            begin, end = int(bounds[rank]), int(bounds[rank + 1])
            first, last = (0, own.size) if wire.mirrors else (begin, end)
            parts = [opened(each.body, sender, own, first, last) for sender, each in enumerate(envelopes)]
            brought[rank] = parts[rank] = self.own_part(brought[rank], context)
            region = _added_up([brought[rank]] * len(parts) if wire.mirrors else parts, begin, end)
        result, most = self.result(region, context, wire)
        with phase("encode"):
            body = encode_stretch(result, self.result_values(context), self.result_indices(result))
            message = seal(Envelope(body), context.layout)
        length = self.length(message, most, context, wire)
        gathered = wire.all_gather(torch.nn.functional.pad(message, (0, length - len(message)))).cpu()
        with phase("decode"):
            envelopes = [open_envelope(message, context.layout, sender) for sender, message in enumerate(gathered)]
            means = [opened(each.body, sender, own, 0, own.size) for sender, each in enumerate(envelopes)]
            shared = own if wire.mirrors else joined(means)
            for owner, body in enumerate(bodies):
                if owner != rank:
                    brought[owner] = opened(body, rank, own, 0, own.size)
                    count_clamped(brought[owner], self.codec, wire)
            sent = self.sent(brought, shared, result, means[rank], wire)
            self._elements = sum(map(count_of, brought)) - count_of(brought[rank]) + count_of(means[rank])
        whole, here = (masked(_lighter(each), anyone, context.layout) for each in (shared, sent))
        return Exchanged(whole, here, anyone)

    def own_part(self, part: SparseVector, context: Round) -> SparseVector:
        """What this rank has selected in its own region, as the others would decode it."""
        return opened(self._encoded(part, context), 0, part, 0, part.size)

    def result(self, region: SparseVector, context: Round, wire: Wire) -> tuple[SparseVector, int]:
        """What this rank sends to all, of the means of its region; and how many elements a rank sends at most."""
        largest = torch.finfo(region.values.dtype).max
        # A sum of finite numbers can be infinite.
        region = region._replace(values=region.values.clamp(-largest, largest))
        counts = counts_of(region, context, wire)
        self.look(counts, wire)
        return self.evened(region, counts, context, wire)

    def look(self, counts: Sequence[int], wire: Wire) -> None:
        """Makes regions anew in the next round, if one has far more elements than others; given those of each."""
        if max(counts) * wire.world_size > _STALE * (sum(counts) + wire.world_size):
            self._next = None

    def evened(self, kept: SparseVector, counts: list[int], context: Round, wire: Wire) -> tuple[SparseVector, int]:
        """What this rank sends to all, when ranks have shared out evenly what all have kept; and how many at most.

        Args:
            kept: This rank's elements.
            counts: How many elements each rank has.
            context: The round.
            wire: Where to communicate. A collective, if one rank has many more than others.
        """
        even = max(counts) * wire.world_size <= _UNEVEN * (sum(counts) + wire.world_size)
        if even or wire.world_size < _FEWEST_RANKS:
            return kept, max(counts)
        with phase("encode"):
            # In full width: values are rounded once only, before they go to all.
            parts = shared_out(kept, counts, wire.rank)
            bodies = [encode_stretch(part, full_width(context), self.codec.indices) for part in parts]
            messages = [seal(Envelope(body), context.layout) for body in bodies]
        received = handed_over(messages, context, wire)
        with phase("decode"):
            envelopes = [open_envelope(message.cpu(), context.layout, rank) for rank, message in enumerate(received)]
            evened = joined([opened(each.body, rank, kept, 0, kept.size) for rank, each in enumerate(envelopes)])
        return evened, -(-sum(counts) // wire.world_size)

    def result_values(self, context: Round) -> ValueCodec:
        """The codec of means: they are not rounded again."""
        return full_width(context)

    def result_indices(self, result: SparseVector) -> IndexCoding:
        """The codec of its positions. Of many ranks, there may be very many close together."""
        span = int(result.indices[-1] - result.indices[0]) + 1 if count_of(result) else 0
        bound = self.codec.indices.bound_bytes(count_of(result), span)
        return Bitmap() if bound is not None and bound > span / 8 else self.codec.indices

    def length(self, message: Tensor, most: int, context: Round, wire: Wire) -> int:
        """The bytes to which messages with `most` elements or fewer are padded."""
        told = longest(message.numel(), context, wire, message.device)
        if not wire.mirrors:
            return told
        # Other ranks would select other elements, until all elements of a region are held.
        least = sealed_bytes(STRETCH_BYTES, context.layout)
        most_bytes = 4.125 * context.layout.size / wire.world_size
        return least + math.ceil(min((told - least) * usual_spread(wire.world_size), most_bytes))

    def sent(
        self,
        brought: Sequence[SparseVector],
        shared: SparseVector,
        told: SparseVector,
        received: SparseVector,
        wire: Wire,
    ) -> SparseVector:
        """What this rank has sent of the result.

        Args:
            brought: What it had for each owner, as that decodes it.
            shared: The result.
            told: The means that this rank has sent to all.
            received: The same, as all decode them.
            wire: Where they were sent.
        """
        count_clamped(brought[wire.rank], self.codec, wire)
        return joined(brought)

    def elements(self, exchanged: Exchanged) -> int:
        return self._elements

    def commit(self) -> None:
        self._regions = self._next

    def state_dict(self) -> dict[str, Tensor]:
        if self._regions is None:
            return {}
        return {"bounds": self._regions.bounds, "rounds": torch.tensor(self._regions.rounds)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if state:
            self._regions = _Regions(state["bounds"].cpu(), int(state["rounds"]))

    def _bounds(self, own: SparseVector, context: Round, wire: Wire) -> Tensor:
        """Where regions begin and end in this round."""
        regions = self._regions
        if regions is not None:
            fits = len(regions.bounds) == wire.world_size + 1 and int(regions.bounds[-1]) == own.size
            if not fits or regions.rounds >= self.balance_every:
                regions = None
        if regions is None:
            regions = _Regions(agreed_bounds(own, context, wire), 0)
        self._next = regions._replace(rounds=regions.rounds + 1)
        return regions.bounds

    def _encoded(self, part: SparseVector, context: Round) -> Tensor:
        return encode_stretch(part, self.codec.value_codec(context), self.codec.indices)


def full_width(context: Round) -> ValueCodec:
    """The codec of values that are not rounded."""
    return Float64() if context.dtype == torch.float64 else Float32()


def usual_spread(world_size: int) -> float:
    """How many times as many positions all ranks select as one rank does, in most trainings: W^0.8.

    With 8 ranks 3 to 7.9 times as many were measured, in the middle 5.3.
    """
    return float(world_size**0.8)


def opened(body: Tensor, sender: int, like: SparseVector, begin: int, end: int) -> SparseVector:
    """A rank's elements, which must be from `begin` to `end`. Raises `PayloadError`, which names the rank."""
    # A body lies anywhere in what was received. Copied, it can be viewed in any dtype.
    try:
        vector = decode_stretch(body.clone(), like.size)
    except PayloadError as error:
        raise PayloadError(f"rank {sender}'s payload: {error}") from error
    if vector.indices.numel() and not begin <= int(vector.indices[0]) <= int(vector.indices[-1]) < end:
        first, last = int(vector.indices[0]), int(vector.indices[-1])
        raise PayloadError(f"rank {sender}'s payload: has positions {first} to {last}, expected {begin} to {end - 1}.")
    return SparseVector(vector.indices.to(like.indices.device), vector.values.to(like.values), like.size)


def _added_up(parts: Sequence[SparseVector], begin: int, end: int) -> SparseVector:
    """The elements of the mean that are not zero."""
    total = mean(
        (SparseVector(each.indices - begin, each.values, end - begin) for each in parts), parts[0].values.dtype
    )
    if isinstance(total, Tensor):
        total = SparseVector(torch.arange(end - begin, device=total.device), total, end - begin)
    whole = SparseVector(total.indices + begin, total.values, parts[0].size)
    return at(whole, whole.values.nonzero().view(-1))


def _lighter(vector: SparseVector) -> SparseVector | Tensor:
    """Dense where that takes less time to add."""
    return vector if count_of(vector) <= vector.size // 8 else vector.dense()


def at(vector: SparseVector, chosen: Tensor) -> SparseVector:
    """Some of the elements that a vector holds."""
    return SparseVector(vector.indices[chosen], vector.values[chosen], vector.size)
