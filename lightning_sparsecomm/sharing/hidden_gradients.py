"""Gradients that an optimizer is to step without, and that other code is to find before and after its step."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer


class HiddenGradients:
    """Puts zeros in the place of gradients while an optimizer steps.

    Args:
        optimizer: Whose step it is. One that is not torch's own, or is fused, gets zeros that it may write to.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._hidden: list[tuple[Tensor, Tensor]] = []

    def hide(self, weights: Iterable[Tensor]) -> None:
        """From now on, `.grad` of those of these weights that have one is zero."""
        own = type(self._optimizer).step.__module__.startswith("torch.optim")
        reads_only = own and not any(group.get("fused") for group in self._optimizer.param_groups)
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
