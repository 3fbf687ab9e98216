"""What dgc and sketched_sgd share: momentum before the exchange, and clipping of each rank's own gradient."""

from collections.abc import Sequence

from lightning_sparsecomm.basis.arguments import renamed
from lightning_sparsecomm.channel import Channel, ClipLocalNorm, ErrorFeedback, Memory, Momentum, MomentumCorrection
from lightning_sparsecomm.exchange import DenseAllReduce, Exchange
from lightning_sparsecomm.sharing import GradientSync, Sync


def corrected(
    exchange: Exchange, clip: float | None, correction: bool, masking: bool, exclude: Sequence[str]
) -> list[Sync]:
    """Sends weights through `exchange`, after momentum and residual; sends all else whole, before momentum."""
    with renamed(max_norm="clip"):
        before: list[Memory] = [ClipLocalNorm(clip)]
        after: list[Memory] = [ClipLocalNorm(clip)]
    if correction:
        before.append(MomentumCorrection(masking))
        after.append(Momentum())
    return [
        GradientSync(
            Channel(exchange, [*before, ErrorFeedback()]),
            exclude=exclude,
            min_dimensions=2,
            mask_momentum=masking and not correction,
        ),
        GradientSync(Channel(DenseAllReduce(), after), rest=True),
    ]
