"""A step that a rank makes by itself: what `.grad` shows of it, and what the optimizer finds there."""

import inspect
import warnings
from collections.abc import Iterable, Sequence
from types import CodeType
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparsecomm.channel.error_feedback import ErrorFeedback
from lightning_sparsecomm.sharing.gradients import NamedParameters


def steps_as_torch(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step is torch's own, so that nothing in it changes gradients."""
    return type(optimizer).step.__module__.startswith("torch.optim")


# What code names that changes what a step of torch's does, and methods that do not belong to a step.
_TOUCHED = {"grad", "param_groups", "state"}
_APART = {"__init__", "__setstate__", "__getstate__", "__repr__", "zero_grad", "add_param_group"}
_APART |= {"state_dict", "load_state_dict"}


def has_own_rule(optimizer: Optimizer) -> bool:
    """Whether a class derived from torch's optimizer changes in code of its own what a step does.

    Such as one that decays weights or scales gradients, and then calls torch's step. A class whose methods name neither
    gradients nor groups nor state only calls it, or records something. What cannot be looked into counts as own.
    """
    kinds = [kind for kind in type(optimizer).__mro__ if not kind.__module__.startswith("torch.optim")]
    members = [named for kind in kinds if kind is not object for named in vars(kind).items()]
    return any(_touches(name, member) for name, member in members if name not in _APART)


def _touches(name: str, member: object) -> bool:
    member = getattr(member, "__func__", member)
    if (getattr(member, "__module__", None) or "").startswith("torch.optim"):
        # torch wraps the step that a class inherits, in that class.
        return False
    code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
    if code is None:
        return name == "step"
    names = _names_in(code)
    # What works in place has such a name: clip_grad_norm_(weights), weight.mul_(0.9).
    return bool(names & _TOUCHED) or any(each.endswith("_") and not each.endswith("__") for each in names)


def _names_in(code: CodeType) -> set[str]:
    inner = [_names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*inner)


# Optimizers of which users know that what changes these gradients counts in other ways.
_WARNED: WeakSet[Optimizer] = WeakSet()


class OwnStep:
    """Shows in `.grad` what a rank steps along, and zeros to the optimizer, which then only decays weights.

    Args:
        optimizer: Whose step it is. One that is not torch's own, or is fused, gets zeros that it may write to.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        # What was shown, by the parameter's place.
        self._shown: dict[int, Tensor] = {}
        self._hidden: list[tuple[Tensor, Tensor]] = []

    def write(self, along: Sequence[Tensor | None], parameters: NamedParameters, moves: Sequence[bool]) -> None:
        """Writes what the rank steps along to `.grad`: zero for None, and no gradient where the weight does not move.

        The tensors `along` must keep their values until `amend`.
        """
        for index, (part, moved, (_, weight)) in enumerate(zip(along, moves, parameters)):
            if not moved:
                weight.grad = None
            elif part is None:
                weight.grad = torch.zeros_like(weight)
            else:
                if weight.grad is None:
                    weight.grad = torch.empty_like(weight)
                weight.grad.copy_(part)
                self._shown[index] = part

    def amend(self, residual: ErrorFeedback, parameters: NamedParameters, warns: bool) -> None:
        """What other code has changed in these gradients counts in the residual too; `warns` says so once."""
        shown, self._shown = self._shown, {}
        for index, part in shown.items():
            weight = parameters[index][1]
            # By values: code that writes to `.grad.data` leaves no other trace.
            before = part.view(weight.shape).to(weight.dtype)
            now = torch.zeros_like(before) if weight.grad is None else weight.grad.detach()
            if not torch.equal(now, before):
                residual.amend(index, now.to(part.dtype) - before.to(part.dtype))
                if warns and self._optimizer not in _WARNED:
                    _WARNED.add(self._optimizer)
                    warnings.warn(
                        f"other code has changed .grad of {parameters[index][0]!r} in a step between two exchanges,"
                        " where it is what this rank steps along. What it adds counts once, but a factor counts twice:"
                        " here, and in what the next exchange shares of this step. Use methods.default(every=1), or"
                        " every=1 of another method; to clip, set the Trainer's gradient_clip_val.",
                        stacklevel=2,
                    )

    def hide(self, weights: Iterable[Tensor]) -> None:
        """From now on, `.grad` of those of these weights that have one is zero."""
        fused = any(group.get("fused") for group in self._optimizer.param_groups)
        reads_only = steps_as_torch(self._optimizer) and not fused
        for weight in weights:
            if (gradient := weight.grad) is not None:
                zero = gradient.new_zeros(()).expand(gradient.shape) if reads_only else torch.zeros_like(gradient)
                self._hidden.append((weight, gradient))
                weight.grad = zero

    def show(self) -> None:
        """Puts the gradients back."""
        for weight, gradient in self._hidden:
            weight.grad = gradient
        self._hidden = []

    def forget(self) -> None:
        """No such step is to come; `.grad` is as other code finds it."""
        self._shown = {}
        self.show()
