"""Weights that each rank trains ahead of those that all share, and what other code changes in them meanwhile."""

from collections.abc import Callable, Collection, Iterator, Sequence
from types import EllipsisType

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.channel.saved import Saved
from lightning_sparsecomm.kernels import kernels_for
from lightning_sparsecomm.sharing.anchors import Anchors
from lightning_sparsecomm.sharing.gradients import NamedParameters
from lightning_sparsecomm.sharing.set_ahead import SetAhead
from lightning_sparsecomm.sharing.set_weights import alike

_AHEAD, _SET, _SET_TO, _TIMES = "ahead", "set", "set to", "times set"

# So many elements of weights of other dtypes are compared at once, and take memory.
_COMPARED = 2**20


class Ahead:
    """One rank's weights: anchor + what other code has changed − what training is ahead by.

    Attributes:
        anchors: The weights that all ranks share.
        set: What other code has changed.
        by: What training is ahead by, by parameter name.
    """

    def __init__(self) -> None:
        self.anchors, self.set = Anchors(), SetAhead()
        self.by: dict[str, Tensor] = {}
        # What other code has set weights to since training left them, by name.
        self._set_to: dict[str, Tensor] = {}
        # Mean changes of weights that some rank has set, as last agreed on.
        self._means: dict[str, Tensor] = {}

    def keep(self, parameters: NamedParameters, names: Collection[str]) -> None:
        """Forgets others than these; they leave with the shared weights."""
        self.anchors.restore(parameters)
        self.anchors.keep(names)
        self.set.keep(names)
        self._set_to = {}
        self.by = {name: ahead for name, ahead in self.by.items() if name in names}

    def look(self, parameters: NamedParameters, signs: Callable[[], dict[str, int]]) -> None:
        """Notes what other code has changed in weights that are ahead, be it one element."""
        if not self.anchors.apart:
            return
        sign = signs()
        for name, parameter in parameters:
            weight = parameter.detach()
            if self.anchors.has_noted(name) and not self._is_as_left(name, weight, sign[name]):
                before = self._set_to[name] if name in self._set_to else self._left_at(name, sign[name])
                self.set.note(name, weight, before)
                self._set_to[name] = weight.clone()

    def agree(self, parameters: NamedParameters, wire: Wire) -> bool:
        """Averages what other code has changed; whether some rank has such changes. A collective."""
        weights = {name: weight.detach() for name, weight in parameters}
        if weights:
            self._means = self.set.means(self.set.agree(weights, wire), weights, wire)
        return bool(self._means)

    def pairs(self, parameters: NamedParameters) -> list[tuple[Tensor, Tensor]]:
        """Each weight with what all share, as ranks have last agreed; empty where weights are not ahead."""
        return self.anchors.pairs(parameters, self._means)

    def add(self, name: str, along: Tensor, rate: float, dtype: torch.dtype) -> None:
        """Training goes ahead by a learning rate times what it steps along."""
        if name not in self.by:
            self.by[name] = torch.zeros_like(along, dtype=dtype)
        self.by[name].add_(along, alpha=rate)

    def leave(self, parameters: NamedParameters, signs: Callable[[], dict[str, int]]) -> None:
        """Takes weights as the shared ones, and moves them to where this rank is."""
        if self.by or self.set.changes:
            sign = signs()
            self.anchors.take(parameters)
            for name, weight in parameters:
                self._move(name, weight.detach(), sign[name])
            self.anchors.note(parameters)
            self._set_to = {}

    def rejoin(self, parameters: NamedParameters, warns: bool) -> None:
        """Sets the weights to the shared ones, with the mean of what other code has changed. After an exchange."""
        changed = bool(self._means)
        self._restore(parameters, warns)
        self.set.count(changed)

    def drop(self, parameters: NamedParameters) -> None:
        """Sets the weights to the shared ones, and drops what other code has changed."""
        self._means = {}
        self._restore(parameters, warns=False)

    def _restore(self, parameters: NamedParameters, warns: bool) -> None:
        self.anchors.restore(parameters)
        if self._means:
            if warns:
                self.set.warn(self._means)
            for name, weight in parameters:
                if name in self._means:
                    weight.detach().add_(self._means[name].to(weight.dtype))
        self.by, self.set.changes, self._set_to, self._means = {}, {}, {}, {}

    def _is_as_left(self, name: str, weight: Tensor, sign: int) -> bool:
        """Whether a weight is where training, or the last look at it, has left it."""
        if name in self._set_to:
            return alike(weight, self._set_to[name])
        shared, by = self.anchors.of(name), self.by.get(name)
        if by is not None and name not in self.set.changes and _are_of_one_kind((weight, shared, by)):
            kernels = kernels_for(weight.device, weight.dtype)
            return kernels.is_ahead_by(weight.view(-1), shared.view(-1), by.view(-1), sign)
        return all(alike(weight[part], self._left_at(name, sign, part)) for part in _parts(weight))

    def _left_at(self, name: str, sign: int, part: "_Part" = ...) -> Tensor:
        """Where training has left a weight, or a part of it; in other memory."""
        return self._move(name, self.anchors.of(name)[part].clone(), sign, part)

    def _move(self, name: str, weight: Tensor, sign: int, part: "_Part" = ...) -> Tensor:
        """Moves a shared value, or a part of it, in place, to where this rank's own weight is."""
        if name in self.set.changes:
            weight.add_(self.set.changes[name][part])
        if name in self.by:
            weight.sub_(self.by[name][part].to(weight.dtype), alpha=sign)
        return weight

    def state_dict(self, names: Sequence[str]) -> Saved:
        """What it holds, by kind and name."""
        saved = {**self.anchors.state_dict(), _AHEAD: self.by, _SET: self.set.changes, _SET_TO: self._set_to}
        if self.set.times:
            saved[_TIMES] = {name: torch.tensor(self.set.times) for name in names[:1]}
        return saved

    def load_state_dict(self, taken: Callable[[str], dict[str, Tensor]], parameters: NamedParameters) -> None:
        """Takes over what `state_dict` returned: `taken` gives a kind, by name."""
        self.anchors.load_state_dict(taken, parameters)
        self.by, self.set.changes, self._set_to = taken(_AHEAD), taken(_SET), taken(_SET_TO)
        self.set.times = max(map(float, taken(_TIMES).values()), default=0.0)


_Part = EllipsisType | slice
"""Some rows of a tensor, or all of it."""


def _are_of_one_kind(tensors: Sequence[Tensor]) -> bool:
    return len({each.dtype for each in tensors}) == 1 and all(each.is_contiguous() for each in tensors)


def _parts(weight: Tensor) -> Iterator[_Part]:
    """Rows that are compared at once."""
    if weight.numel() <= _COMPARED or weight.dim() == 0:
        yield ...
        return
    rows = max(1, _COMPARED * len(weight) // weight.numel())
    for first in range(0, len(weight), rows):
        yield slice(first, first + rows)
