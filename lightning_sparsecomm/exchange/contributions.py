"""A gather whose ranks' contributions do not all count alike."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_sparsecomm.basis import SparseVector
from lightning_sparsecomm.basis.arguments import check_booleans
from lightning_sparsecomm.basis.layout import add_to_, mean, values_of
from lightning_sparsecomm.codecs import Compressor
from lightning_sparsecomm.exchange.gather import Gather


class GatherContributions(Gather):
    """A gather that can average an element over those ranks that sent it, and bound the norm of what a rank sends.

    Nothing more is sent: each rank has all payloads, and all compute the same.

    Source: SparseLoCo's public code does both (templar). The paper has the mean over all ranks.

    >>> GatherContributions(SparseCodec(TopK(0.01)), of_senders=True).of_senders
    True

    Args:
        compressor: As for `Gather`.
        of_senders: Whether an element is divided by the number of ranks that sent it, and not by that of all. Then an
            element that one rank alone has sent moves W times as far, and more is shared than residuals forget.
        clip_to_median: Whether a rank's part is scaled down to the median of the ranks' norms, of an even number the
            lower one. What that takes from it stays in its residual.

    Raises:
        TypeError: A switch is neither True nor False.
    """

    may_reduce: bool = False

    def __init__(self, compressor: Compressor, of_senders: bool = False, clip_to_median: bool = False) -> None:
        check_booleans(of_senders=of_senders, clip_to_median=clip_to_median)
        super().__init__(compressor)
        self.of_senders, self.clip_to_median = of_senders, clip_to_median

    def combined(
        self, vectors: Iterator[SparseVector | Tensor], own: int, dtype: torch.dtype
    ) -> tuple[SparseVector | Tensor, SparseVector | Tensor]:
        sent = list(vectors)
        if self.clip_to_median:
            norms = [float(torch.linalg.vector_norm(values_of(each).double())) for each in sent]
            # torch's median of an even number is the lower one.
            largest = float(torch.tensor(norms, dtype=torch.float64).median())
            sent = [_scaled(each, largest / norm) if norm > largest else each for each, norm in zip(sent, norms)]
        if not self.of_senders:
            return mean(iter(sent), dtype), sent[own]
        total = torch.zeros(_size(sent[0]), dtype=dtype, device=values_of(sent[0]).device)
        senders = torch.zeros_like(total)
        for each in sent:
            add_to_(total, each)
            values = values_of(each)
            add_to_(
                senders,
                each._replace(values=torch.ones_like(values))
                if isinstance(each, SparseVector)
                else (values != 0).to(dtype),
            )
        return total.div_(senders.clamp_(min=1)), sent[own]

    def __repr__(self) -> str:
        return (
            f"GatherContributions({self.compressor!r}, of_senders={self.of_senders},"
            f" clip_to_median={self.clip_to_median})"
        )


def _size(vector: SparseVector | Tensor) -> int:
    return vector.size if isinstance(vector, SparseVector) else vector.numel()


def _scaled(vector: SparseVector | Tensor, factor: float) -> SparseVector | Tensor:
    return vector._replace(values=vector.values * factor) if isinstance(vector, SparseVector) else vector * factor
