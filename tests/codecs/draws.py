"""That rounding at random is unbiased."""

import math
from collections.abc import Callable

from torch import Tensor

from lightning_sparsecomm.basis import Layout, Round, SparseVector, Vector
from lightning_sparsecomm.codecs import Compressor

DRAWS = 20_000


def check_unbiased(make: Callable[[Tensor, Round], Compressor], x: Tensor) -> None:
    """Asserts that the mean of 20,000 draws is the vector, to 4.5 standard errors of each element.

    All draws are those of one round: the vector is written 20,000 times, one after the other.
    """
    many = x.repeat(DRAWS)
    context = Round(Layout([("weight", (many.numel(),))]), step=3, seed=5)
    compressor = make(x, context)
    decoded = compressor.decode(compressor.encode(Vector(many), context), many.numel())
    check_mean_of(decoded.dense() if isinstance(decoded, SparseVector) else decoded, x)


def check_mean_of(drawn: Tensor, x: Tensor) -> None:
    """The same of what is decoded: `[20,000 · n]` for `[n]`."""
    drawn = drawn.double().view(DRAWS, x.numel())
    errors = drawn.std(0) / math.sqrt(DRAWS)
    # What does not vary, such as zero, is exact but for float32's rounding.
    assert bool(((drawn.mean(0) - x.double()).abs() <= 4.5 * errors + 1e-6 * x.double().abs()).all())
    assert bool((errors > 0).any())
