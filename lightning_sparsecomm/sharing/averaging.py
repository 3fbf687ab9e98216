"""Averages tensors over ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparsecomm.basis import PARAMETERS, Wire
from lightning_sparsecomm.basis.arguments import check_booleans, is_whole_number

# Elements per all-reduce: enough to fill the link, and few compared to the memory of a large model.
_CHUNK = 2**22


@dataclass(frozen=True)
class Averaging:
    """When to average replicas that drift, and what else to average with the parameters.

    Args:
        every: Optimizer steps between two averages.
        buffers: Whether to average floating-point buffers too, such as running means of batch normalization.
        optimizer_state: Whether to average the optimizer's floating-point state too, such as momentum.

    Raises:
        ValueError: `every` is not a whole number of at least 1.
    """

    every: int
    buffers: bool = False
    optimizer_state: bool = False

    def __post_init__(self) -> None:
        check_booleans(buffers=self.buffers, optimizer_state=self.optimizer_state)
        if not is_whole_number(self.every) or self.every < 1:
            raise ValueError(
                f"every must be a whole number of optimizer steps, at least 1; got {self.every!r}. Use the paper's 500."
            )


def average_(tensors: Iterable[Tensor], wire: Wire, row: str = PARAMETERS) -> None:
    """Replaces floating-point tensors by their means over ranks, in place, and skips others. A collective.

    Means are computed in float32 or wider, and equal to the bit on all ranks. Bytes: 4 for each element (8 in float64),
    in all-reduces of up to 4 Mi elements, in a `row` of the ledger. Shapes, dtypes and the tensors' order must be
    equal on all ranks.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            dtype = torch.promote_types(tensor.dtype, torch.float32)
            kinds.setdefault((tensor.device, dtype), []).append(tensor)
    for (_, dtype), several in kinds.items():
        for chunk in _chunks(several):
            flat = torch.cat([tensor.reshape(-1).to(dtype) for tensor in chunk])
            wire.all_reduce_(flat.div_(wire.world_size), row)
            for tensor, mean in zip(chunk, flat.split([tensor.numel() for tensor in chunk])):
                tensor.copy_(mean.view(tensor.shape))


def averaged(weights: Sequence[Tensor], wire: Wire) -> list[Tensor]:
    """The means of weights over ranks, in float32 or wider and in other memory. A collective; see `average_`."""
    means = [weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True) for weight in weights]
    average_(means, wire)
    return means


def _chunks(tensors: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    chunk: list[Tensor] = []
    elements = 0
    for tensor in tensors:
        if chunk and elements + tensor.numel() > _CHUNK:
            yield chunk
            chunk, elements = [], 0
        chunk.append(tensor)
        elements += tensor.numel()
    yield chunk
