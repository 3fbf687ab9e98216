"""Small stand-ins for a model's parameters, and what the whole model needs by what several sets of them do."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sparsecomm.sharing.gradients import NamedParameters, has_few_rows, note_few_rows
from lightning_sparsecomm.sharing.method import Method

# Rows, columns and lengths of vectors are cut to a multiple of so many, as long as there are as many: methods treat in
# another way what is very small, as a matrix that is no longer than its factors, or not a multiple of a chunk of 64.
_LEAST = 128

# Of one shape, so many parameters tell what all of them send.
_ALIKE = 3

# The part of rows that a gradient of few rows has: at most a twentieth, often far fewer, and either takes few bytes.
_FEW_ROWS = 0.01

# Headers, lengths and statuses take fewer bytes for a tensor.
_HEADERS = 64


class Halved(NamedTuple):
    """What a set of stand-ins has half of."""

    rows: bool = False
    columns: bool = False
    vectors: bool = False


HALVED = (
    Halved(),
    Halved(rows=True),
    Halved(columns=True),
    Halved(rows=True, columns=True),
    Halved(rows=True, columns=True, vectors=True),
)
"""As many sets as `features` has numbers: the whole one first, the smallest one last."""


def fraction_for(parameters: Sequence[Parameter], elements: int) -> float:
    """The part of rows, columns and vectors with which stand-ins have at most so many elements, as far as they can."""
    low, high = 0.0, 1.0
    if _elements(parameters, high) <= elements:
        return high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _elements(parameters, middle) <= elements else (low, middle)
    return low


def few_of_each_shape(method: Method, parameters: NamedParameters) -> NamedParameters:
    """Some parameters that tell what all send; all of them where a method treats matrices in several ways."""
    parts = method.parts(parameters)
    if sum(any(parameter.dim() > 1 for _, parameter in piece) for _, piece in parts) > 1:
        return parameters
    seen = Counter[torch.Size]()
    few = []
    for name, parameter in parameters:
        seen[parameter.shape] += 1
        if seen[parameter.shape] <= _ALIKE:
            few.append((name, parameter))
    return few


def stand_in(parameter: Parameter, fraction: float, halved: Halved) -> Parameter:
    """A smaller parameter. The first dimension counts its rows, all others together its columns."""
    values = torch.randn(_shape(parameter.shape, fraction, halved), device=parameter.device)
    small = Parameter(values.to(parameter.dtype))
    note_few_rows(small, has_few_rows(parameter))
    return small


def gradient_for(weight: Parameter) -> Tensor:
    """Random values with the heavy tails that gradients have; zero in most rows, where that is known."""
    normal = torch.randn(weight.shape, device=weight.device)
    gradient = normal * normal.abs() * 1e-3
    if has_few_rows(weight):
        zero = torch.randperm(len(weight), device=weight.device)[math.ceil(len(weight) * _FEW_ROWS) :]
        gradient[zero] = 0
    return gradient.to(weight.dtype)


def _shape(shape: Sequence[int], fraction: float, halved: Halved = HALVED[0]) -> list[int]:
    if len(shape) < 2:
        return [_cut(length, fraction, _LEAST, halved.vectors) for length in shape]
    rows, columns, *inner = shape
    least = -(-_LEAST // max(1, math.prod(inner)))
    return [_cut(rows, fraction, _LEAST, halved.rows), _cut(columns, fraction, least, halved.columns), *inner]


def features(shapes: Sequence[Sequence[int]]) -> list[float]:
    """What bytes and memory may grow with: tensors, rows, columns and elements of matrices, elements of vectors."""
    matrices = [(shape[0], math.prod(shape[1:])) for shape in shapes if len(shape) > 1]
    rows, columns = (float(sum(each)) for each in zip(*matrices)) if matrices else (0.0, 0.0)
    elements = float(sum(rows * columns for rows, columns in matrices))
    return [float(len(shapes)), rows, columns, elements, float(sum(shape[0] for shape in shapes if len(shape) == 1))]


def extrapolated(found: Sequence[float], sets: Sequence[Sequence[float]], whole: Sequence[float]) -> float:
    """A figure of the whole model from those of several sets of stand-ins; never below 0.

    It is taken for a sum of parts, none negative, each proportional to one of `features`. The sum that fits best is
    found among all choices of parts.

    >>> sets = [[2, rows, 0, 0, 0] for rows in (100, 50)]
    >>> round(extrapolated([110, 60], sets, [2, 1000, 0, 0, 0]))
    1010

    Args:
        found: The figure of each set.
        sets: `features` of each set.
        whole: `features` of the model.
    """
    if min(found) == max(found) > _HEADERS * whole[0]:
        # Pieces of a fixed size, such as blocks, of which stand-ins have the fewest that there can be.
        return found[0] * sum(whole[3:]) / sum(sets[0][3:])
    kinds = [kind for kind, size in enumerate(whole) if size]
    scale = np.maximum(found, 1e-9 * max(max(found), 1e-9))
    # Each row relative to its figure, and each column to the whole model: so the parts add up to the result.
    matrix = np.array([[each[kind] / whole[kind] for kind in kinds] for each in sets]) / scale[:, None]
    wanted = np.asarray(found) / scale
    best, result = math.inf, 0.0
    for count in range(1, len(kinds) + 1):
        for chosen in itertools.combinations(range(len(kinds)), count):
            part = matrix[:, chosen]
            amounts = np.linalg.lstsq(part, wanted, rcond=None)[0]
            error = float(np.square(part @ amounts - wanted).sum())
            # Of sums that fit alike, the one of fewer parts.
            if (amounts >= 0).all() and error < best - 1e-9:
                best, result = error, float(amounts.sum())
    return result


def _elements(parameters: Sequence[Parameter], fraction: float) -> int:
    return sum(math.prod(_shape(parameter.shape, fraction)) for parameter in parameters)


def _cut(length: int, fraction: float, least: int, halved: bool) -> int:
    kept = length if fraction == 1 else min(length, least * max(1, round(length * fraction / least)))
    return -(-kept // 2) if halved else kept
