"""All elements that reach a fixed threshold."""

import math
from dataclasses import dataclass

from torch import Tensor

from lightning_sparsecomm.basis.arguments import is_number
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.codecs.selectors.base import Selector


@dataclass(frozen=True)
class Threshold(Selector):
    """Selects each element whose magnitude is at least `threshold`, however many these are. Use it with error feedback.

    Source: Strom 2015, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing.

    >>> from lightning_sparsecomm.basis.layout import Layout
    >>> Threshold(0.5).select(torch.tensor([0.5, -2.0, 0.4, 0.0]), Round(Layout([("weight", (4,))])))
    tensor([0, 1])

    Args:
        threshold: In units of the vector's elements.

    Raises:
        ValueError: `threshold` is not positive, or not finite.
    """

    threshold: float = 0.01

    def __post_init__(self) -> None:
        check_threshold("threshold", self.threshold)

    def select(self, x: Tensor, context: Round) -> Tensor:
        return (x.abs() >= self.threshold).nonzero().view(-1)

    def count(self, context: Round) -> int:
        return context.layout.size


def check_threshold(name: str, threshold: float) -> None:
    """Raises `ValueError` unless `threshold` is a number that is positive and finite."""
    if not (is_number(threshold) and 0 < threshold < math.inf):
        raise ValueError(
            f"{name} must be positive and finite: the magnitude from which on an element is sent; got {threshold!r}."
            " Use 0.01, or ten times the root mean square of a gradient's elements."
        )
