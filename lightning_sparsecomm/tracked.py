"""Tensors of a model of which each rank changes its own: who has changed what, and the average of it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparsecomm.averaging import average_
from lightning_sparsecomm.wire import PARAMETERS, Wire

# Elements that tell whether a tensor has changed of which no copy is kept.
_SAMPLE = 4096


class _Mark(NamedTuple):
    """How a tensor was when all ranks had it equal. Its version alone would not do: batch normalization and writes to
    `.data` leave it as it is."""

    tensor: Tensor
    version: int
    sample: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> "_Mark":
        return cls(tensor, tensor._version, _sample(tensor).clone())


def _sample(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten()[:: tensor.numel() // _SAMPLE | 1]


class Tracked:
    """Some tensors by name. Those that no rank has changed since they were last equal are neither sent nor touched.

    Args:
        tensors: Floating-point tensors as they are now, of the same names on all ranks. Asked for each time, since a
            module may put another tensor in the place of a buffer.
        wire: Where to communicate.
    """

    def __init__(self, tensors: Callable[[], dict[str, Tensor]], wire: Wire) -> None:
        self._tensors = tensors
        self._wire = wire
        self._marks: dict[str, _Mark] = {}
        self._shared: dict[str, Tensor] = {}

    def mark(self, copied: Callable[[str], bool] = lambda name: False) -> None:
        """Takes the tensors as they are, equal on all ranks.

        Args:
            copied: Of which a copy is kept from now on; of others, once they have changed.
        """
        current = self._tensors()
        self._marks = {name: _Mark.of(tensor) for name, tensor in current.items()}
        self._shared = {name: tensor.detach().clone() for name, tensor in current.items() if copied(name)}

    def average(self) -> None:
        """Averages what some rank has changed; all ranks call it together. Bytes: 4 for each name, and the average's.

        Entered in the ledger as `PARAMETERS`.
        """
        current = self._tensors()
        if not current:
            return
        device = next(iter(current.values())).device
        flags = torch.tensor([float(self._changed(*item)) for item in current.items()], device=device)
        changed = self._wire.all_reduce_(flags, PARAMETERS).tolist()
        several = {name: tensor for (name, tensor), flag in zip(current.items(), changed) if flag}
        with torch.no_grad():
            average_([tensor.detach() for tensor in several.values()], self._wire)
        for name, tensor in several.items():
            self._marks[name] = _Mark.of(tensor)
            self._shared[name] = tensor.detach().clone()

    def shared(self) -> list[tuple[Tensor, Tensor]]:
        """What this rank has changed, each with the value that all ranks had when last they were equal, if kept."""
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
