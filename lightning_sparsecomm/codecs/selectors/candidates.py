"""Finds the k largest elements without ranking all: a sampled threshold leaves few candidates."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.codecs.selectors.base import Selector
from lightning_sparsecomm.kernels import kernels_for

# Sample size in units of √n. Ranking the sample takes well under a millisecond, and only a few times k elements pass.
_SAMPLE = 8

# Of so many elements, a larger part than one of these is ranked sooner without candidates: measured on CPUs, for whose
# kernels it is meant. Those for GPUs note nothing.
_LARGE, _MANY_OF_LARGE = 2**16, 32

# The smallest positive number of each dtype, which every non-zero element reaches.
_LEAST = {
    dtype: torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)
}


class Wanted(NamedTuple):
    """Elements `start` to `stop` of a vector, of which the k largest will be selected; k is at least 1."""

    start: int
    stop: int
    k: int

    @property
    def wants_many(self) -> bool:
        """Whether to rank all elements usually takes less time than to find candidates, and to rank these."""
        size = self.stop - self.start
        return self.k * (_MANY_OF_LARGE if size >= _LARGE else 2) >= size


Hints = Mapping[tuple[int, int, int], Tensor]
"""For a stretch `(start, stop, k)`, sorted positions that include its k largest elements or all its non-zeros."""


class HintedSelector(Selector):
    """A selector that ranks by magnitude, and is faster if it is told which elements to rank.

    The memory that computes the vector can note these candidates in the same pass. Hints never change the result.
    """

    @abstractmethod
    def wanted(self, context: Round) -> Sequence[Wanted]:
        """The stretches to note candidates for, in order and without overlap."""

    @abstractmethod
    def select_hinted(self, x: Tensor, context: Round, hints: Hints) -> Tensor:
        """As `select`, but ranks only the hinted candidates of a stretch that has hints."""

    def select(self, x: Tensor, context: Round) -> Tensor:
        return self.select_hinted(x, context, {})


def candidates_of(x: Tensor, k: int) -> Tensor | None:
    """Sorted positions, few, that include the k largest elements of `x` (`[n]`) or all its non-zeros.

    None if a sample of `x` gives no useful threshold.
    """
    sample = x[:: sample_stride(x.numel())].abs()
    threshold = threshold_for(sample, x.numel(), k)
    if threshold is None:
        return None
    found = kernels_for(x.device, x.dtype).reaching(x, threshold, candidate_room(k))
    return found if found is not None and enough(found, k, threshold) else None


def sample_stride(size: int) -> int:
    """The step between sampled elements. It is odd, so a matrix with rows of 2^i elements is sampled in all columns."""
    return int(size**0.5 / _SAMPLE) | 1


def threshold_for(sample: Tensor, size: int, k: int) -> float | None:
    """A threshold that most likely at least k of `size` magnitudes reach, and few more, given a sample of them.

    It leaves a margin of four standard deviations: too few candidates are rare, and cost only time. It is the smallest
    positive number if all non-zeros are candidates, and None if most elements would be.
    """
    expected = k * sample.numel() / size
    rank = int(expected + 4 * expected**0.5 + 8)
    if 2 * rank > sample.numel():
        return None
    threshold = kernels_for(sample.device, sample.dtype).kth_largest(sample, rank)
    # Zero means that there are most likely fewer than k non-zeros. All of them are then candidates.
    return threshold or _LEAST[sample.dtype]


def candidate_room(k: int) -> int:
    """The greatest number of candidates for the k largest elements. With more, ranking all elements is as fast."""
    return 8 * k + 4096


def enough(candidates: Tensor, k: int, threshold: float) -> bool:
    """Whether candidates include the k largest elements or all non-zeros, given the threshold that found them."""
    return candidates.numel() >= k or threshold in _LEAST.values()
