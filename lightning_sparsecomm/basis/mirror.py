"""A wire without a network: as if all other ranks did exactly the same."""

import copy
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparsecomm.basis.ledger import GRADIENTS, Collective, Ledger
from lightning_sparsecomm.basis.peers import Peers
from lightning_sparsecomm.basis.wire import Waiting, Wire


class MirrorWire(Wire):
    """Every collective returns what it would if all ranks had called it with the same tensor.

    Args:
        world_size: Number of ranks to play.

    Attributes:
        calls: Each collective, and the bytes that this rank handed over.
    """

    mirrors: ClassVar[bool] = True

    def __init__(self, world_size: int = 2) -> None:
        self.group = None
        self.row = GRADIENTS
        self.backend = "gloo"  # type: ignore[assignment]
        self.rank, self.world_size = 0, world_size
        self.calls: list[tuple[Collective, int]] = []
        self.ledger = Ledger(self.world_size)
        self.step = None
        self.failures = []
        self.peers = Peers(self.rank, self.world_size)
        self.closing = []

    def beside(self) -> Wire:
        other = copy.copy(self)
        other.ledger = Ledger(self.world_size)
        return other

    def calling(self, collective: Collective, handed_bytes: int, row: str | None = None) -> Waiting:
        self.calls.append((collective, handed_bytes))
        return super().calling(collective, handed_bytes, row)

    def all_reduce_(self, tensor: Tensor, row: str | None = None) -> Tensor:
        self._calling("all_reduce", tensor, row)
        return tensor.mul_(self.world_size)

    def all_reduce_later_(self, tensor: Tensor, row: str | None = None) -> Callable[[], None]:
        self.all_reduce_(tensor)
        return lambda: None

    def all_reduce_or_(self, tensor: Tensor, row: str | None = None) -> Tensor:
        self._calling("all_reduce", tensor, row)
        return tensor

    def all_to_all(self, tensor: Tensor, row: str | None = None) -> Tensor:
        self._calling("all_to_all", tensor, row)
        # As if the next rank were this one: what a rank has for itself, it need not write.
        return tensor[(self.rank + 1) % self.world_size].expand_as(tensor).clone()

    def all_to_all_of(self, parts: Sequence[Tensor], lengths: Sequence[int], row: str | None = None) -> list[Tensor]:
        self.calling("send", sum(part.nbytes for part in parts) - parts[self.rank].nbytes, row)
        return [parts[(self.rank + 1) % self.world_size].clone() for _ in parts]

    def all_gather(self, tensor: Tensor, row: str | None = None) -> Tensor:
        self._calling("all_gather", tensor, row)
        return torch.stack([tensor] * self.world_size)
