"""The largest elements of the sum over ranks: each rank adds up a region, of as many elements as any other."""

from collections.abc import Sequence

import torch

from lightning_sparsecomm.basis import Round, SparseVector, Wire, phase
from lightning_sparsecomm.codecs import IndexCoding, ValueCodec
from lightning_sparsecomm.codecs.payload import sealed_bytes
from lightning_sparsecomm.codecs.stretch import STRETCH_BYTES
from lightning_sparsecomm.exchange.gather import count_clamped
from lightning_sparsecomm.exchange.region_sum import RegionSum, at
from lightning_sparsecomm.exchange.regions import joined, kept_of
from lightning_sparsecomm.kernels import kernels_for

# From this density on, positions may take far less than their bound, up to nothing where all elements are sent.
_DENSE = 1 / 8


class OkTopK(RegionSum):
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

    sums_pieces = True

    def own_part(self, part: SparseVector, context: Round) -> SparseVector:
        # It stays here, and is rounded as a mean only.
        return part

    def result(self, region: SparseVector, context: Round, wire: Wire) -> tuple[SparseVector, int]:
        """What this rank sends to all, of the largest elements of all regions; and how many a rank sends at most."""
        available, counts = kept_of(region, self.codec.selector.count(context), context, wire)
        self.look(available, wire)
        with phase("select"):
            kernels = kernels_for(region.values.device, region.values.dtype)
            kept = at(region, kernels.largest(region.values, counts[wire.rank], context.shared_seed()))
        return self.evened(kept, counts, context, wire)

    def result_values(self, context: Round) -> ValueCodec:
        return self.codec.value_codec(context)

    def result_indices(self, result: SparseVector) -> IndexCoding:
        return self.codec.indices

    def length(self, message: torch.Tensor, most: int, context: Round, wire: Wire) -> int:
        layout = context.layout
        index_bytes = self.codec.indices.bound_bytes(most, layout.size)
        value_bytes = self.codec.value_codec(context).bound_bytes(most, layout)
        dense = self.codec.selector.count(context) > _DENSE * layout.size
        if index_bytes is None or value_bytes is None or dense:
            return super().length(message, most, context, wire)
        return sealed_bytes(STRETCH_BYTES + index_bytes + value_bytes, layout)

    def sent(
        self,
        brought: Sequence[SparseVector],
        shared: SparseVector,
        told: SparseVector,
        received: SparseVector,
        wire: Wire,
    ) -> SparseVector:
        """What this rank has sent: what it brought at the result's positions, less what it rounded off of means."""
        count_clamped(received, self.codec, wire)
        mine = joined(brought)
        found_at = torch.searchsorted(shared.indices, mine.indices)
        found = torch.cat([shared.indices, shared.indices.new_tensor([-1])])[found_at] == mine.indices
        mine = at(mine, found.nonzero().view(-1))
        lost = told.values - received.values
        if not bool(lost.any()):
            return mine
        kernels = kernels_for(lost.device, lost.dtype)
        indices = torch.cat([mine.indices, told.indices])
        return SparseVector(*kernels.add_up(indices, torch.cat([mine.values, lost * -len(brought)])), mine.size)
