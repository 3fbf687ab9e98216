"""Ranks of one node: they share whole gradients, and each exchanges some of the parameters with other nodes."""

import base64
import pickle
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sparsecomm.basis.ledger import INSIDE, OURS
from lightning_sparsecomm.basis.wire import Wire, within
from lightning_sparsecomm.run.gathered import gather_texts
from lightning_sparsecomm.run.node_memory import NodeMemory
from lightning_sparsecomm.sharing.gradients import NamedParameters, has_sparse_gradient

Groups = Sequence[Sequence[int]]
"""The ranks of each node."""


class Nodes:
    """Two levels of communication: inside a node, where it is fast, and between nodes, where a method works.

    Each parameter belongs to one rank of every node, the same one in each. That rank has its residual, selects and
    exchanges it with its equals in other nodes, and hands the result to the others of its node. So a rank has 1/L of
    the work and of the memory, with L ranks on a node, and a node sends what one rank would.

    Args:
        groups: The ranks of each node, equally many, equal on all ranks.
        wire: Between all ranks. Making the two others is a collective.

    Attributes:
        groups: As given, in ascending order.
        inside: Between the ranks of this node.
        between: Between those ranks that have the same parameters, one of each node.
        memory: That the ranks of this node share.
    """

    def __init__(self, groups: Groups, wire: Wire) -> None:
        self.groups = sorted(sorted(group) for group in groups)
        self.inside = within(wire, self.groups, INSIDE)
        self.inside.far = 0.0
        self.between = within(wire, list(zip(*self.groups)))
        self.memory = NodeMemory(self.inside)
        self._wire = wire
        # By the parameter's identity, its rank within a node; and how many elements each of these ranks has.
        self._owner: dict[int, int] = {}
        self._elements = [0] * self.inside.world_size
        sizes = dict.fromkeys(OURS, self.between.world_size)
        wire.ledger.divide(sizes | {INSIDE: self.inside.world_size})

    @property
    def per_node(self) -> int:
        """Number of ranks on a node."""
        return self.inside.world_size

    def divide(self, parameters: NamedParameters, training: NamedParameters) -> None:
        """Gives each new parameter to the rank of a node that has the fewest elements, the largest ones first.

        Args:
            parameters: All of the model at once, as which of them train first may be another in a run that resumes.
            training: Those that train from now on.

        Raises:
            ValueError: One that trains gets sparse gradients.
        """
        for name, parameter in training:
            if has_sparse_gradient(parameter):
                raise ValueError(
                    f"nodes needs dense gradients; those of {name!r} are sparse. Build its layer with sparse=False, or"
                    " leave nodes out."
                )

        new = [(name, parameter) for name, parameter in parameters if id(parameter) not in self._owner]
        for _, parameter in sorted(new, key=lambda named: -named[1].numel()):
            place = min(range(self.per_node), key=lambda each: self._elements[each])
            self._owner[id(parameter)] = place
            self._elements[place] += parameter.numel()

    def own(self, parameters: NamedParameters) -> NamedParameters:
        """Those of the parameters that this rank exchanges."""
        return [each for each in parameters if self._owner[id(each[1])] == self.inside.rank]

    def of_others(self, parameters: NamedParameters) -> set[str]:
        """Names of those that other ranks of this node exchange."""
        return {name for name, _ in parameters} - {name for name, _ in self.own(parameters)}

    def look(self) -> None:
        """Takes over where the run is, for messages."""
        for wire in (self.inside, self.between):
            wire.step, wire.place = self._wire.step, self._wire.place

    def agree(self, error: BaseException | None, device: torch.device) -> None:
        """Raises an error that another rank of this node has met, so that all its ranks raise it. A collective."""
        text = base64.b64encode(pickle.dumps(_picklable(error))).decode() if error is not None else ""
        others = [found for found in gather_texts(text, self.inside, device, INSIDE) if found]
        if error is None and others:
            raise pickle.loads(base64.b64decode(others[0]))

    def by_place(self, held: Sequence[tuple[Parameter, Tensor]]) -> list[list[tuple[Parameter, Tensor]]]:
        """Tensors with their parameters, for each rank of a node those of the parameters that it has."""
        places: list[list[tuple[Parameter, Tensor]]] = [[] for _ in range(self.per_node)]
        for parameter, tensor in held:
            places[self._owner[id(parameter)]].append((parameter, tensor))
        return places


def _picklable(error: BaseException) -> BaseException:
    """The error; or another one with its text, where it cannot be sent to other ranks."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # Pickling runs the error's own code.
        return RuntimeError(f"{type(error).__name__}: {error}")
    # An interrupt of one rank must not look like one of another.
    return error if isinstance(error, Exception) else RuntimeError(f"another rank of this node has met {error!r}")
