"""Ranks of one node: they share whole gradients, and each exchanges some of the parameters with other nodes."""

import base64
import pickle
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sparsecomm.basis.ledger import INSIDE, OURS
from lightning_sparsecomm.basis.wire import Wire, within
from lightning_sparsecomm.run.gathered import gather_texts
from lightning_sparsecomm.sharing.averaging import average_
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
        groups: As given.
        inside: Between the ranks of this node.
        between: Between the ranks of all nodes that have the same parameters; its ranks count nodes.
    """

    def __init__(self, groups: Groups, wire: Wire) -> None:
        self.groups = [list(group) for group in groups]
        self.inside = within(wire, self.groups, INSIDE)
        self.between = within(wire, list(zip(*self.groups)))
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

    def divide(self, parameters: NamedParameters) -> None:
        """Gives each new parameter to the rank of a node that has the fewest elements, the largest ones first.

        Raises:
            ValueError: One of them gets sparse gradients.
        """
        new = [(name, parameter) for name, parameter in parameters if id(parameter) not in self._owner]
        for name, parameter in new:
            if has_sparse_gradient(parameter):
                raise ValueError(
                    f"nodes needs dense gradients; those of {name!r} are sparse. Build its layer with sparse=False, or"
                    " leave nodes out."
                )
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

    def average_gradients(self, parameters: NamedParameters) -> None:
        """Replaces each `.grad` by its mean over the node; a gradient that a rank lacks counts as zero. A collective.

        A second call changes nothing. So a step whose exchange has failed can be repeated.
        """
        own = torch.tensor([each.grad is not None for _, each in parameters], dtype=torch.uint8)
        self._fill(parameters, self.inside.all_reduce_or_(own.to(self._device(parameters))))
        average_([each.grad for _, each in parameters if each.grad is not None], self.inside, INSIDE)

    def hand_out_gradients(self, parameters: NamedParameters) -> None:
        """Replaces each `.grad` by that of the rank of this node that has the parameter. A collective."""
        places = self._by_place(parameter for _, parameter in parameters)
        longest = max(map(len, places))
        own = [each.grad is not None for each in places[self.inside.rank]]
        flags = torch.tensor(own + [False] * (longest - len(own)), dtype=torch.uint8, device=self._device(parameters))
        for part, row in zip(places, self.inside.all_gather(flags)):
            self._fill([("", each) for each in part], row[: len(part)])
        self._hand_out(places, lambda each: each.grad)

    def hand_out_weights(self, parameters: NamedParameters) -> None:
        """Replaces each weight by that of the rank of this node that has the parameter. A collective."""
        self._hand_out(self._by_place(parameter for _, parameter in parameters), lambda each: each.detach())

    def agree(self, error: BaseException | None, device: torch.device) -> None:
        """Raises an error that another rank of this node has met, so that all its ranks raise it. A collective."""
        text = base64.b64encode(pickle.dumps(_picklable(error))).decode() if error is not None else ""
        others = [found for found in gather_texts(text, self.inside, device, INSIDE) if found]
        if error is None and others:
            raise pickle.loads(base64.b64decode(others[0]))

    def _by_place(self, parameters: Iterable[Parameter]) -> list[list[Parameter]]:
        places: list[list[Parameter]] = [[] for _ in range(self.per_node)]
        for parameter in parameters:
            places[self._owner[id(parameter)]].append(parameter)
        return places

    def _fill(self, parameters: NamedParameters, present: Tensor) -> None:
        """Makes gradients of zeros where one is missing."""
        for (_, parameter), here in zip(parameters, present.tolist()):
            if here and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _hand_out(self, places: Sequence[Sequence[Parameter]], of: Callable[[Parameter], Tensor | None]) -> None:
        tensors = [[tensor for each in part if (tensor := of(each)) is not None] for part in places]
        for dtype in dict.fromkeys(tensor.dtype for part in tensors for tensor in part):
            parts = [[tensor for tensor in part if tensor.dtype == dtype] for part in tensors]
            longest = max(sum(tensor.numel() for tensor in part) for part in parts)
            device = next(tensor.device for part in parts for tensor in part)
            own = torch.zeros(longest, dtype=dtype, device=device)
            _copy(parts[self.inside.rank], own, back=False)
            for place, row in enumerate(self.inside.all_gather(own)):
                if place != self.inside.rank:
                    _copy(parts[place], row, back=True)

    def _device(self, parameters: NamedParameters) -> torch.device:
        return parameters[0][1].device


def _copy(tensors: Sequence[Tensor], flat: Tensor, back: bool) -> None:
    """Copies tensors into a flat vector, one after another, or back."""
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, part in zip(tensors, flat.split([*sizes, flat.numel() - sum(sizes)])):
        into, source = (tensor, part.view(tensor.shape)) if back else (part.view(tensor.shape), tensor)
        into.copy_(source)


def _picklable(error: BaseException) -> BaseException:
    """The error; or another one with its text, where it cannot be sent to other ranks."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # Pickling runs the error's own code.
        return RuntimeError(f"{type(error).__name__}: {error}")
    # An interrupt of one rank must not look like one of another.
    return error if isinstance(error, Exception) else RuntimeError(f"another rank of this node has met {error!r}")
