"""What dgc and sketched_sgd share: momentum before the exchange, and clipping of each rank's own gradient."""

from collections.abc import Sequence

from lightning_sparsecomm.basis.arguments import check_booleans, renamed
from lightning_sparsecomm.basis.schedules import Every
from lightning_sparsecomm.channel import Channel, ClipLocalNorm, ErrorFeedback, Momentum, MomentumCorrection
from lightning_sparsecomm.exchange import Exchange
from lightning_sparsecomm.methods.weights import RestBits, rest, with_rows
from lightning_sparsecomm.sharing import GradientSync

Steps = tuple[int, Every, bool]
"""`delay`, `every` and `residual_in_weights` of `GradientSync`."""

EACH_STEP: Steps = (0, 1, False)
"""Each step exchanges, and waits for that; nothing unsent is in the weights."""


def clipping_at(clip: float | None) -> ClipLocalNorm:
    """Clips each rank's own gradient; raises `ValueError` for a `clip` that is not positive."""
    with renamed(max_norm="clip"):
        return ClipLocalNorm(clip)


def corrected(
    exchange: Exchange,
    clip: float | None,
    correction: bool,
    masking: bool,
    exclude: Sequence[str],
    follow_rate: bool,
    rest_bits: RestBits = 32,
    steps: Steps = EACH_STEP,
    few_rows: bool = False,
) -> list[GradientSync]:
    """Sends weights through `exchange`, after momentum and residual; sends all else whole, before momentum."""
    check_booleans(momentum_correction=correction, follow_rate=follow_rate)
    clipping = clipping_at(clip)
    before = [MomentumCorrection(masking)] if correction else []
    # Of what is sent whole, nothing is masked.
    unmasked = [MomentumCorrection(False)] if correction else []
    after = [Momentum()] if correction else []
    feedback = ErrorFeedback(follow_rate=follow_rate)
    masks_own = masking and not correction
    weights = Channel(exchange, [clipping, *before, feedback])
    rounded = [clipping, *unmasked, feedback]
    syncs = [
        GradientSync(weights, exclude=exclude, min_dimensions=2, mask_momentum=masks_own),
        # For steps of a rank's own, momentum must be before the exchange.
        rest(rest_bits, [clipping, *after] if steps == EACH_STEP else rounded, rounded),
    ]
    syncs = [sync.at(*steps) for sync in syncs]
    return with_rows(syncs, few_rows, exclude, [clipping, *after])
