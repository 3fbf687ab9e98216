"""The largest elements of the sum over ranks: each rank adds up a region, of as many elements as any other."""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Round, SparseVector, Vector, Wire, phase
from lightning_sparsecomm.basis.arguments import check_whole_number
from lightning_sparsecomm.basis.layout import count_of, mean
from lightning_sparsecomm.codecs import Envelope, Float32, Float64, PayloadError, SparseCodec
from lightning_sparsecomm.codecs.payload import open_envelope, seal, sealed_bytes
from lightning_sparsecomm.codecs.stretch import STRETCH_BYTES, decode_stretch, encode_stretch
from lightning_sparsecomm.exchange.base import Exchange, Exchanged, dense_values
from lightning_sparsecomm.exchange.gather import count_clamped, handed_over, longest
from lightning_sparsecomm.exchange.regions import agreed_bounds, cut, joined, kept_of, shared_out
from lightning_sparsecomm.exchange.status import masked, read_envelopes
from lightning_sparsecomm.kernels import kernels_for

# Ranks share out the result where one keeps so many times the mean: as much of what they send to all is padding. With
# two ranks that costs less than sharing out.
_UNEVEN, _FEWEST_RANKS = 1.5, 3

# Regions are made anew where one has so many times the mean.
_STALE = 2

# From this density on, positions may take far less than their bound, up to nothing where all elements are sent.
_DENSE = 1 / 8


class _Regions(NamedTuple):
    """Where regions begin and end, `[W + 1]` int64 on the CPU, and for how many rounds they have been used."""

    bounds: Tensor
    rounds: int


class OkTopK(Exchange):
    """The k largest elements of the mean over ranks of what each has selected; the bytes hardly grow with ranks.

    The vector is cut into W regions in which ranks have selected as many elements. Each rank sends what it has selected
    in a region to the region's owner. Owners add it up, and agree how many of its largest elements each one keeps, so
    that k are left. Where one keeps far more than others, they share these out. Then each sends what it has to all.

    A rank has sent what it selected and what was kept in the end. All else stays in its residual, as does what a rank
    rounds off of a mean, W times, since one rank's residual enters the next mean divided by W: nothing is lost.

    Elements on the link: a rank sends the k that it has selected, less those of its own region, and a W-th of the
    result's k to each other rank; up to half as many again of the latter where regions keep unequally many. There are
    four collectives: lengths, the selection, 280 bytes of magnitudes, and an all-gather; and another one of lengths
    before that, where the codec of positions has no bound or much is sent.

    State, equal on all ranks: where regions begin, `[W + 1]` int64, and for how many rounds they have been used.

    Source: Li & Hoefler 2022, Near-Optimal Sparse Allreduce for Distributed Deep Learning (Ok-Topk), algorithm 1.
    There, two thresholds are estimated in every 32nd step, one for what a rank selects and one for the result. Here,
    both are new in each step: a residual changes too much meanwhile, and it costs no collective more.

    >>> OkTopK(SparseCodec(TopK(0.01)), balance_every=16).balance_every
    16

    Args:
        codec: Selects each rank's elements, and turns them into bytes. k is as many as it selects.
        balance_every: Rounds for which regions are kept; less where one gets twice as many elements as the mean.

    Raises:
        TypeError: `codec` is no `SparseCodec`.
        ValueError: `balance_every` is below 1.
    """

    sums_pieces: ClassVar[bool] = True

    def __init__(self, codec: SparseCodec, balance_every: int = 64) -> None:
        if not isinstance(codec, SparseCodec):
            raise TypeError(f"codec must be a SparseCodec; got {codec!r}. Use SparseCodec(TopK(0.01)), for example.")
        check_whole_number("balance_every", balance_every, 1, "rounds", "Use 64, as in the paper.")
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
            parts = [_opened(each.body, sender, own, first, last) for sender, each in enumerate(envelopes)]
            parts[rank] = brought[rank]
            region = _added_up([brought[rank]] * len(parts) if wire.mirrors else parts, begin, end)
        result, most = self._result(region, context, wire)
        with phase("encode"):
            message = seal(Envelope(self._encoded(result, context)), context.layout)
        length = self._length(message, most, context, wire)
        gathered = wire.all_gather(torch.nn.functional.pad(message, (0, length - len(message)))).cpu()
        with phase("decode"):
            opened = [open_envelope(message, context.layout, sender) for sender, message in enumerate(gathered)]
            means = [_opened(each.body, sender, own, 0, own.size) for sender, each in enumerate(opened)]
            shared = own if wire.mirrors else joined(means)
            for owner, body in enumerate(bodies):
                if owner != rank:
                    brought[owner] = _opened(body, rank, own, 0, own.size)
                    count_clamped(brought[owner], self.codec, wire)
            count_clamped(means[rank], self.codec, wire)
            sent = _sent(brought, shared, result, means[rank])
            self._elements = sum(map(count_of, brought)) - count_of(brought[rank]) + count_of(means[rank])
        whole, here = (masked(_lighter(each), anyone, context.layout) for each in (shared, sent))
        return Exchanged(whole, here, anyone)

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

    def _result(self, region: SparseVector, context: Round, wire: Wire) -> tuple[SparseVector, int]:
        """What this rank sends to all, of the largest elements of all regions; and how many a rank sends at most."""
        available, counts = kept_of(region, self.codec.selector.count(context), context, wire)
        if max(available) * wire.world_size > _STALE * (sum(available) + wire.world_size):
            self._next = None
        with phase("select"):
            kernels = kernels_for(region.values.device, region.values.dtype)
            kept = _at(region, kernels.largest(region.values, counts[wire.rank], context.shared_seed()))
        even = max(counts) * wire.world_size <= _UNEVEN * (sum(counts) + wire.world_size)
        if even or wire.world_size < _FEWEST_RANKS:
            return kept, max(counts)
        return self._evened(kept, counts, context, wire), -(-sum(counts) // wire.world_size)

    def _evened(self, kept: SparseVector, counts: list[int], context: Round, wire: Wire) -> SparseVector:
        """What this rank has, when ranks have shared out evenly what all have kept."""
        with phase("encode"):
            # In full width: values are rounded once only, before they go to all.
            codec = Float64() if context.dtype == torch.float64 else Float32()
            bodies = [encode_stretch(part, codec, self.codec.indices) for part in shared_out(kept, counts, wire.rank)]
            messages = [seal(Envelope(body), context.layout) for body in bodies]
        received = handed_over(messages, context, wire)
        with phase("decode"):
            opened = [open_envelope(message.cpu(), context.layout, sender) for sender, message in enumerate(received)]
            return joined([_opened(each.body, sender, kept, 0, kept.size) for sender, each in enumerate(opened)])

    def _length(self, message: Tensor, most: int, context: Round, wire: Wire) -> int:
        """The bytes to which messages with `most` elements or fewer are padded."""
        layout = context.layout
        index_bytes = self.codec.indices.bound_bytes(most, layout.size)
        value_bytes = self.codec.value_codec(context).bound_bytes(most, layout)
        dense = self.codec.selector.count(context) > _DENSE * layout.size
        if index_bytes is None or value_bytes is None or dense:
            return longest(message.numel(), context, wire, message.device)
        return sealed_bytes(STRETCH_BYTES + index_bytes + value_bytes, layout)

    def _encoded(self, part: SparseVector, context: Round) -> Tensor:
        return encode_stretch(part, self.codec.value_codec(context), self.codec.indices)


def _opened(body: Tensor, sender: int, like: SparseVector, begin: int, end: int) -> SparseVector:
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
    return _at(whole, whole.values.nonzero().view(-1))


def _lighter(vector: SparseVector) -> SparseVector | Tensor:
    """Dense where that takes less time to add."""
    return vector if count_of(vector) <= vector.size // 8 else vector.dense()


def _at(vector: SparseVector, chosen: Tensor) -> SparseVector:
    return SparseVector(vector.indices[chosen], vector.values[chosen], vector.size)


def _sent(
    brought: Sequence[SparseVector], shared: SparseVector, told: SparseVector, received: SparseVector
) -> SparseVector:
    """What this rank has sent of the result: what it brought at these positions, less what it rounded off of means.

    Args:
        brought: What it had for each owner, as that decodes it.
        shared: The result.
        told: The means that this rank has sent to all.
        received: The same, as all decode them.
    """
    mine = joined(brought)
    at = torch.searchsorted(shared.indices, mine.indices)
    found = torch.cat([shared.indices, shared.indices.new_tensor([-1])])[at] == mine.indices
    mine = _at(mine, found.nonzero().view(-1))
    lost = told.values - received.values
    if not bool(lost.any()):
        return mine
    kernels = kernels_for(lost.device, lost.dtype)
    indices = torch.cat([mine.indices, told.indices])
    return SparseVector(*kernels.add_up(indices, torch.cat([mine.values, lost * -len(brought)])), mine.size)
