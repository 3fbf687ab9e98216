"""The quantizers of the literature in plain NumPy, all ranks in one process, written from the papers.

Independent of the package. Each quantizer is given the random numbers that the ranks draw. What the wire holds as
float32 is rounded to that.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Shapes = Sequence[tuple[int, ...]]


def on_the_wire(number: float) -> float:
    return float(np.float32(number))


def qsgd(vector: Array, draws: Array, levels: int, bucket: int, norm: str) -> Array:
    """QSGD, section 3.1: the level below or above, so that the mean is the element."""
    result = np.zeros_like(vector)
    for begin in range(0, len(vector), bucket):
        part = vector[begin : begin + bucket]
        length = math.sqrt(sum(float(v) ** 2 for v in part)) if norm == "l2" else max(abs(float(v)) for v in part)
        length = on_the_wire(length)
        for i, v in enumerate(part):
            place = abs(v) / length * levels
            below = math.floor(place)
            # With probability `place - below`, the draw is in the upper part of [0, 1).
            level = below + (1 if draws[begin + i] >= 1 - (place - below) else 0)
            result[begin + i] = np.sign(v) * length * level / levels
    return result


def natural(vector: Array, draws: Array) -> Array:
    """Natural compression, definition 1: the power of two below or above."""
    result = np.zeros_like(vector)
    for i, v in enumerate(vector):
        if v != 0:
            below = 2.0 ** math.floor(math.log2(abs(v)))
            above_with = abs(v) / below - 1
            result[i] = np.sign(v) * below * (2 if draws[i] >= 1 - above_with else 1)
    return result


def two_means(vector: Array, shapes: Shapes) -> Array:
    """1-bit SGD: a column's mean of what is not negative, and of what is."""
    result, begin = np.zeros_like(vector), 0
    for shape in shapes:
        size = math.prod(shape)
        matrix, into = (each[begin : begin + size].reshape(shape[0], -1) for each in (vector, result))
        for column in range(matrix.shape[1]):
            for negative in (False, True):
                members = [row for row in range(len(matrix)) if (matrix[row, column] < 0) == negative]
                if members:
                    into[members, column] = on_the_wire(float(np.mean([matrix[row, column] for row in members])))
        begin += size
    return result


def scaled_signs(vector: Array, shapes: Shapes) -> Array:
    """EF-signSGD, layer by layer: the signs times the 1-norm by the number of elements."""
    result, begin = np.zeros_like(vector), 0
    for shape in shapes:
        part = vector[begin : begin + math.prod(shape)]
        scale = on_the_wire(sum(abs(float(v)) for v in part) / len(part))
        result[begin : begin + len(part)] = [scale if v >= 0 else -scale for v in part]
        begin += len(part)
    return result


class WithErrorFeedback:
    """The mean over ranks of what a quantizer makes of gradient plus error; what it loses is the next error."""

    def __init__(self, world_size: int, size: int, quantize: Callable[[Array], Array]) -> None:
        self.quantize = quantize
        self.residuals = [np.zeros(size) for _ in range(world_size)]

    def step(self, gradients: Sequence[Array]) -> Array:
        sent = []
        for residual, gradient in zip(self.residuals, gradients, strict=True):
            residual += gradient
            sent.append(self.quantize(residual.copy()))
            residual -= sent[-1]
        return np.asarray(sum(sent) / len(sent))


def terngrad(gradients: Sequence[Array], draws: Sequence[Array], shapes: Shapes, clip: float | None) -> Array:
    """TernGrad, algorithm 1, with gradient clipping (equation 13) and scales shared by all ranks (section 3.3)."""
    total, begin = np.zeros_like(gradients[0]), 0
    for shape in shapes:
        at = slice(begin, begin + math.prod(shape))
        limited = []
        for gradient in gradients:
            part = gradient[at]
            # The paper takes the elements' mean to be zero.
            sigma = math.sqrt(sum(float(v) ** 2 for v in part) / len(part))
            most = max(abs(float(v)) for v in part)
            most = on_the_wire(most if clip is None else min(most, clip * sigma))
            limited.append([min(max(float(v), -most), most) for v in part])
        scale = max(on_the_wire(max(abs(v) for v in part)) for part in limited)
        for part, drawn in zip(limited, draws, strict=True):
            for i, v in enumerate(part):
                total[begin + i] += scale * np.sign(v) if drawn[begin + i] < abs(v) / scale else 0.0
        begin = at.stop
    return total / len(gradients)


def majority(gradients: Sequence[Array]) -> Array:
    """signSGD with majority vote, algorithm 1: the sign of the sum of the ranks' signs."""
    return np.array([np.sign(sum(np.sign(gradient[i]) for gradient in gradients)) for i in range(len(gradients[0]))])
