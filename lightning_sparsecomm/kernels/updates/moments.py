"""Adam's moments of one rank's own gradient, and the direction that follows from them, in torch operations."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Elements at a time, so that intermediate results take no memory that counts. On CPUs, they stay in the cache.
_CHUNK, _CHUNK_ELSEWHERE = 1 << 16, 1 << 24


class Moments(NamedTuple):
    """How one tensor's gradient changes its moments, and which direction x they give.

    Kernels round each operation separately, in this order:

        g ← g + decay·weights                                (only with weights)
        m ← beta1·m + (1 − beta1)·g
        v ← beta2·v + (1 − beta2)·(coherence·(g·g))
        x ← (unbias·m) / (√(unbias_squares·v) + epsilon)

    Attributes:
        first: m, `[n]` float32 or float64, contiguous; changed in place.
        second: v, like m; changed in place.
        beta1: Factor on m.
        beta2: Factor on v.
        unbias: 1 / (1 − beta1^t) in step t, counted from 1.
        unbias_squares: 1 / (1 − beta2^t).
        epsilon: Added to the root.
        coherence: The squared mean over ranks of the gradients by their mean square; 1 for Adam on this rank alone.
        decay: Factor on the weights that are added to the gradient.
        weights: `[n]` in m's dtype, contiguous; None where nothing is added.
    """

    first: Tensor
    second: Tensor
    beta1: float = 0.9
    beta2: float = 0.999
    unbias: float = 1.0
    unbias_squares: float = 1.0
    epsilon: float = 1e-8
    coherence: float = 1.0
    decay: float = 0.0
    weights: Tensor | None = None

    def part(self, positions: slice) -> "Moments":
        """The moments of some elements; views, if the step of the slice is 1."""
        first, second = self.first[positions].contiguous(), self.second[positions].contiguous()
        weights = None if self.weights is None else self.weights[positions].contiguous()
        return self._replace(first=first, second=second, weights=weights)

    def chunks(self) -> Iterator[slice]:
        """Slices that cover all elements."""
        size, step = self.first.numel(), _CHUNK if self.first.device.type == "cpu" else _CHUNK_ELSEWHERE
        return (slice(start, min(start + step, size)) for start in range(0, size, step))


def advance_(moments: Moments, gradient: Tensor) -> None:
    """Takes a gradient of the same elements into both moments, in place."""
    gradient = _decayed(moments, gradient)
    moments.first.mul_(moments.beta1).add_(gradient * (1 - moments.beta1))
    moments.second.mul_(moments.beta2).add_(_entering(moments, gradient))


def retreat_(moments: Moments, gradient: Tensor) -> None:
    """Undoes `advance_`, to round-off of what the moments are now. With a factor of 0, a moment becomes 0."""
    gradient = _decayed(moments, gradient)
    if moments.beta1:
        moments.first.sub_(gradient * (1 - moments.beta1)).div_(moments.beta1)
    else:
        moments.first.zero_()
    if moments.beta2:
        moments.second.sub_(_entering(moments, gradient)).div_(moments.beta2)
        # Round-off must not make a second moment negative.
        moments.second.clamp_(min=0)
    else:
        moments.second.zero_()


def direction(moments: Moments) -> Tensor:
    """x for the moments as they are now, in new memory."""
    mean, square = moments.first * moments.unbias, moments.second * moments.unbias_squares
    return mean.div_(root(square).add_(moments.epsilon))


def _entering(moments: Moments, gradient: Tensor) -> Tensor:
    """What enters the second moment."""
    return (gradient * gradient).mul_(moments.coherence).mul_(1 - moments.beta2)


def root(x: Tensor) -> Tensor:
    """√x, rounded to the nearest number; it may change x."""
    # On the CPU, torch's square root is not always the nearest number.
    return torch.from_numpy(np.sqrt(x.numpy())) if x.device.type == "cpu" else x.sqrt_()


def _decayed(moments: Moments, gradient: Tensor) -> Tensor:
    return gradient if moments.weights is None else gradient + moments.weights * moments.decay
