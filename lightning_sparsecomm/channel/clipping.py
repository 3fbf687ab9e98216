"""Clipping of each rank's own gradient, before anything is added to it."""

import math
from dataclasses import replace

from lightning_sparsecomm.basis.arguments import is_number
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.channel.contribution import Contribution
from lightning_sparsecomm.channel.memory import Memory


class ClipLocalNorm(Memory):
    """Scales each rank's own gradient down to a norm of τ·√W.

    The norm is that of the rank's whole gradient: of all the optimizer's parameters, in any sync. τ is the threshold
    that a user would give for the averaged gradient. The paper's τ/√W is for a gradient that already carries 1/W; DDP's
    local gradients do not.

    Source: Deep Gradient Compression, section 3.2.

    >>> ClipLocalNorm(max_norm=1.0)
    ClipLocalNorm(max_norm=1.0)

    Args:
        max_norm: τ; None takes the threshold of the Trainer's `gradient_clip_val`, or of a clipping call.

    Raises:
        ValueError: `max_norm` is not positive.
    """

    def __init__(self, max_norm: float | None = None) -> None:
        super().__init__()
        if max_norm is not None and not (is_number(max_norm) and 0 < max_norm < math.inf):
            raise ValueError(
                f"max_norm must be a positive number: the largest norm of the averaged gradient; got {max_norm!r}."
                " Use None for the Trainer's gradient_clip_val, or for no clipping without one."
            )
        self.max_norm = max_norm

    def prepare(self, contribution: Contribution, context: Round) -> Contribution:
        norm = contribution.settings.gradient_norm
        max_norm = contribution.settings.max_norm if self.max_norm is None else self.max_norm
        if max_norm is None:
            return contribution
        limit = max_norm * math.sqrt(context.world_size)
        # A norm that is not finite is left alone: the exchange is about to report it.
        if not limit < norm < math.inf:
            return contribution
        return replace(contribution, scale=contribution.scale * limit / norm)
