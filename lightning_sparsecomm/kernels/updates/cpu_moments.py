"""Adam's moments in numba: one pass changes both moments and the residual."""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from lightning_sparsecomm.kernels.numba_jit import Floats, Scalar, compiled, compiled_to_divide
from lightning_sparsecomm.kernels.updates.moments import Moments
from lightning_sparsecomm.kernels.updates.reference import LIMIT

# Elements per piece: small enough for the L1 cache, so that checks and sums do not read memory twice.
_PIECE = 2048


class _Vectors(NamedTuple):
    """The vectors of an update, `[n]`. Without decay, `weights` is the gradient."""

    residual: Floats
    first: Floats
    second: Floats
    gradient: Floats
    weights: Floats


class _Numbers(NamedTuple):
    """The numbers of `Moments` and of the update, in the dtype of the vectors."""

    keep: Scalar
    scale: Scalar
    beta1: Scalar
    entering: Scalar
    beta2: Scalar
    entering_squares: Scalar
    unbias: Scalar
    unbias_squares: Scalar
    epsilon: Scalar
    coherence: Scalar
    decay: Scalar
    limit: Scalar


def add_direction_(
    residual: Tensor,
    gradient: Tensor,
    moments: Moments,
    keep: float,
    scale: float,
    checked: bool,
) -> bool:
    """Advances the moments and adds their direction to the residual.

    Args:
        residual: `[n]` float32 or float64, contiguous; changed in place.
        gradient: `[n]` in the residual's dtype, contiguous.
        moments: Both moments are changed in place.
        keep: Factor on the residual.
        scale: Factor on the gradient.
        checked: Whether gradients that are NaN, or not below `LIMIT` in magnitude, count as 0.

    Returns:
        Whether no gradient was excluded.
    """
    r, g = residual.numpy(), gradient.numpy()
    weights = g if moments.weights is None else moments.weights.numpy()
    vectors = _Vectors(r, moments.first.numpy(), moments.second.numpy(), g, weights)
    numbers = (
        *(keep, scale, moments.beta1, 1 - moments.beta1, moments.beta2, 1 - moments.beta2),
        *(moments.unbias, moments.unbias_squares, moments.epsilon, moments.coherence, moments.decay, LIMIT),
    )
    typed = _Numbers._make(map(r.dtype.type, numbers))
    return bool(_update(vectors, typed, moments.weights is not None, checked))


@compiled_to_divide
def _piece(vectors: _Vectors, numbers: _Numbers, decays: bool, checked: bool) -> bool:
    residual, first, second, gradient, weights = vectors
    zero = residual.dtype.type(0)
    any_excluded = False
    for i in range(residual.size):
        excluded = checked and not abs(gradient[i]) < numbers.limit
        any_excluded |= excluded
        g = numbers.scale * (zero if excluded else gradient[i])
        if decays:
            g = g + weights[i] * numbers.decay
        m = numbers.beta1 * first[i] + g * numbers.entering
        v = numbers.beta2 * second[i] + ((g * g) * numbers.coherence) * numbers.entering_squares
        first[i] = m
        second[i] = v
        root = np.sqrt(v * numbers.unbias_squares) + numbers.epsilon
        residual[i] = numbers.keep * residual[i] + (m * numbers.unbias) / root
    return not any_excluded


@compiled
def _update(vectors: _Vectors, numbers: _Numbers, decays: bool, checked: bool) -> bool:
    in_range = True
    residual, first, second, gradient, weights = vectors
    for start in range(0, residual.size, _PIECE):
        part = slice(start, start + _PIECE)
        piece = _Vectors(residual[part], first[part], second[part], gradient[part], weights[part])
        in_range &= _piece(piece, numbers, decays, checked)
    return in_range
