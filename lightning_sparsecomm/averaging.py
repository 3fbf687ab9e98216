"""The average of tensors over ranks, and when it is taken."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparsecomm.checks import check_switches
from lightning_sparsecomm.wire import PARAMETERS, Wire

# Elements per all-reduce: enough to fill the link, few enough to be a small part of the memory of a large model.
_CHUNK = 2**22


@dataclass(frozen=True)
class Averaging:
    """When replicas become one again, and what of them.

    Args:
        every: Optimizer steps between two averages.
        buffers: Whether floating-point buffers, such as running means of batch normalization, are averaged too.
        optimizer_state: Whether the optimizer's floating-point state, such as momentum, is averaged too.

    Raises:
        ValueError: `every` is not a whole number of at least 1.
    """

    every: int
    buffers: bool = False
    optimizer_state: bool = False

    def __post_init__(self) -> None:
        check_switches(buffers=self.buffers, optimizer_state=self.optimizer_state)
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(
                f"every (average_every of a method) must be a whole number of optimizer steps, at least 1; got"
                f" {self.every!r}."
                " The paper averages every 500 steps."
            )


def average_(tensors: Iterable[Tensor], wire: Wire) -> None:
    """Replaces floating-point tensors by their means over ranks, in place; others are left as they are.

    The means are taken in float32 or wider, and bit-equal on all ranks. Bytes: 4 for each element (8 in float64),
    handed to all-reduces of up to 4 Mi elements.

    Args:
        tensors: Of the same shapes, dtypes and order on all ranks.
        wire: Where to communicate; entered in the ledger as `PARAMETERS`.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            dtype = torch.promote_types(tensor.dtype, torch.float32)
            kinds.setdefault((tensor.device, dtype), []).append(tensor)
    for (_, dtype), several in kinds.items():
        for chunk in _chunks(several):
            flat = torch.cat([tensor.reshape(-1).to(dtype) for tensor in chunk])
            wire.all_reduce_(flat.div_(wire.world_size), PARAMETERS)
            for tensor, mean in zip(chunk, flat.split([tensor.numel() for tensor in chunk])):
                tensor.copy_(mean.view(tensor.shape))


def _chunks(tensors: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    chunk: list[Tensor] = []
    for tensor in tensors:
        if chunk and sum(each.numel() for each in chunk) + tensor.numel() > _CHUNK:
            yield chunk
            chunk = []
        chunk.append(tensor)
    yield chunk
