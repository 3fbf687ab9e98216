"""Tensors that ranks may change on their own: finds those that some rank has changed, and averages them."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparsecomm.basis.ledger import PARAMETERS
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.sharing.averaging import averaged

# Elements that are compared to detect a change, where no copy of the tensor is kept.
_SAMPLE = 4096


class _Mark(NamedTuple):
    """A tensor as it was when it was equal on all ranks.

    Its version counter is not enough: batch normalization and writes to `.data` leave the counter as it is.
    """

    tensor: Tensor
    version: int
    sample: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> "_Mark":
        return cls(tensor, tensor._version, _sample(tensor).clone())


def _sample(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten()[:: tensor.numel() // _SAMPLE | 1]


class SharedTensors:
    """Tensors by name. Those that no rank has changed since all were equal are neither sent nor written.

    `tensors` returns the current floating-point tensors; all ranks have the same names. It is called each time, as a
    module may replace a buffer by another tensor.
    """

    def __init__(self, tensors: Callable[[], dict[str, Tensor]], wire: Wire) -> None:
        self._tensors = tensors
        self._wire = wire
        self._marks: dict[str, _Mark] = {}
        self._shared: dict[str, Tensor] = {}

    def mark(self, copied: Callable[[str], bool] = lambda name: False) -> None:
        """Notes the tensors as they are now, equal on all ranks.

        `copied` tells by their names which are copied now. The others are copied after their first change.
        """
        current = self._tensors()
        self._marks = {name: _Mark.of(tensor) for name, tensor in current.items()}
        self._shared = {name: tensor.detach().clone() for name, tensor in current.items() if copied(name)}

    def average(self) -> None:
        """Averages the tensors that some rank has changed. A collective; bytes: 4 for each name, and the average's."""
        self.take(self.means())

    def means(self) -> dict[str, Tensor]:
        """By name, the means of the tensors that some rank has changed, in float32 or wider. A collective."""
        current = self._tensors()
        return _means(current, [self._changed(*item) for item in current.items()], self._wire)

    def noted(self) -> Callable[[Wire], dict[str, Tensor]]:
        """What makes the `means` of the tensors as they are now, over a wire, perhaps in another thread.

        Those that this rank has changed are copied. The others must not change before it is done.
        """
        current = self._tensors()
        changed = [self._changed(*item) for item in current.items()]
        now = {
            name: tensor.detach().clone() if flag else tensor.detach()
            for (name, tensor), flag in zip(current.items(), changed)
        }
        return lambda wire: _means(now, changed, wire)

    def take(self, means: Mapping[str, Tensor]) -> None:
        """Writes means into the tensors, which are equal on all ranks then."""
        current = self._tensors()
        for name, mean in means.items():
            tensor = current[name]
            tensor.detach().copy_(mean)
            self._marks[name] = _Mark.of(tensor)
            self._shared[name] = tensor.detach().clone()

    def changed(self) -> dict[str, Tensor]:
        """Those that this rank has changed since all were marked."""
        current = self._tensors().items()
        return {name: tensor for name, tensor in current if name in self._marks and self._changed(name, tensor)}

    def shared(self) -> list[tuple[Tensor, Tensor]]:
        """The copied tensors that this rank has changed, each with the value that all ranks last shared."""
        return [
            (tensor.detach(), self._shared[name])
            for name, tensor in self._tensors().items()
            if name in self._shared and self._changed(name, tensor)
        ]

    def _changed(self, name: str, tensor: Tensor) -> bool:
        if name in self._shared:
            return not torch.equal(tensor, self._shared[name])
        mark = self._marks.get(name)
        return (
            mark is None
            or mark.tensor is not tensor
            or mark.version != tensor._version
            or not torch.equal(_sample(tensor), mark.sample)
        )


def _means(tensors: Mapping[str, Tensor], changed: Sequence[bool], wire: Wire) -> dict[str, Tensor]:
    """By name, the means of those tensors that any rank has changed; `changed` tells which this one has."""
    if not tensors:
        return {}
    flags = torch.tensor([float(flag) for flag in changed], device=next(iter(tensors.values())).device)
    anyone = wire.all_reduce_(flags, PARAMETERS).tolist()
    several = {name: tensor for (name, tensor), flag in zip(tensors.items(), anyone) if flag}
    with torch.no_grad():
        return dict(zip(several, averaged(list(several.values()), wire)))
