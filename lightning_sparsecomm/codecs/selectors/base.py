"""The base class of selectors."""

from abc import ABC, abstractmethod

from torch import Tensor

from lightning_sparsecomm.basis.parts import Part
from lightning_sparsecomm.basis.rounds import Round


class Selector(Part, ABC):
    """Chooses the elements to send. Frozen and pure.

    >>> class First(Selector):
    ...     # Sends the first k elements of the whole vector.
    ...     def select(self, x: Tensor, context: Round) -> Tensor:
    ...         return torch.arange(self.count(context), device=x.device)
    ...     def count(self, context: Round) -> int:
    ...         return k_of(0.01, context.layout.size)
    >>> First().select(torch.ones(200), Round(Layout([("weight", (200,))])))
    tensor([0, 1])
    """

    @abstractmethod
    def select(self, x: Tensor, context: Round) -> Tensor:
        """The positions to send.

        Args:
            x: `[context.layout.size]` float32 or float64, finite. Not changed.
            context: Layout, step and seeds of this round.

        Returns:
            `[k]` int64, strictly increasing, on the device of `x`; `k` is at most `count(context)`.
        """

    @abstractmethod
    def count(self, context: Round) -> int:
        """The greatest number of positions that `select` returns in this round, equal on all ranks."""


def k_of(density: float, size: int) -> int:
    """k: how many of `size` elements to send at a density; at least one if there are any.

    >>> k_of(0.01, 250), k_of(0.01, 10), k_of(0.01, 0)
    (2, 1, 0)
    """
    return min(size, max(1, round(density * size)))
