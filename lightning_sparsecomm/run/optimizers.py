"""One optimizer of a run: its method, its shares, and the progress of its next step."""

import math
import numbers
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sparsecomm.run.sample_counts import SampleCounts
from lightning_sparsecomm.sharing.around_update import AroundUpdate
from lightning_sparsecomm.sharing.gradients import NamedParameters
from lightning_sparsecomm.sharing.method import Method
from lightning_sparsecomm.sharing.share import Share
from lightning_sparsecomm.sharing.sync import Sync
from lightning_sparsecomm.sharing.takeover import Takeover

Left = tuple[str, Parameter, weakref.ref[Tensor]]
"""A parameter's name, itself, and the gradient that a step has left in it, which is freed once it is cleared."""


@dataclass
class TrackedOptimizer:
    """One optimizer, its method, and how its parameters are exchanged.

    Attributes:
        number: Its place in the order of registration.
        in_node: Whether ranks of a node average whole gradients first, whatever their syncs share.
        method: Its method; None until its parameters are known.
        takeover: Replaces the optimizer's own momentum or moments; None if nothing does.
        around: Tells shares of weights when an update begins and ends; None where there are none.
        noted: Identities of the parameters that required a gradient in a backward pass.
        members: Identities of the parameters that are exchanged: those that required a gradient then, or in a step.
        parts: The same parameters with their names, by sync.
        shares: The share of each sync. A `BucketSync` has one only for parameters that are in none of DDP's buckets.
        steps: Optimizer steps finished.
        samples: Training samples behind the last of them, for replicas that come and go.
        shared: Whether the next step's gradients are shared already.
        failed_after_sharing: Whether an error has ended the last step after its gradients were shared.
        skips: Whether the next step is skipped, because the loss scaler found a gradient that is not finite.
        norm: Norm of this rank's gradient before clipping; NaN if nothing needs it, infinite if the step is skipped.
        max_norm: The clipping threshold that applied when gradients were shared; None for none.
        owed: By identity, what the next shared gradient of a parameter is increased by, after a switch of methods.
        versions_after_backward: Version counters of the gradients after the last backward pass.
        gradients_when_shared: As they were shared before the step, or clipped then, with their version counters.
        clipped_norm: The norm from which these were clipped; None if they were not.
        clipped_before: Whether that was before these gradients were saved, and the next clipping is to be left out.
        resumed: What the next step's exchange gave, from a checkpoint that was saved between the two.
        left: Where a takeover has left momentum or directions in `.grad`, which was not cleared before a backward pass.
    """

    optimizer: Optimizer
    number: int
    in_node: bool = False
    method: Method | None = None
    takeover: Takeover | None = None
    around: AroundUpdate | None = None
    noted: set[int] = field(default_factory=set)
    members: set[int] = field(default_factory=set)
    parts: list[tuple[Sync, NamedParameters]] = field(default_factory=list)
    shares: dict[Sync, Share] = field(default_factory=dict)
    steps: int = 0
    samples: SampleCounts = field(default_factory=SampleCounts)
    shared: bool = False
    failed_after_sharing: bool = False
    skips: bool = False
    norm: float = math.nan
    max_norm: float | None = None
    owed: dict[int, Tensor] = field(default_factory=dict)
    versions_after_backward: list[int] = field(default_factory=list)
    gradients_when_shared: list[tuple[Tensor | None, int]] = field(default_factory=list)
    clipped_norm: Tensor | None = None
    clipped_before: bool = False
    resumed: dict[str, Any] | None = None
    left: list[Left] = field(default_factory=list)

    def watch_updates(self) -> None:
        """Calls the shares around each update from now on, those of the next step included, which may not exist yet."""
        if self.around is None:
            self.around = AroundUpdate(self.optimizer, self._before_update, self._after_update)

    def _before_update(self) -> None:
        for share in self.shares.values():
            share.before_update()

    def _after_update(self) -> None:
        for share in self.shares.values():
            share.after_update()

    def end_takeover(self) -> None:
        """Removes the hooks that take the place of the optimizer's momentum or moments."""
        if self.takeover is not None:
            self.takeover.close()

    def note_trained(self) -> None:
        """Notes the parameters that require a gradient now, on all ranks, whether or not each gets one."""
        self.noted.update(id(parameter) for parameter in parameters_of(self.optimizer) if parameter.requires_grad)

    def unshare(self) -> None:
        """Notes that the next step's gradients are not shared yet, or no longer."""
        self.shared, self.gradients_when_shared = False, []
        self.clipped_norm, self.clipped_before = None, False

    def end_step(self) -> None:
        """Notes that the optimizer's step is over, also where an error has ended it."""
        if self.takeover is not None and self.shared:
            here = [(name, parameter, parameter.grad) for name, parameter in self.parameters]
            self.left = [(name, each, weakref.ref(g)) for name, each, g in here if g is not None and g.numel()]
        self.unshare()
        if self.around is not None:
            self.around.forget()

    def pay(self) -> None:
        """Adds to the shared gradients what is owed."""
        for _, parameter in self.parameters:
            part = self.owed.pop(id(parameter), None)
            if part is not None:
                part = part.view(parameter.shape).to(parameter.dtype)
                parameter.grad = part if parameter.grad is None else parameter.grad.add_(part)

    @property
    def name(self) -> str:
        """Name of the optimizer's class, for messages."""
        return type(self.optimizer).__name__

    @property
    def parameters(self) -> list[tuple[str, Parameter]]:
        """All members with their names, in the order of the syncs."""
        return [named for _, piece in self.parts for named in piece]

    @property
    def shares_gradients(self) -> bool:
        """Whether `.grad` no longer holds only this rank's own gradients once they are shared."""
        return self.in_node or self.exchanges_gradients

    @property
    def exchanges_gradients(self) -> bool:
        """Whether some of its gradients are exchanged in each step, between all ranks or between nodes."""
        return any(sync.shares_gradients for sync, _ in self.parts)

    def drop_gradients(self) -> None:
        """Leaves the optimizer's next step without any."""
        for _, parameter in self.parameters:
            parameter.grad = None

    @property
    def drifts(self) -> bool:
        """Whether replicas of its parameters drift apart."""
        return any(sync.drifts for sync, _ in self.parts)


def parameters_of(optimizer: Optimizer) -> list[Parameter]:
    """All parameters of all groups, in the optimizer's order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def rate_in(group: Mapping[str, Any]) -> float | None:
    """The learning rate of a param group; None where an optimizer finds its own, and has no number there."""
    rate = group.get("lr")
    return float(rate) if isinstance(rate, (numbers.Real, Tensor)) else None
