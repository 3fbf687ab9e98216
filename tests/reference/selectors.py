"""The selectors of the literature in plain NumPy, all ranks in one process, written from the papers.

Independent of the package. What the wire holds as float32 is rounded to that.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tests.reference.quantizers import on_the_wire
from tests.reference.selection import k_of, top_k

Array = NDArray[np.float64]
Shapes = Sequence[tuple[int, ...]]
Quantize = Callable[[Array, Array], Array]


class WithResidual:
    """Each rank adds its gradient to its residual, sends what `quantize` makes of the two, and keeps the rest.

    Args:
        world_size: Number of ranks.
        size: Elements of a gradient.
        quantize: What is sent, given the residual with the gradient in it, and the gradient.
    """

    def __init__(self, world_size: int, size: int, quantize: Quantize) -> None:
        self.quantize = quantize
        self.residuals = [np.zeros(size) for _ in range(world_size)]

    def step(self, gradients: Sequence[Array]) -> Array:
        """The mean over ranks of what they send."""
        sent = []
        for residual, gradient in zip(self.residuals, gradients, strict=True):
            residual += gradient
            sent.append(self.quantize(residual.copy(), gradient))
            residual -= sent[-1]
        return np.asarray(sum(sent) / len(sent))


def strom(residual: Array, threshold: float, once: bool) -> Array:
    """Strom 2015, algorithm 1: τ where the residual reaches τ, −τ where it reaches −τ; else as often as it fits."""
    tau, sent = on_the_wire(threshold), np.zeros_like(residual)
    for i, value in enumerate(residual):
        if abs(value) >= threshold:
            times = 1 if once else max(1, math.floor(abs(value) / tau))
            sent[i] = on_the_wire(math.copysign(times * tau, value))
    return sent


def dryden(residual: Array, shapes: Shapes, proportion: float, seed: int) -> Array:
    """Dryden et al. 2016, section III: of each matrix the largest positive and the largest negative part, as means."""
    sent, begin = np.zeros_like(residual), 0
    for shape in shapes:
        part = residual[begin : begin + math.prod(shape)]
        for sign in (1, -1):
            side = [i for i, value in enumerate(part) if sign * value > 0]
            if side:
                chosen = [side[j] for j in top_k(part[side], k_of(proportion, len(side)), seed)]
                sent[[begin + i for i in chosen]] = on_the_wire(float(np.mean(part[chosen])))
        begin += len(part)
    return sent


def adacomp(residual: Array, gradient: Array, shapes: Shapes, sizes: tuple[int, int], all_bins: bool) -> Array:
    """Chen et al. 2018, algorithm 2, whose G is the residual with the gradient in it, and dW the gradient.

    Args:
        residual: G.
        gradient: dW.
        shapes: Of the tensors.
        sizes: Elements in a bin: of a convolution, and of any other tensor.
        all_bins: As the paper; else, elements below half of the scale are not sent.
    """
    sent, begin = np.zeros_like(residual), 0
    for shape in shapes:
        end, length = begin + math.prod(shape), sizes[len(shape) < 3]
        bins = [range(first, min(first + length, end)) for first in range(begin, end, length)]
        largest = [max(abs(float(residual[i])) for i in each) for each in bins]
        scale = sum(largest) / len(largest)
        for each, most in zip(bins, largest):
            for i in each:
                soft = residual[i] + gradient[i]
                if abs(soft) >= most and residual[i] != 0 and (all_bins or abs(residual[i]) >= scale / 2):
                    sent[i] = math.copysign(on_the_wire(scale), residual[i])
        begin = end
    return sent


def shares(vector: Array, shapes: Shapes, density: float, by: str) -> list[int]:
    """How many elements of each tensor are sent: one, and more in proportion to its norm or effective size."""
    parts = np.split(vector, np.cumsum([math.prod(shape) for shape in shapes])[:-1])
    room = [len(part) - 1 for part in parts]
    weights = []
    for part in parts:
        magnitudes = np.abs(part)
        chances = magnitudes[magnitudes > 0] / magnitudes.sum()
        entropy = -float((chances * np.log(chances)).sum())
        weights.append(float(np.sqrt((part**2).sum())) if by == "norm" else math.exp(entropy))
    given, left = [0.0] * len(parts), k_of(density, len(vector)) - len(parts)
    open_ = set(range(len(parts)))
    while open_:
        factor = (left - sum(given)) / sum(weights[i] for i in open_)
        full = {i for i in open_ if weights[i] * factor >= room[i]}
        for i in full or open_:
            given[i] = float(room[i]) if full else weights[i] * factor
        open_ = open_ - full if full else set()
    # Rounded so that the sum is.
    ends = [round(sum(given[: i + 1])) for i in range(len(given))]
    return [1 + end - before for before, end in zip([0, *ends], ends)]


def largest(vector: Array, counts: Sequence[int], shapes: Shapes, seed: int) -> Array:
    """So many of the largest elements of each tensor, as they are."""
    sent, begin = np.zeros_like(vector), 0
    for shape, count in zip(shapes, counts, strict=True):
        size = math.prod(shape)
        chosen = [begin + i for i in top_k(vector[begin : begin + size], count, seed)]
        sent[chosen] = vector[chosen]
        begin += size
    return sent
