"""A loss scaler on which all ranks agree: they skip a step together, and keep one scale."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.run.optimizers import parameters_of


class LossScaling:
    """Divides gradients by the loss scale before they are shared, and lets ranks skip a step together.

    The scaler stays the user's own. Its records say what all ranks found together, so its `step` skips and its `update`
    shrinks the scale on every rank. Until `close`, fused optimizers do not unscale gradients themselves: their `step`
    gets unscaled ones, and is not called for a skipped step.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        self._fused: list[Optimizer] = []

    def take_over(self, instead: Callable[[Optimizer], bool]) -> None:
        """Replaces the scaler's `unscale_` by `instead` until `close`. If that returns False, both are called."""

        def unscale_(optimizer: Optimizer) -> None:
            if not instead(optimizer):
                self._unscale_alone_(optimizer)

        self.scaler.unscale_ = unscale_  # type: ignore[method-assign]

    def adopt(self, optimizer: Optimizer) -> None:
        """Stops an optimizer from unscaling its gradients itself. Call it before the optimizer's first step."""
        # torch and Lightning read this attribute to decide that. Also, torch 2.13's fused SGD leaves uninitialized
        # memory as momentum when its first step is skipped.
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
            self._fused.append(optimizer)

    def unscale_(self, optimizer: Optimizer, together: Wire | None) -> bool:
        """Divides the optimizer's gradients by the scale.

        Args:
            optimizer: Whose gradients they are.
            together: Between those that skip a step together, in an all-reduce of 4 bytes; None for this rank alone.

        Returns:
            Whether to skip the step: a gradient is not finite on any of these ranks.
        """
        device = parameters_of(optimizer)[0].device
        # The scaler creates its scale for its first loss, and this rank may not have had one.
        self.scaler.scale(torch.zeros((), device=device))
        # torch refuses a second call in one step, but gradients may be new since the first.
        self._record(optimizer, OptState.READY, {})
        self._unscale_alone_(optimizer)
        found = torch.zeros((), device=device)
        for each in self.scaler._found_inf_per_device(optimizer).values():
            found += each.to(device)
        if together is not None:
            together.all_reduce_(found)
        self._record(optimizer, OptState.UNSCALED, {device: found})
        return bool(found)

    def remind(self, optimizer: Optimizer, skips: bool) -> None:
        """Restores the scaler's record of what `unscale_` found, if it is gone.

        `update` after one optimizer's step clears the records of all, and the others' gradients would be divided twice.
        """
        if not self.scaler._found_inf_per_device(optimizer):
            device = parameters_of(optimizer)[0].device
            self._record(optimizer, OptState.UNSCALED, {device: torch.full((), float(skips), device=device)})

    def _unscale_alone_(self, optimizer: Optimizer) -> None:
        type(self.scaler).unscale_(self.scaler, optimizer)

    def _record(self, optimizer: Optimizer, stage: OptState, found: dict[torch.device, Tensor]) -> None:
        # torch has no public way. In place, since the scaler's `step` may hold the record already.
        self.scaler._per_optimizer_states[id(optimizer)].update(stage=stage, found_inf_per_device=found)

    def close(self) -> None:
        """Undoes `take_over` and `adopt`."""
        vars(self.scaler).pop("unscale_", None)
        for optimizer in self._fused:
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        self._fused.clear()
