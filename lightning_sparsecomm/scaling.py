"""A loss scaler whose decisions all ranks take together: whether a step is made, and how its scale goes on."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from lightning_sparsecomm.wire import Wire


class LossScaling:
    """Divides gradients by the loss scale before anything is made of them, and lets ranks skip a step together.

    The scaler stays the user's own: it finds in its records what all ranks have found, so its `step` skips and its
    `update` shrinks the scale on all of them alike. While this is at work, `step` of optimizers that would unscale
    their gradients themselves (fused ones) is called with unscaled gradients, and not at all where a step is skipped.

    Args:
        scaler: As precision="16-mixed" makes it.
        wire: Where to communicate.
    """

    def __init__(self, scaler: GradScaler, wire: Wire) -> None:
        self.scaler = scaler
        self._wire = wire
        self._fused: list[Optimizer] = []

    def take_over(self, instead: Callable[[Optimizer], bool]) -> None:
        """Until `close`, calls `instead` in the place of the scaler's `unscale_`, whoever calls that: Lightning, the
        scaler's own `step`, the user. Where it returns False, the scaler's is called after all."""

        def unscale_(optimizer: Optimizer) -> None:
            if not instead(optimizer):
                self._unscale_alone_(optimizer)

        self.scaler.unscale_ = unscale_  # type: ignore[method-assign]

    def adopt(self, optimizer: Optimizer) -> None:
        """Takes in an optimizer before its first step."""
        # torch and Lightning ask for this attribute before they let an optimizer unscale. Besides, torch 2.13's fused
        # SGD leaves a momentum of uninitialized memory behind where its first step is skipped.
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
            self._fused.append(optimizer)

    def unscale_(self, optimizer: Optimizer, together: bool) -> bool:
        """Divides the optimizer's gradients by the scale.

        Args:
            optimizer: Whose gradients.
            together: Whether ranks decide together; all call it then. Bytes: 4, in an all-reduce.

        Returns:
            Whether a gradient is not finite, on any of the ranks that decide, so that the step is to be skipped.
        """
        device = next(p.device for group in optimizer.param_groups for p in group["params"])
        # The first loss makes the scale, and this rank may not have had any.
        self.scaler.scale(torch.zeros((), device=device))
        # Gradients may be new ones since an earlier call in this step, which torch would refuse to make again.
        self._record(optimizer, OptState.READY, {})
        self._unscale_alone_(optimizer)
        found = torch.zeros((), device=device)
        for each in self.scaler._found_inf_per_device(optimizer).values():
            found += each.to(device)
        if together:
            self._wire.all_reduce_(found)
        self._record(optimizer, OptState.UNSCALED, {device: found})
        return bool(found)

    def remind(self, optimizer: Optimizer, skips: bool) -> None:
        """Records again what `unscale_` said where the scaler has forgotten it: `update` after one optimizer's step
        forgets it of all optimizers, and the others' gradients would be divided twice."""
        if not self.scaler._found_inf_per_device(optimizer):
            device = next(p.device for group in optimizer.param_groups for p in group["params"])
            self._record(optimizer, OptState.UNSCALED, {device: torch.full((), float(skips), device=device)})

    def _unscale_alone_(self, optimizer: Optimizer) -> None:
        type(self.scaler).unscale_(self.scaler, optimizer)

    def _record(self, optimizer: Optimizer, stage: OptState, found: dict[torch.device, Tensor]) -> None:
        # No public name leads there. In place, since the scaler's `step` may hold it already.
        self.scaler._per_optimizer_states[id(optimizer)].update(stage=stage, found_inf_per_device=found)

    def close(self) -> None:
        """Gives scaler and optimizers back."""
        vars(self.scaler).pop("unscale_", None)
        for optimizer in self._fused:
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        self._fused.clear()
