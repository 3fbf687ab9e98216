"""A wire without a network: as if another rank did exactly the same."""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_sparsecomm.basis.ledger import GRADIENTS, Ledger
from lightning_sparsecomm.basis.peers import Peers
from lightning_sparsecomm.basis.wire import Wire


class MirrorWire(Wire):
    """Every collective returns what it would if both of two ranks had called it with the same tensor."""

    def __init__(self) -> None:
        self.group = None
        self.row = GRADIENTS
        self.backend = "gloo"  # type: ignore[assignment]
        self.rank, self.world_size = 0, 2
        self.ledger = Ledger(self.world_size)
        self.step = None
        self.failures = []
        self.peers = Peers(self.rank, self.world_size)

    def all_reduce_(self, tensor: Tensor, row: str | None = None) -> Tensor:
        return tensor.mul_(self.world_size)

    def all_reduce_later_(self, tensor: Tensor, row: str | None = None) -> Callable[[], None]:
        self.all_reduce_(tensor)
        return lambda: None

    def all_reduce_or_(self, tensor: Tensor, row: str | None = None) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, row: str | None = None) -> Tensor:
        return torch.stack([tensor] * self.world_size)
