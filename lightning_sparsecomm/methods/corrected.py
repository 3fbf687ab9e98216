"""What dgc and sketched_sgd share: momentum before the exchange, and clipping of each rank's own gradient."""

from collections.abc import Sequence

from lightning_sparsecomm.basis.arguments import renamed
from lightning_sparsecomm.channel import Channel, ClipLocalNorm, ErrorFeedback, Momentum, MomentumCorrection
from lightning_sparsecomm.exchange import Exchange
from lightning_sparsecomm.methods.weights import RestBits, rest
from lightning_sparsecomm.sharing import GradientSync, Sync


def corrected(
    exchange: Exchange,
    clip: float | None,
    correction: bool,
    masking: bool,
    exclude: Sequence[str],
    follow_rate: bool,
    rest_bits: RestBits = 32,
) -> list[Sync]:
    """Sends weights through `exchange`, after momentum and residual; sends all else whole, before momentum."""
    with renamed(max_norm="clip"):
        clipping = ClipLocalNorm(clip)
    before = [MomentumCorrection(masking)] if correction else []
    # Of what is sent whole, nothing is masked.
    unmasked = [MomentumCorrection(False)] if correction else []
    after = [Momentum()] if correction else []
    feedback = ErrorFeedback(follow_rate=follow_rate)
    masks_own = masking and not correction
    return [
        GradientSync(
            Channel(exchange, [clipping, *before, feedback]),
            exclude=exclude,
            min_dimensions=2,
            mask_momentum=masks_own,
        ),
        rest(rest_bits, [clipping, *after], [clipping, *unmasked, feedback]),
    ]
