"""The weights that ranks share, where each rank's own are ahead of them."""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from lightning_sparsecomm.channel.saved import Saved
from lightning_sparsecomm.sharing.gradients import NamedParameters
from lightning_sparsecomm.sharing.set_weights import SetWeights


class Anchors:
    """Copies of weights that are equal on all ranks, by parameter name.

    Attributes:
        apart: Whether the weights may be ahead of them.
    """

    def __init__(self) -> None:
        self.apart = False
        self._values: dict[str, Tensor] = {}
        self._set_weights = SetWeights()

    def take(self, parameters: NamedParameters) -> None:
        """Takes the weights as they are, equal on all ranks; from now on they may go ahead."""
        for name, parameter in parameters:
            if name in self._values:
                self._values[name].copy_(parameter.detach())
            else:
                self._values[name] = parameter.detach().clone()
        self.apart = True

    def note(self, parameters: NamedParameters) -> None:
        """Notes weights that have gone ahead, so that `check` finds what other code changes."""
        self._set_weights.note(parameters)

    def check(self, parameters: NamedParameters) -> None:
        """Refuses weights that other code has changed since `note`. Raises `ValueError`."""
        if changed := self.changed(parameters):
            raise ValueError(
                "delay must be 0 where other code than the optimizer changes weights between two steps; it has changed"
                f" {changed[0]!r}. Each rank's weights are ahead of the shared ones by its own last gradients. Leave it"
                " out."
            )

    def changed(self, parameters: NamedParameters) -> list[str]:
        """The names of weights that other code has changed since `note`, or since they were found."""
        if not self.apart:
            return []
        self._set_weights.look(parameters, trained=True)
        found = [name for name, _ in parameters if name in self._set_weights.found]
        self._set_weights.forget()
        return found

    def has_noted(self, name: str) -> bool:
        """Whether a weight is known to have been noted where it is: not after resuming on other ranks."""
        return name in self._values and name in self._set_weights.noted

    def of(self, name: str) -> Tensor:
        """The shared value of a weight that is ahead."""
        return self._values[name]

    def pairs(
        self, parameters: NamedParameters, changes: Mapping[str, Tensor] = MappingProxyType({})
    ) -> list[tuple[Tensor, Tensor]]:
        """Each weight with its anchor, to which changes by name are added; empty where weights are not ahead.

        A parameter that has just joined has none before its first step.
        """
        return [
            (weight.detach(), value + changes[name].to(value.dtype) if name in changes else value)
            for name, weight in (parameters if self.apart else ())
            if (value := self._values.get(name)) is not None
        ]

    def restore(self, parameters: NamedParameters) -> None:
        """Sets weights that are ahead back to the anchors."""
        if pairs := self.pairs(parameters):
            torch._foreach_copy_([weight for weight, _ in pairs], [anchor for _, anchor in pairs])
        self.apart = False

    def lack(self, names: Collection[str]) -> bool:
        """Whether there are others than these."""
        return any(name not in names for name in self._values)

    def keep(self, names: Collection[str]) -> None:
        """Forgets others than these."""
        self._values = {name: value for name, value in self._values.items() if name in names}

    def state_dict(self) -> Saved:
        """What is held where weights are ahead, by kind and name."""
        return {"anchors": self._values, "weights as noted": dict(self._set_weights.noted)} if self.apart else {}

    def load_state_dict(self, taken: Callable[[str], dict[str, Tensor]], parameters: NamedParameters) -> None:
        """Takes over what `state_dict` returned: `taken` gives a kind, by name."""
        self._values = taken("anchors")
        self.apart = bool(self._values)
        self._set_weights.load_noted(taken("weights as noted"), parameters)
