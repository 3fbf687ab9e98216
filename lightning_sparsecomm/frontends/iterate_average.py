"""The average of all iterates that theory speaks of, for Lightning's callback `WeightAveraging`."""

import math

from torch import Tensor

from lightning_sparsecomm.basis.arguments import is_number


class IterateAverage:
    """Averages the weights after all steps, the later the more: ŵ = Σ q_t·w_t / Σ q_t with q_t = (ξ + t)².

    A function for `avg_fn` of torch's `AveragedModel`, and so of Lightning's callback `WeightAveraging` (since
    Lightning 2.6), which validates and saves the average. With weights that are equal on all ranks, so is the average.

    Source: Sketched-SGD (Ivkin et al. 2019), algorithm 2; Stich et al. 2018, Sparsified SGD with Memory.

    >>> average = IterateAverage(shift=1)
    >>> weights = torch.tensor(2.0)  # w_1; then w_2 = 5
    >>> average(weights, torch.tensor(5.0), 1)  # (4 · 2 + 9 · 5) / 13
    tensor(4.0769)

    Args:
        shift: ξ, 0 or more. The theory has about 2 + d/k, for k of d elements sent in each step.

    Raises:
        ValueError: `shift` is negative or no finite number.
    """

    def __init__(self, shift: float = 1.0) -> None:
        if not (is_number(shift) and 0 <= shift < math.inf):
            raise ValueError(f"shift must be 0 or more: ξ in (ξ + t)²; got {shift!r}. Use 1, or 2 + 1 / density.")
        self.shift = shift

    def __call__(self, averaged: Tensor, current: Tensor, number: Tensor | int) -> Tensor:
        """The average of the weights after `number` + 1 steps, from that after `number`."""
        step = int(number) + 1
        return averaged + (current - averaged) * (self._last(step) / self._sum(step))

    def _last(self, step: int) -> float:
        return (self.shift + step) ** 2

    def _sum(self, step: int) -> float:
        """Of (ξ + s)² for s from 1 to `step`."""
        squares = step * (step + 1) * (2 * step + 1) / 6
        return step * self.shift**2 + self.shift * step * (step + 1) + squares

    def __repr__(self) -> str:
        return f"IterateAverage(shift={self.shift!r})"
