"""Ranks send how their gradients have changed."""

from collections.abc import Sequence

from lightning_sparsecomm.basis.arguments import check_booleans, renamed
from lightning_sparsecomm.basis.schedules import Density, warmed
from lightning_sparsecomm.channel import EF21, Channel, ClipLocalNorm, LocalAdam, Memory, Momentum, MomentumCorrection
from lightning_sparsecomm.exchange import Exchange
from lightning_sparsecomm.methods.dropping import PositionName, ScopeName, ValueName, sparse
from lightning_sparsecomm.methods.weights import rest
from lightning_sparsecomm.sharing import GradientSync, Method


class ef21(Method):
    """Each rank sends the largest changes of its gradient; all step by the mean estimate of the ranks' gradients.

    A rank keeps an estimate of its own gradient, and sends the largest elements of the gradient minus the estimate. The
    optimizer is given the mean estimate, a whole vector. So a gradient that changes slowly costs little, however large
    it is, and ranks whose data differ cost no more than others.

    By default the momentum of torch.optim.SGD comes before the estimate, and is switched off in the optimizer: without,
    the noise of batches is most of what is sent (docs/methods/few_elements.md has figures). With Adam and AdamW, each
    rank keeps its own moments, as in `local_adam`, and estimates are of the direction that they give. Other optimizers
    apply their own momentum to the mean estimate. With `momentum_correction=False`, which is the EF21 of 2021, all do.
    Biases and norms are sent whole.

    Bytes per step and rank: 6 for each element sent (2 of position, 4 of value; 4 with float16), 4 for each element of
    biases and norms, and 32 of headers.

    Source: Richtárik et al. 2021, EF21, algorithm 2; with momentum Fatkhullin et al. 2023, Momentum Provably Improves
    Error Feedback. For Adam it is ours.

    >>> ef21(density=0.05)
    ef21(density=0.05)
    >>> ef21(0.05).fallback.syncs[0].channel.memories
    (ClipLocalNorm(max_norm=None), LocalAdam(), EF21())

    Args:
        density: Fraction of weights' elements sent, in (0, 1], or a schedule of it, which has no further warm-up.
        warmup_steps: Optimizer steps in which the density falls in 4 stages, to density^((stage+1)/5); none by default.
        clip: Largest norm of the averaged gradient; each rank's own is clipped for it. None uses the Trainer's
            gradient_clip_val, if there is one.
        momentum_correction: Whether momentum, or Adam's moments, come before the estimate. Otherwise the optimizer,
            which may then be any, applies its own to the mean estimate.
        scope: What is ranked together: the elements of each "tensor", of the whole "model", or of each tensor with
            small ones sent more densely ("balanced"), or those that have more to send in each step, by their "norm" or
            their "entropy" (`LayerwiseTopK`).
        values: As for `dgc`. What is rounded off is sent later, as part of the next change.
        positions: How positions are coded: "fast" takes 2 bytes for each element sent; "short" is the shortest of five
            codes.
        exclude: Patterns of more parameter names whose gradients are sent whole, such as "head.*".

    Raises:
        ValueError: A density outside (0, 1], a clip that is not positive, or an unknown scope, dtype or code.
        TypeError: `momentum_correction` is neither True nor False.
    """

    def __init__(
        self,
        density: Density = 0.01,
        warmup_steps: int | None = None,
        clip: float | None = None,
        momentum_correction: bool = True,
        scope: ScopeName = "tensor",
        values: ValueName = "float32",
        exclude: Sequence[str] = (),
        positions: PositionName = "fast",
    ) -> None:
        check_booleans(momentum_correction=momentum_correction)
        how = sparse(warmed(density, warmup_steps, None), scope, values, positions)
        others = _estimating(how, exclude, clip)
        if not momentum_correction:
            super().__init__(others)
            return
        adam = _estimating(how, exclude, clip, LocalAdam())
        self._otherwise = Method(adam, fallback=Method(others))
        super().__init__(_estimating(how, exclude, clip, MomentumCorrection(), Momentum()), fallback=self._otherwise)

    def __repr__(self) -> str:
        """The call that made it; what it does for Adam and others follows from that."""
        own = self.call is not None and self.fallback is getattr(self, "_otherwise", None)
        return str(self.call) if own else super().__repr__()


def _estimating(
    exchange: Exchange, exclude: Sequence[str], clip: float | None, before: Memory | None = None, *whole: Memory
) -> list[GradientSync]:
    """Estimates of what `before` makes of clipped gradients; all else whole, through the memories `whole`."""
    with renamed(max_norm="clip"):
        clipping = ClipLocalNorm(clip)
    weights = Channel(exchange, [clipping, *([before] if before is not None else []), EF21()])
    return [GradientSync(weights, exclude=exclude, min_dimensions=2), rest(32, [clipping, *whole], [])]
