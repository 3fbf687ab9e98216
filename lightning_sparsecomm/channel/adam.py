"""Adam before the exchange: each rank keeps the moments of its own gradient, and sends the direction they give."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.channel.adam_moments import FIRST, SECOND, AdamMoments, moments_at
from lightning_sparsecomm.channel.coherence import SAMPLED, Coherence
from lightning_sparsecomm.channel.contribution import AdamRule, Contribution
from lightning_sparsecomm.exchange.base import Exchanged
from lightning_sparsecomm.kernels import Moments

_COHERENCE = "coherence"


class LocalAdam(AdamMoments):
    """Replaces a rank's gradient g by Adam's direction x, which is in units of the learning rate.

        g ← g + λ·w                                     only with Adam's L2 decay; AdamW's decay is not sent
        m ← β1·m + (1 − β1)·g;   v ← β2·v + (1 − β2)·c·g²;   m̂ ← m / (1 − β1^t);   v̂ ← v / (1 − β2^t)
        x ← m̂ / (√v̂ + ε)

    Bytes beside the exchange's: 36 to 132 for each tensor, in an all-reduce.

    The direction has the same scale however sparsely it is sent, which a second moment of sparse gradients has not. It
    must come before `ErrorFeedback`. On one rank and at density 1 it is torch's Adam or AdamW to round-off.

    Under ddp, Adam's second moment is that of the mean gradient, whose noise is averaged over ranks. No rank knows it,
    and a rank's own squares are larger. c, the `Coherence`, is the ratio of the two, by tensor: ranks measure it in
    each of the first 300 steps, and then in one of eight, from 8 to 32 elements of each tensor, for the next ones. It
    is 1 in the first step.

    Of a replica whose gradients have a weight in the mean, m takes in weighted ones, as m of the mean does; v takes in
    its own squares without the weight, which would cancel in x otherwise.

    A gradient that this rank lacks counts as zero where another rank has one. Moments go on from those that the
    optimizer already has, for example from a checkpoint of ddp.

    Source: Tang et al. 2021, 1-bit Adam, sends what local moments say; there v is that of the mean gradient, and frozen
    after a warm-up. The correction of v for W ranks is ours.

    >>> LocalAdam()
    LocalAdam()
    """

    def __init__(self) -> None:
        super().__init__()
        self._coherence = Coherence()
        self._sample: Tensor | None = None
        # The gradients' weight in the mean. At 0 nothing is left of them.
        self._weight = 1.0
        self._total: Tensor | None = None
        # Which elements of the total ranks sum.
        self._summed: Tensor | None = None
        # Where gradients are, and the dtype of moments.
        self._like = torch.zeros(0)

    def bind(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        super().bind(layout, dtype, device)
        self._like = torch.zeros(0, dtype=dtype, device=device)

    def prepare(self, contribution: Contribution, context: Round) -> Contribution:
        rules, sign = self._rules(contribution)
        self._next = {}
        scale = contribution.scale * sign
        self._weight = contribution.settings.weight or 1.0
        self._sample = self._sampled(contribution.parts, rules, scale, context) if self._sums(context) else None
        steps: list[Moments | None] = []
        views = zip(contribution.parts, self._flats(FIRST, context), self._flats(SECOND, context))
        for name, rule, (part, first, second) in zip(self._names, rules, views, strict=True):
            if part is None:
                steps.append(None)
                continue
            step = self._next[name] = self._begin(name, rule, first, second) + 1
            coherence = self._coherence.of(name, context.world_size) / self._weight**2
            steps.append(moments_at(step, rule, first, second, coherence))
        return replace(contribution, scale=scale, steps=steps)

    def ahead(self, name: str, world_size: int) -> float:
        """What part of its own directions a rank trains ahead by where it makes local steps, see `Coherence.ahead`."""
        return self._coherence.ahead(name, world_size)

    def _sums(self, context: Round) -> bool:
        return context.world_size > 1 and self._coherence.is_due(context.step)

    def aside(self, context: Round) -> Tensor | None:
        if not self._sums(context):
            return None
        summed = self._summed = self._coherence.summed(context.layout, self._like.device)
        if self._sample is None:
            return self._like.new_zeros(int(summed.sum()))
        sample = self._sample * summed[:, :SAMPLED]
        return torch.cat([sample, (sample / self._weight).square().sum(1, keepdim=True)], 1)[summed]

    def take_aside(self, total: Tensor) -> None:
        assert self._summed is not None
        self._total = total.new_zeros(self._summed.shape).masked_scatter_(self._summed, total)

    def _sampled(
        self, parts: Sequence[Tensor | None], rules: Sequence[AdamRule], scale: float, context: Round
    ) -> Tensor:
        """Some elements of each gradient as it enters the moments: `[segments, 32]`; zeros where there is none."""
        positions = self._coherence.positions(context.layout, context.step, self._like.device)
        rows = []
        for part, rule, at in zip(parts, rules, positions):
            if part is None or not part.numel():
                rows.append(self._like.new_zeros(SAMPLED))
                continue
            row = part.take(at).to(self._like.dtype) * scale
            if rule.weights is not None and rule.decay:
                row += rule.weights.detach().take(at).to(row.dtype) * rule.decay
            rows.append(row)
        return torch.stack(rows) if rows else self._like.new_zeros(0, SAMPLED)

    def commit(self, exchanged: Exchanged, context: Round) -> Exchanged:
        self._count(exchanged.present)
        if self._total is not None:
            self._coherence.take(self._names, exchanged.present, self._total, context.world_size, context.step)
        self._sample, self._total = None, None
        return exchanged

    def abort(self, contribution: Contribution, context: Round) -> None:
        self._next, self._sample, self._total = {}, None, None

    def state_dict(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {**super().state_dict(), _COHERENCE: self._coherence.state_dict()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        super().load_state_dict(state)
        self._coherence.load_state_dict(state.get(_COHERENCE, {}))
