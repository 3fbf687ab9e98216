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

from lightning_sparsecomm.sharing.gradients import NamedParameters, few_rows_of, has_few_rows, note_few_rows
from lightning_sparsecomm.sharing.method import Method

# Rows, columns and lengths of vectors are cut to a multiple of so many, as long as there are as many: methods treat in
# another way what is very small, as a matrix that is no longer than its factors, or not a multiple of a chunk of 64.
_LEAST = 128

# Of one shape, so many parameters tell what all of them send.
_ALIKE = 3

# Headers, lengths and statuses take fewer bytes for a tensor.
_HEADERS = 64


class Halved(NamedTuple):
    """What a set of stand-ins has half of; tables of few rows have half of their rows with `tables` alone."""

    rows: bool = False
    columns: bool = False
    vectors: bool = False
    tables: bool = False


HALVED = (
    Halved(),
    Halved(rows=True),
    Halved(columns=True),
    Halved(rows=True, columns=True),
    Halved(rows=True, columns=True, vectors=True),
)
"""As many sets as `features` has numbers without tables: the whole one first, the smallest one last."""

HALVED_TABLES = Halved(tables=True)
"""One set more, where there are tables."""


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


def stand_in(
    parameter: Parameter, fraction: float = 1.0, halved: Halved = HALVED[0], by_rows: bool = False
) -> Parameter:
    """A smaller parameter. The first dimension counts its rows, all others together its columns.

    Args:
        parameter: The parameter.
        fraction: How much smaller.
        halved: What it has half of, besides.
        by_rows: Whether a table of few rows is to be one as well.
    """
    rows = few_rows_of(parameter) if by_rows else 0
    shape = _shape(parameter.shape, fraction, Halved(rows=halved.tables) if rows else halved)
    small = Parameter(torch.randn(shape, device=parameter.device).to(parameter.dtype))
    note_few_rows(small, math.ceil(rows * shape[0] / len(parameter)) if rows else 0)
    return small


def gradient_for(weight: Parameter) -> Tensor:
    """Random values with the heavy tails that gradients have, in all rows or in few."""
    normal = torch.randn(weight.shape, device=weight.device)
    gradient = normal * normal.abs() * 1e-3
    if has_few_rows(weight):
        gradient[torch.randperm(len(weight), device=weight.device)[few_rows_of(weight) :]] = 0
    return gradient.to(weight.dtype)


def _shape(shape: Sequence[int], fraction: float, halved: Halved = HALVED[0]) -> list[int]:
    if len(shape) < 2:
        return [_cut(length, fraction, _LEAST, halved.vectors) for length in shape]
    rows, columns, *inner = shape
    least = -(-_LEAST // max(1, math.prod(inner)))
    return [_cut(rows, fraction, _LEAST, halved.rows), _cut(columns, fraction, least, halved.columns), *inner]


def features(parameters: Sequence[Parameter], by_rows: bool = False) -> list[float]:
    """What bytes and memory may grow with: tensors, rows, columns and elements of matrices, elements of vectors; and,
    `by_rows`, elements of tables of few rows, which then are no matrices."""
    tables = [each for each in parameters if by_rows and has_few_rows(each)]
    apart = {id(each) for each in tables}
    matrices = [
        (each.shape[0], math.prod(each.shape[1:])) for each in parameters if each.dim() > 1 and id(each) not in apart
    ]
    rows, columns = (float(sum(each)) for each in zip(*matrices)) if matrices else (0.0, 0.0)
    elements = float(sum(rows * columns for rows, columns in matrices))
    vectors = float(sum(each.numel() for each in parameters if each.dim() == 1))
    return [float(len(parameters)), rows, columns, elements, vectors, float(sum(each.numel() for each in tables))]


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
