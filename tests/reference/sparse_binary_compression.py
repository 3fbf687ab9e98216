"""Sparse Binary Compression as in the paper, in plain NumPy, all ranks in one process.

Sattler et al. 2018: algorithm 1 (rounds), 2 (binarization), 3 and 4 (Golomb coding of positions, and back). The caller
makes the local steps between rounds.
"""

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from tests.reference.optimizers import SGD
from tests.reference.selection import k_of, top_k

Vector = NDArray[np.float32] | NDArray[np.float64]

GOLDEN_RATIO = (math.sqrt(5) + 1) / 2


class SparseBinaryCompression:
    """Each rank's weights are one vector: its tensors, of `sizes`, in order. All ranks share `anchor`.

    The residual is multiplied by `decay` before it is added. With `outer`, the mean of what ranks sent is the negative
    gradient of an outer step.
    """

    def __init__(
        self,
        ranks: int,
        sizes: list[int],
        density: float,
        every: int,
        start: Vector,
        decay: float = 1.0,
        outer: SGD | None = None,
    ) -> None:
        self.anchor = start.copy()
        self.residuals = [np.zeros_like(self.anchor) for _ in range(ranks)]
        self.tensors = [slice(a, b) for a, b in itertools.pairwise(np.cumsum([0, *sizes]))]
        self.density, self.every, self.decay, self.outer = density, every, decay, outer

    def due(self, step: int) -> bool:
        """Whether ranks communicate after local step `step`, counted from 1."""
        return step % self.every == 0

    def exchange(self, weights: list[Vector]) -> list[Vector]:
        """One round: each rank's ΔW*, from its weights after the local steps. Ranks continue from `anchor`."""
        sents = []
        for rank, own in enumerate(weights):
            delta = (own - self.anchor) + self.decay * self.residuals[rank]
            sent = np.zeros_like(delta)
            for tensor in self.tensors:
                sent[tensor] = binarized(delta[tensor], self.density)
            self.residuals[rank] = delta - sent
            sents.append(sent)
        mean = np.zeros_like(self.anchor)
        for sent in sents:
            mean += sent
        mean /= len(weights)
        if self.outer is None:
            self.anchor = self.anchor + mean
        else:
            self.anchor = self.outer.step(self.anchor, -mean)
        return sents


def binarized(delta: Vector, density: float) -> Vector:
    """Algorithm 2 for one tensor: one value at all positions that are sent, and zeros elsewhere."""
    k = k_of(density, len(delta))
    # No two magnitudes are equal here, so the seed that breaks ties has no effect.
    positive = top_k(np.maximum(delta, 0), k, seed=0)
    negative = top_k(np.maximum(-delta, 0), k, seed=0)
    above, below = mean_of(delta[positive]), mean_of(-delta[negative])
    sent = np.zeros_like(delta)
    if above >= below:
        sent[positive] = above
    else:
        sent[negative] = -below
    return sent


def mean_of(values: Vector) -> np.float32:
    """The mean in float64, rounded to float32. It is 0 for no values."""
    return np.float32(values.astype(np.float64).mean()) if len(values) else np.float32(0)


def golomb_parameter(density: float) -> int:
    """b* of algorithm 3: the number of bits of a gap's remainder."""
    if density == 1:
        return 0
    return max(0, 1 + math.floor(math.log2(math.log(GOLDEN_RATIO - 1) / math.log(1 - density))))


def golomb_encode(positions: list[int], b: int) -> str:
    """Algorithm 3, as '0' and '1'. For each gap: quotient in ones, a zero, remainder in `b` bits, highest first."""
    bits, previous = "", -1
    for position in positions:
        quotient, remainder = divmod(position - previous - 1, 2**b)
        bits += "1" * quotient + "0"
        for place in reversed(range(b)):
            bits += str(remainder // 2**place % 2)
        previous = position
    return bits


def golomb_decode(bits: str, b: int) -> list[int]:
    """Algorithm 4: the positions that `golomb_encode` wrote."""
    positions, position, at = [], -1, 0
    while at < len(bits):
        quotient = 0
        while bits[at] == "1":
            quotient += 1
            at += 1
        remainder = 0
        for bit in bits[at + 1 : at + 1 + b]:
            remainder = 2 * remainder + int(bit)
        at += 1 + b
        position += quotient * 2**b + remainder + 1
        positions.append(position)
    return positions
