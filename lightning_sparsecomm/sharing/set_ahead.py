"""What the user changes in weights that are ahead of the shared ones: clamped, pruned, or initialized anew."""

import warnings
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.sharing.averaging import averaged
from lightning_sparsecomm.sharing.set_weights import SET_AMID, SetWeights

# Weights that were set in so many exchanges are set again and again, unless it was in no more than one of nine.
_OFTEN, _REST = 3, 1 / 8


class SetAhead:
    """Keeps changes of weights that are no training, until ranks take their mean over into the shared weights.

    A rank's own weights are anchor + change − what training is ahead by. With the next exchange, the mean of changes
    moves the anchors, so what all ranks set to one value becomes that value.

    Attributes:
        changes: This rank's, by parameter name.
        times: In how many exchanges there were changes on some rank, less an eighth for each of the others; equal on
            all ranks.
    """

    def __init__(self) -> None:
        self.changes: dict[str, Tensor] = {}
        self.times = 0.0
        self._warned = False

    @property
    def again_and_again(self) -> bool:
        """Whether weights were set so often that ranks are ahead no longer, for the rest of the run."""
        return self.times >= _OFTEN

    def count(self, changed: bool) -> None:
        """Counts an exchange, before which some rank had changes or none."""
        if not self.again_and_again:
            self.times = self.times + 1 if changed else max(0.0, self.times - _REST)

    def note(self, name: str, weight: Tensor, before: Tensor) -> None:
        """Takes in that a weight, which training had left at `before`, has another value now."""
        change = weight.detach() - before
        if name in self.changes:
            change += self.changes[name]
        self.changes[name] = change

    def keep(self, names: Collection[str]) -> None:
        """Forgets others than these."""
        self.changes = {name: change for name, change in self.changes.items() if name in names}

    def agree(self, weights: Mapping[str, Tensor], wire: Wire) -> list[str]:
        """The names of weights that some rank has changed, in their order here, equal on all ranks. A collective."""
        found = SetWeights()
        found.found = dict.fromkeys(self.changes, SET_AMID)
        device = next(iter(weights.values())).device
        return sorted(found.agree(list(weights), wire, device), key=list(weights).index)

    def means(self, names: Sequence[str], weights: Mapping[str, Tensor], wire: Wire) -> dict[str, Tensor]:
        """The mean over ranks of the changes of these weights; zero for a rank that has none. A collective."""
        own = [self.changes.get(name, torch.zeros_like(weights[name])) for name in names]
        return dict(zip(names, averaged(own, wire)))

    def warn(self, means: Mapping[str, Tensor]) -> None:
        """Says once what becomes of the changes."""
        if not self.times and not self._warned:
            warnings.warn(
                f"other code than the optimizer has changed {len(means)} parameter(s) between two steps, such as"
                f" {next(iter(means))!r}, while each rank was training by itself. Ranks take over the mean of these"
                f" changes with their next exchange: {sum(map(Tensor.numel, means.values())):,} elements, sent whole."
                " If that happens three times, in more than one of nine exchanges, they exchange in each step, as much"
                " each time. For code that changes weights again and again, methods.default(every=1) sends less.",
                stacklevel=2,
            )
        self._warned = True
