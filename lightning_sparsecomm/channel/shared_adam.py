"""Adam whose first moment ranks share: they send gradients at first, then first moments, with the second frozen."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lightning_sparsecomm.basis.arguments import is_number
from lightning_sparsecomm.basis.layout import Layout, SparseVector
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.schedules import Every, PartOfRun, check_every
from lightning_sparsecomm.channel.adam_moments import FIRST, SECOND, AdamMoments, moments_at, weights_for
from lightning_sparsecomm.channel.contribution import AdamRule, Contribution, Step
from lightning_sparsecomm.exchange.base import Exchanged
from lightning_sparsecomm.kernels import Update, kernels_for
from lightning_sparsecomm.kernels.updates.moments import root

_FROZEN = "frozen"


class SharedAdam(AdamMoments):
    """Sends gradients in the first steps, as Adam with ddp; then each rank's first moment, and freezes the second.

        first steps   send g;   m ← β1·m + (1 − β1)·(shared + λ·w);   v ← β2·v + (1 − β2)·(shared + λ·w)²
        later         send β1·m + (1 − β1)·g;   m ← shared + (1 − β1)·λ·w
                      s ← √v̂, with v̂ as it is after the first steps, but no less than `floor` times its root mean
                      square in the tensor, and that itself where v̂ is 0
        in both       the optimizer is given x ← m̂ / (s + ε), in units of the learning rate

    λ is Adam's L2 decay, which is not sent, as it is the same on all ranks; m̂ and v̂ are without bias, as in torch. Use
    it with an exchange that changes in the same step (`Staged`), and with `ErrorFeedback(follow_rate=False)` after it:
    what waits is part of a moment. State is equal on all ranks.

    The paper has no floor. A sign with one scale for a tensor moves all of m by as much. Elements whose gradients are
    far below the others' then take steps of m̂ / √v̂ without bound, and trainings that the paper's form ended in NaN
    went as with Adam with a floor of 0.01.

    A parameter whose first gradient comes after the first steps has no second moment to freeze: it keeps one of
    (m − β1·m of the step before) / (1 − β1), the gradient as it is shared.

    Source: Tang et al. 2021, 1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed,
    algorithm 1.

    >>> SharedAdam(steps=1000)
    SharedAdam(steps=1000, floor=0.01)

    Args:
        steps: Optimizer steps in which gradients are sent, or a schedule of that number; 15% of the run by default.
        floor: The least s, relative to the tensor's root mean square; 0 for none, as in the paper.

    Raises:
        ValueError: `steps` is below 1, or `floor` is outside [0, 1].
    """

    def __init__(self, steps: Every = PartOfRun(0.15), floor: float = 0.01) -> None:  # noqa: B008
        super().__init__()
        check_every("steps", steps)
        if not (is_number(floor) and 0 <= floor <= 1):
            raise ValueError(
                "floor must be in [0, 1]: the least root of a second moment relative to its tensor's; got"
                f" {floor!r}. Use 0.01."
            )
        self.steps = steps
        self.floor = floor
        # By name, whether the second moment is frozen, once moments are sent.
        self._frozen: dict[str, bool] = {}
        self._rules_now: Sequence[AdamRule] = ()
        # By name, s of what is frozen; it follows from v.
        self._scales: dict[str, Tensor] = {}
        # What m was before this round, of parameters whose second moment goes on.
        self._before: dict[str, Tensor] = {}

    def sends_moments(self, context: Round) -> bool:
        """Whether the first steps are over."""
        return context.step >= context.steps(self.steps)

    def bind(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        super().bind(layout, dtype, device)
        self._scales = {}

    def prepare(self, contribution: Contribution, context: Round) -> Contribution:
        self._rules_now, sign = self._rules(contribution)
        self._next, self._before = {}, {}
        sends_moments = self.sends_moments(context)
        steps: list[Step | None] = []
        views = zip(contribution.parts, self._flats(FIRST, context), self._flats(SECOND, context))
        for name, rule, (part, first, second) in zip(self._names, self._rules_now, views, strict=True):
            if part is None:
                steps.append(None)
                continue
            made = self._begin(name, rule, first, second)
            self._next[name] = made + 1
            if sends_moments and self._is_late(name, made):
                self._before[name] = first.clone()
            steps.append(Step(first, rule.beta1, 1 - rule.beta1, None))
        scaled = replace(contribution, scale=contribution.scale * sign)
        return replace(scaled, steps=steps) if sends_moments else scaled

    def commit(self, exchanged: Exchanged, context: Round) -> Exchanged:
        shared = exchanged.shared.dense() if isinstance(exchanged.shared, SparseVector) else exchanged.shared
        moved = torch.zeros_like(shared)
        held = zip(self._flats(FIRST, context), self._flats(SECOND, context))
        vectors = zip(context.layout.flats(shared), context.layout.flats(moved), held)
        sends_moments, updates = self.sends_moments(context), []
        for name, rule, here, (part, into, (first, second)) in zip(
            self._names, self._rules_now, exchanged.present, vectors, strict=True
        ):
            if here and sends_moments:
                self._by_moments(name, rule, part, into, first, second)
            elif here:
                updates.append(self._by_gradients(name, rule, part, into, first, second))
        kernels_for(moved.device, moved.dtype).update_all_(updates)
        self._count(exchanged.present)
        self._before = {}
        return exchanged._replace(shared=moved)

    def abort(self, contribution: Contribution, context: Round) -> None:
        # To the bit: it is shared, and was taken from each rank's own.
        held = self.held[FIRST].state_dict()
        for name, before in self._before.items():
            held[name].view(-1).copy_(before)
        self._next, self._before = {}, {}

    def state_dict(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {**super().state_dict(), _FROZEN: {name: torch.tensor(float(on)) for name, on in self._frozen.items()}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        super().load_state_dict(state)
        self._frozen |= {name: float(on) > 0.5 for name, on in state.get(_FROZEN, {}).items()}
        self._scales = {}

    def _is_late(self, name: str, made: int) -> bool:
        """Whether a parameter's second moment goes on after the first steps, of which it has had none."""
        return not self._frozen.get(name, made > 0)

    def _by_gradients(
        self, name: str, rule: AdamRule, mean: Tensor, into: Tensor, first: Tensor, second: Tensor
    ) -> Update:
        """Adam's step, given the mean gradient."""
        step = self._next[name]
        if self._frozen.pop(name, False):
            # The first steps have become more, in a run that was resumed.
            second.mul_(1 - rule.beta2 ** (step - 1))
            self._scales.pop(name, None)
        return Update(into, mean.contiguous(), moments=moments_at(step, rule, first, second))

    def _by_moments(self, name: str, rule: AdamRule, mean: Tensor, into: Tensor, first: Tensor, second: Tensor) -> None:
        """Takes over the mean of the ranks' first moments; x follows from it."""
        step = self._next[name]
        first.copy_(mean)
        weights = weights_for(rule, first)
        if weights is not None:
            first.add_(weights * (rule.decay * (1 - rule.beta1)))
        torch.mul(first, 1 / (1 - rule.beta1**step), out=into)
        late = self._is_late(name, step - 1)
        if name not in self._frozen:
            self._frozen[name] = not late
            if not late:
                # Without bias from now on: no later step changes it.
                second.div_(1 - rule.beta2 ** (step - 1))
        if late:
            gradient = self._before[name].mul_(-rule.beta1).add_(first).div_(1 - rule.beta1)
            second.mul_(rule.beta2).add_(gradient.square_().mul_(1 - rule.beta2))
            into.div_(root(second / (1 - rule.beta2**step)).add_(rule.epsilon))
            return
        if name not in self._scales:
            self._scales[name] = _scale(second, self.floor)
        into.div_(self._scales[name] + rule.epsilon)


def _scale(second: Tensor, floor: float) -> Tensor:
    """√v, but no less than `floor` times its root mean square; that itself where v is 0, unless `floor` is."""
    scale = root(second.clone())
    if floor and scale.numel():
        # Not in torch, whose order of addition depends on the number of threads.
        squares = second.cpu().numpy() if second.device.type == "cpu" else second.double().mean().view(1).cpu().numpy()
        typical = math.sqrt(float(np.mean(squares, dtype=np.float64)))
        scale.clamp_(min=floor * typical)
        scale[second == 0] = typical
    return scale
