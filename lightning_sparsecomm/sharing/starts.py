"""Where a rank trains on from after an exchange of weight changes: from the anchors, or also from its residual."""

from collections.abc import Collection

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.channel.saved import Saved, pop_named
from lightning_sparsecomm.sharing.anchored import Anchored
from lightning_sparsecomm.sharing.gradients import NamedParameters

_AHEAD = "ahead"


class Starts:
    """What weights were set to after the last exchange.

    Args:
        anchored: The anchors.
        channel: Whose residual is what this rank has trained and not sent.
        adds_residual: Whether a rank trains on from the sum of both.

    Attributes:
        ahead: Names of weights that were set to the sum, and not to the anchor.
        changed: Weights that hold their changes in a turn, with names.
    """

    def __init__(self, anchored: Anchored, channel: Channel, adds_residual: bool) -> None:
        self.ahead = set[str]()
        self.changed: list[tuple[Tensor, str]] = []
        self._anchored, self._channel, self._adds = anchored, channel, adds_residual

    def reset(self, parameters: NamedParameters, last: bool) -> None:
        """Sets the weights to where they start from: to the anchors where no training follows."""
        self.changed = []
        if pairs := self._anchored.pairs(parameters):
            torch._foreach_copy_([weight for weight, _ in pairs], [anchor for _, anchor in pairs])
        known = set(self._anchored.anchors) if self._adds and not last else set[str]()
        self.ahead = known & self._residuals().keys()
        for name, weight in parameters:
            if name in self.ahead:
                weight.detach().copy_(self._sum(name))

    def leave(self, parameters: NamedParameters) -> bool:
        """Takes the residual out of weights that have it from a run with another method; whether there were any."""
        found = [] if self._adds else [(name, weight) for name, weight in parameters if name in self.ahead]
        for name, weight in found:
            weight.detach().sub_(self.of(name, weight) - self._anchored.of(name))
        self.ahead -= {name for name, _ in found}
        return bool(found)

    def of(self, name: str, weight: Parameter) -> Tensor:
        """What a weight was set to, as it rounds; in the anchor's dtype. The anchor itself, or a tensor of its own."""
        anchor = self._anchored.of(name)
        return self._sum(name).to(weight.dtype).to(anchor.dtype) if name in self.ahead else anchor

    def enter(self, name: str) -> None:
        """The anchor has become a mean of weights: what was in them of residuals is in it now, and waits no more."""
        if name in self.ahead:
            self._residuals()[name].zero_()

    def changes(self, parameters: NamedParameters, left_out: Collection[str]) -> list[Tensor | None]:
        """What each weight has changed since then; None for some that are left out.

        Where dtypes are equal, the change overwrites the weight, which spares the memory of another model: weights are
        about to be set anew, by `reset` where the exchange fails.
        """
        self.changed, changes = [], list[Tensor | None]()
        for name, parameter in parameters:
            weight = parameter.detach()
            changes.append(None if name in left_out else change_in(weight, self.of(name, parameter)))
            if changes[-1] is weight:
                self.changed.append((weight, name))
        return changes

    def take_back(self, parameters: NamedParameters) -> None:
        """Sets weights that hold their changes back to what was trained."""
        known = dict(parameters)
        for weight, name in self.changed:
            weight.add_(self.of(name, known[name]))
        self.changed = []

    def state_dict(self, names: list[str]) -> Saved:
        """Which weights are ahead, by name. In another world all is a mean: this, weights, anchors and residuals."""
        if not (self._adds or self.ahead):
            return {}
        return {_AHEAD: {name: torch.tensor(float(name in self.ahead)) for name in names}}

    def load_state_dict(self, saved: Saved, names: list[str]) -> None:
        """Takes out of `saved` what `state_dict` returned."""
        self.ahead = {name for name, ahead in pop_named(saved, _AHEAD, names).items() if bool(ahead)}

    def _sum(self, name: str) -> Tensor:
        anchor, residual = self._anchored.of(name), self._residuals().get(name)
        # One that joins a run has its residual on the CPU.
        return anchor if residual is None else anchor + residual.to(anchor.device)

    def _residuals(self) -> dict[str, Tensor]:
        """By name, what this rank has not sent yet."""
        return {
            name: part for each in self._channel.residuals for name, part in each.held["residual"].state_dict().items()
        }


def change_in(weight: Tensor, start: Tensor) -> Tensor:
    """What a weight has changed since it was set to `start`; overwrites the weight where dtypes are equal."""
    return weight.sub_(start) if weight.dtype == start.dtype else change_from(weight, start)


def change_from(weight: Tensor, anchor: Tensor) -> Tensor:
    """The same, apart from the weight, and in the anchor's dtype."""
    return weight.to(anchor.dtype) - anchor.to(weight.dtype).to(anchor.dtype)
