"""What a memory that takes the place of Adam's own moments has to know: whom it suits, its steps, and what it saves."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.channel.contribution import AdamRule, Contribution
from lightning_sparsecomm.channel.memory import Memory
from lightning_sparsecomm.kernels import Moments

FIRST, SECOND = "exp_avg", "exp_avg_sq"
_STEP = "step"


class AdamMoments(Memory):
    """Keeps both moments of Adam, and counts steps, in place of torch.optim.Adam or AdamW.

    What the optimizer is given is a direction in units of the learning rate. A gradient that this rank lacks counts as
    zero where another rank has one. Moments go on from those that the optimizer already has, for example from a
    checkpoint of ddp.

    `LocalAdam` and `SharedAdam` derive from it.

    >>> issubclass(LocalAdam, AdamMoments)
    True
    """

    carries = True
    in_common = True

    def __init__(self) -> None:
        super().__init__(FIRST, SECOND)
        self._names: list[str] = []
        self._steps: dict[str, int] = {}
        self._next: dict[str, int] = {}

    def objection(self, optimizer: Optimizer) -> str | None:
        remedy = "Use methods.gradient_dropping(), which works with any optimizer"
        if not isinstance(optimizer, (Adam, AdamW)):
            return (
                "local moments replace those of torch.optim.Adam and AdamW;"
                f" {type(optimizer).__name__} has other rules, which they do not follow. {remedy}, or methods.dgc()"
                " with SGD."
            )
        for group in optimizer.param_groups:
            for option in ("amsgrad", "differentiable"):
                if group.get(option):
                    return (
                        f"{option} must be False with local moments, which are kept without it; got {option}=True."
                        f" {remedy}, or leave out {option}."
                    )
        return None

    def bind(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        super().bind(layout, dtype, device)
        self._names = [segment.name for segment in layout.segments]

    def moments(self) -> dict[str, tuple[int, Tensor, Tensor]]:
        """By parameter name: the steps taken, and both moments in the parameter's shape, as views of what is held."""
        first, second = (self.held[name].state_dict() for name in (FIRST, SECOND))
        return {name: (steps, first[name], second[name]) for name, steps in self._steps.items()}

    def state_dict(self) -> Mapping[str, Mapping[str, Tensor]]:
        steps = {name: torch.tensor(float(t)) for name, t in self._steps.items()}
        return {**super().state_dict(), _STEP: steps}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        super().load_state_dict(state)
        # A mean over ranks, of which some had no gradient of it, need not be whole.
        self._steps |= {name: round(float(step)) for name, step in state.get(_STEP, {}).items()}

    def _rules(self, contribution: Contribution) -> tuple[Sequence[AdamRule], float]:
        """The rule of each segment, and the sign of all gradients.

        Raises:
            ValueError: Some groups of the optimizer maximize, and others do not.
        """
        rules = contribution.settings.adam or [AdamRule()] * len(self._names)
        if len({rule.sign for rule in rules}) > 1:
            # One factor scales all gradients.
            raise ValueError(
                "maximize must be the same in all parameter groups; got True and False. Use two optimizers, or negate"
                " the loss."
            )
        return rules, rules[0].sign if rules else 1.0

    def _flats(self, name: str, context: Round) -> Sequence[Tensor]:
        return context.layout.flats(self.held[name].flat)

    def _begin(self, name: str, rule: AdamRule, first: Tensor, second: Tensor) -> int:
        """The steps taken so far. Before the first one, moments are taken over from the optimizer, if it has any."""
        if name in self._steps or _STEP not in rule.begun:
            return self._steps.get(name, 0)
        first.copy_(rule.begun[FIRST].reshape(-1))
        second.copy_(rule.begun[SECOND].reshape(-1))
        return round(float(rule.begun[_STEP]))

    def _count(self, present: Sequence[bool]) -> None:
        """The steps begun in this round count, for segments of which any rank had a gradient."""
        here = {name for name, any_rank in zip(self._names, present) if any_rank}
        self._steps |= {name: step for name, step in self._next.items() if name in here}
        self._next = {}


def moments_at(step: int, rule: AdamRule, first: Tensor, second: Tensor, coherence: float = 1.0) -> Moments:
    """Adam's moments `[n]` of a tensor, as its step takes them, counted from 1."""
    return Moments(
        first,
        second,
        beta1=rule.beta1,
        beta2=rule.beta2,
        unbias=1 / (1 - rule.beta1**step),
        unbias_squares=1 / (1 - rule.beta2**step),
        epsilon=rule.epsilon,
        coherence=coherence,
        decay=rule.decay,
        weights=weights_for(rule, first),
    )


def weights_for(rule: AdamRule, like: Tensor) -> Tensor | None:
    """The weights that L2 decay adds to the gradient, flat and in the dtype of `like`; None without such decay."""
    if rule.weights is None or not rule.decay:
        return None
    return rule.weights.detach().to(like.dtype).contiguous().view(-1)
