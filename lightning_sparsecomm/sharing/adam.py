"""Adam taken over from the user's own torch.optim.Adam or AdamW: its settings, its state, and its update of weights."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from lightning_sparsecomm.channel.adam_moments import AdamMoments
from lightning_sparsecomm.channel.contribution import AdamRule
from lightning_sparsecomm.sharing.gradients import NamedParameters
from lightning_sparsecomm.sharing.takeover import Takeover

_WIDE = (torch.float32, torch.float64)


def adam_rules(optimizer: Optimizer, parameters: NamedParameters) -> list[AdamRule]:
    """Adam's settings for each parameter, from the optimizer's groups as they are now, and its state if it has any.

    Raises:
        ValueError: A beta is outside [0, 1); or `amsgrad` was set after the optimizer was registered.
    """
    rules: dict[int, AdamRule] = {}
    for group in optimizer.param_groups:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
            raise ValueError(
                f"betas of {type(optimizer).__name__} must be in [0, 1), or moments forget nothing; got"
                f" {(beta1, beta2)!r}. Use (0.9, 0.999), for example."
            )
        if group.get("amsgrad"):
            raise ValueError("amsgrad must be False with local moments, which are kept without it; got True.")
        sign = -1.0 if group["maximize"] else 1.0
        decay = 0.0 if _decoupled(optimizer, group) else float(group["weight_decay"])
        for parameter in group["params"]:
            weights = parameter.detach() if decay else None
            begun = optimizer.state.get(parameter, {})
            rule = AdamRule(beta1, beta2, float(group["eps"]), sign, decay, weights, begun)
            rules[id(parameter)] = rule
    return [rules[id(parameter)] for _, parameter in parameters]


def show_moments(optimizer: Optimizer, parameters: NamedParameters, memory: AdamMoments) -> None:
    """Makes this rank's own moments the optimizer's state, as views: where torch keeps them, and ddp looks for them."""
    moments = memory.moments()
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in parameters:
        if name not in moments:
            continue
        steps, first, second = moments[name]
        state = optimizer.state[parameter]
        state["exp_avg"], state["exp_avg_sq"] = first, second
        if isinstance(state.get("step"), Tensor):
            state["step"].fill_(steps)
            continue
        group = groups[id(parameter)]
        device = parameter.device if group["capturable"] or group["fused"] else torch.device("cpu")
        state["step"] = torch.tensor(float(steps), dtype=torch.float32, device=device)


class AdamTakeover(Takeover):
    """Steps the parameters whose `.grad` holds a direction in units of the learning rate, and hides them from Adam.

        w ← (1 − lr·λ)·w − lr·X                         λ: AdamW's decay; 0 for Adam, whose decay is in X

    Weights narrower than float32 are computed in float32 and rounded once. All other parameters are left to torch.

    Args:
        optimizer: A torch.optim.Adam or AdamW. A hook is registered on it.

    Attributes:
        directed: Identities of the parameters that it steps; the caller adds to it.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.directed: set[int] = set()
        self._hidden: list[tuple[Tensor, Tensor]] = []

    def direct(self, parameters: Iterable[Tensor]) -> None:
        """Takes over these parameters too."""
        self.directed.update(id(parameter) for parameter in parameters)

    def engage(self) -> None:
        for group in self.optimizer.param_groups:
            taken = [
                (weight, weight.grad)
                for weight in group["params"]
                if id(weight) in self.directed and weight.grad is not None
            ]
            rate = float(group["lr"])
            keep = 1 - rate * float(group["weight_decay"]) if _decoupled(self.optimizer, group) else 1.0
            _move_([(weight.detach(), direction) for weight, direction in taken], rate, keep)
            for weight, direction in taken:
                self._hidden.append((weight, direction))
                weight.grad = None

    def restore(self) -> None:
        for weight, direction in self._hidden:
            if weight.grad is None:
                weight.grad = direction
        self._hidden = []


def _move_(pairs: list[tuple[Tensor, Tensor]], rate: float, keep: float) -> None:
    """w ← keep·w − rate·x, in place."""
    wide = [pair for pair in pairs if pair[0].dtype in _WIDE]
    if wide:
        weights, directions = ([pair[place] for pair in wide] for place in (0, 1))
        if keep != 1:
            torch._foreach_mul_(weights, keep)
        torch._foreach_add_(weights, directions, alpha=-rate)
    for weight, direction in pairs:
        if weight.dtype not in _WIDE:
            weight.copy_((weight.float() * keep).sub_(direction.float(), alpha=rate))


def _decoupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, AdamW)))
