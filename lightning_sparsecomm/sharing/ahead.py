"""Weights that each rank trains ahead of those that all share, and what other code changes in them meanwhile."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.channel.saved import Saved
from lightning_sparsecomm.sharing.anchors import Anchors
from lightning_sparsecomm.sharing.gradients import NamedParameters
from lightning_sparsecomm.sharing.set_ahead import SetAhead

_AHEAD, _SET, _TIMES = "ahead", "set", "times set"


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
        # Mean changes of weights that some rank has set, as last agreed on.
        self._means: dict[str, Tensor] = {}

    def keep(self, parameters: NamedParameters, names: Collection[str]) -> None:
        """Forgets others than these; they leave with the shared weights."""
        self.anchors.restore(parameters)
        self.anchors.keep(names)
        self.set.keep(names)
        self.by = {name: ahead for name, ahead in self.by.items() if name in names}

    def look(self, parameters: NamedParameters, signs: Callable[[], dict[str, int]]) -> None:
        """Notes what other code has changed in weights that are ahead."""
        if changed := self.anchors.changed(parameters):
            weights, sign = dict(parameters), signs()
            for name in changed:
                before = self._move(name, self.anchors.of(name).clone(), sign[name])
                self.set.note(name, weights[name], before)

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

    def rejoin(self, parameters: NamedParameters, warns: bool) -> None:
        """Sets the weights to the shared ones, with the mean of what other code has changed."""
        self.anchors.restore(parameters)
        if self._means:
            if warns:
                self.set.warn(self._means)
            for name, weight in parameters:
                if name in self._means:
                    weight.detach().add_(self._means[name].to(weight.dtype))
            self.set.times += 1
        self.by, self.set.changes, self._means = {}, {}, {}

    def drop(self, parameters: NamedParameters) -> None:
        """Sets the weights to the shared ones, and drops what other code has changed."""
        self._means = {}
        self.rejoin(parameters, warns=False)

    def _move(self, name: str, weight: Tensor, sign: int) -> Tensor:
        """Moves a shared value, in place, to where this rank's own weight is."""
        if name in self.set.changes:
            weight.add_(self.set.changes[name])
        if name in self.by:
            weight.sub_(self.by[name].to(weight.dtype), alpha=sign)
        return weight

    def state_dict(self, names: Sequence[str]) -> Saved:
        """What it holds, by kind and name."""
        saved = {**self.anchors.state_dict(), _AHEAD: self.by, _SET: self.set.changes}
        if self.set.times:
            saved[_TIMES] = {name: torch.tensor(float(self.set.times)) for name in names[:1]}
        return saved

    def load_state_dict(self, taken: Callable[[str], dict[str, Tensor]], parameters: NamedParameters) -> None:
        """Takes over what `state_dict` returned: `taken` gives a kind, by name."""
        self.anchors.load_state_dict(taken, parameters)
        self.by, self.set.changes = taken(_AHEAD), taken(_SET)
        self.set.times = round(max(map(float, taken(_TIMES).values()), default=0))
