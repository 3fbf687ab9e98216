"""Momentum that a method applies instead of torch.optim.SGD, with the optimizer's settings of each step."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_sparsecomm.basis import Layout, Round, SparseVector
from lightning_sparsecomm.basis.arguments import check_booleans
from lightning_sparsecomm.channel.contribution import Contribution, MomentumRule, Step
from lightning_sparsecomm.channel.memory import Memory
from lightning_sparsecomm.exchange import Exchanged

_VELOCITY = "velocity"


class Velocity(Memory):
    """A velocity for each parameter; what the momentum of torch.optim.SGD is before or after an exchange."""

    def __init__(self) -> None:
        super().__init__(_VELOCITY)
        self._begun: set[str] = set()
        self._beginning: set[str] = set()
        self._names: list[str] = []

    def objection(self, optimizer: Optimizer) -> str | None:
        if isinstance(optimizer, SGD):
            return None
        return (
            "momentum correction takes over momentum, dampening and Nesterov's method from torch.optim.SGD;"
            f" {type(optimizer).__name__} keeps averages of its own, which it cannot correct. Use"
            " methods.gradient_dropping(), which works with any optimizer, or momentum_correction=False in dgc,"
            " sketched_sgd or signsgd."
        )

    def bind(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        super().bind(layout, dtype, device)
        self._names = [segment.name for segment in layout.segments]

    def steps(self, present: Sequence[bool], rules: Sequence[MomentumRule]) -> list[Step | None]:
        """What momentum does to each segment in this step; None where it has no momentum or no gradient.

        As in torch, a velocity begins as the gradient itself, without dampening. It has begun once `begin` is called.
        """
        steps: list[Step | None] = []
        self._beginning = set()
        for name, here, velocity, rule in zip(self._names, present, self.held[_VELOCITY].parts, rules, strict=True):
            if not here or rule.momentum == 0:
                steps.append(None)
                continue
            begun = rule.begun or name in self._begun
            self._beginning.add(name)
            factors = (rule.momentum, 1 - rule.dampening) if begun else (0.0, 1.0)
            steps.append(Step(velocity, *factors, rule.momentum if rule.nesterov else None))
        return steps

    def begin(self, present: Sequence[bool]) -> None:
        """Marks the velocities of the last `steps` as begun, of segments for which any rank had a gradient."""
        self._begun |= self._beginning & {name for name, here in zip(self._names, present) if here}

    def state_dict(self) -> Mapping[str, Mapping[str, Tensor]]:
        velocity = self.held[_VELOCITY].state_dict()
        return {_VELOCITY: {name: part for name, part in velocity.items() if name in self._begun}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        super().load_state_dict(state)
        self._begun |= state.get(_VELOCITY, {}).keys()


class MomentumCorrection(Velocity):
    """Momentum before the exchange: u ← m·u + g, and the residual takes in u.

    So momentum of what waited in the residual is discounted as if it had been sent at once. It must come before
    `ErrorFeedback`. At density 1 and without masking it is torch's SGD. Where another rank has a gradient, one that
    this rank lacks counts as zero.

    Source: Deep Gradient Compression, sections 3.2 (momentum correction) and 3.3 (momentum factor masking), appendix B
    (Nesterov, here in a form that equals torch's even when momentum changes from step to step).

    >>> MomentumCorrection(mask=True)
    MomentumCorrection(mask=True)

    Args:
        mask: Whether momentum is set to zero wherever something was sent, as in the paper; what it throws away is lost.
    """

    carries = True

    def __init__(self, mask: bool = False) -> None:
        super().__init__()
        check_booleans(mask=mask)
        self.mask = mask

    def prepare(self, contribution: Contribution, context: Round) -> Contribution:
        return replace(contribution, steps=self.steps(contribution.present, contribution.settings.momentum))

    def commit(self, exchanged: Exchanged, context: Round) -> Exchanged:
        self.begin(exchanged.present)
        if self.mask and self._begun:
            self.held[_VELOCITY].zero_where_(exchanged.sent)
        return exchanged


class Momentum(Velocity):
    """Momentum after the exchange: u ← m·u + shared, equal on all ranks, as torch's SGD would do.

    For parameters that a method sends whole while it corrects the momentum of others: all then see one rule.

    >>> Momentum()
    Momentum()
    """

    in_common = True

    def __init__(self) -> None:
        super().__init__()
        self._rules: Sequence[MomentumRule] = ()

    def prepare(self, contribution: Contribution, context: Round) -> Contribution:
        self._rules = contribution.settings.momentum
        return contribution

    def commit(self, exchanged: Exchanged, context: Round) -> Exchanged:
        shared = exchanged.shared
        x = shared.dense() if isinstance(shared, SparseVector) else shared
        moved = torch.zeros_like(x)
        gradients = [view if here else None for view, here in zip(context.layout.views(x), exchanged.present)]
        steps = self.steps(exchanged.present, self._rules)
        Contribution(gradients, steps=steps).added_to_(moved, context.layout)
        self.begin(exchanged.present)
        return exchanged._replace(shared=moved)
