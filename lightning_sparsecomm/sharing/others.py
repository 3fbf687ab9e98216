"""Shares of which other ranks of a node exchange a part, and what a rank keeps of that."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.sharing.gradients import NamedParameters
from lightning_sparsecomm.sharing.share import Share

Own = Callable[[NamedParameters], NamedParameters]
"""Those of some parameters that this rank exchanges; the others are exchanged by other ranks of its node."""


def all_of(parameters: NamedParameters) -> NamedParameters:
    """All of them, where a rank exchanges what it trains."""
    return parameters


class Others:
    """What other ranks of a node exchange for this one.

    This rank keeps only the shared values, in the weights' own dtype. So it validates, saves and goes back after an
    error without asking anyone.

    Attributes:
        parameters: In named-parameter order.
        values: By name, the weights that all ranks share; noted before the first step.
    """

    def __init__(self) -> None:
        self.parameters: NamedParameters = []
        self.values: dict[str, Tensor] = {}

    def note_new(self) -> None:
        """Notes the weights of those that have no value yet, which are equal on all ranks."""
        self.make_room({name for name, _ in self.parameters})

    def make_room(self, names: Collection[str]) -> None:
        """Gives those of them with these names a value, which is the weight as it is."""
        for name, weight in self.parameters:
            if name in names and name not in self.values:
                self.values[name] = weight.detach().clone()

    def in_common(self) -> list[tuple[Parameter, Tensor]]:
        """Each parameter with its shared value."""
        return [(weight, self.values[name]) for name, weight in self.parameters if name in self.values]

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each weight with its shared value. One that has just been unfrozen has none before its first step."""
        return [(weight.detach(), value) for weight, value in self.in_common()]

    def reset_weights(self) -> None:
        """Sets the weights to the shared values."""
        if pairs := self.pairs():
            torch._foreach_copy_([weight for weight, _ in pairs], [value for _, value in pairs])


class PartShare(Share):
    """A share of which a rank exchanges only a part, where other ranks of its node exchange the others.

    Args:
        optimizer, wire: As for `Share`.
        parameters: All of them; `parameters` and `layout` of the share are of this rank's part, which may be empty.
        own: Which these are.

    Attributes:
        others: What other ranks of the node exchange.
    """

    def __init__(self, optimizer: Optimizer, parameters: NamedParameters, wire: Wire, own: Own) -> None:
        self.others = Others()
        self._own = own
        super().__init__(optimizer, parameters, wire)

    def extend(self, parameters: NamedParameters) -> None:
        own = self._own(parameters)
        known = {name for name, _ in own}
        self.others.parameters = [named for named in parameters if named[0] not in known]
        super().extend(own)

    @property
    def all_names(self) -> list[str]:
        """Names of this rank's part, and of the others."""
        return [name for name, _ in (*self.parameters, *self.others.parameters)]

    def handed_out(self) -> None:
        self.others.reset_weights()
