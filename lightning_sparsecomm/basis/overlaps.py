"""Tensors that share memory, such as a weight and another one that is its transpose."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch import Tensor


def overlap(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have a byte in common. Columns of one matrix have none, though their rows interleave.

    >>> table = torch.zeros(4, 6)
    >>> overlap(table.t(), table[1]), overlap(table[:, ::2], table[:, 1::2])
    (True, False)
    """
    if not (_has_memory(first) and _has_memory(second)) or _storage(first) != _storage(second):
        return False
    (begin, end), (other_begin, other_end) = _span(first), _span(second)
    if end <= other_begin or other_end <= begin:
        return False
    # A mark for each element that there could be between them, of the smaller size.
    unit, least = math.gcd(first.element_size(), second.element_size()), min(begin, other_begin)
    marks = np.zeros((max(end, other_end) - least) // unit, np.bool_)
    _as_marks(first, marks, unit, least)[...] = True
    return bool(_as_marks(second, marks, unit, least).any())


def overlapping(named: Iterable[tuple[str, Tensor]]) -> tuple[str, str] | None:
    """The names of two tensors that have a byte in common; None if no two have."""
    by_storage = defaultdict[int, list[tuple[int, int, str, Tensor]]](list)
    for name, tensor in named:
        if _has_memory(tensor):
            by_storage[_storage(tensor)].append((*_span(tensor), name, tensor))
    for group in by_storage.values():
        group.sort(key=lambda each: each[:2])
        for place, (_, end, name, tensor) in enumerate(group):
            for begin, _, other, following in group[place + 1 :]:
                if begin >= end:
                    break
                if overlap(tensor, following):
                    return name, other
    return None


def apart_from(tensors: Mapping[str, Tensor], others: Iterable[Tensor]) -> dict[str, Tensor]:
    """Those tensors, by name, that have no byte in common with any of the others."""
    by_storage = defaultdict[int, list[Tensor]](list)
    for other in others if tensors else ():
        if _has_memory(other):
            by_storage[_storage(other)].append(other)
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not _has_memory(tensor) or not any(overlap(tensor, other) for other in by_storage.get(_storage(tensor), ()))
    }


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and tensor.numel() > 0


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _span(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage from its first element to its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return begin, begin + (int(last) + 1) * tensor.element_size()


def _as_marks(tensor: Tensor, marks: NDArray[np.bool_], unit: int, least: int) -> NDArray[np.bool_]:
    """The marks of a tensor's elements, each of which has as many as it has units. NumPy lets views overlap."""
    size = tensor.element_size() // unit
    strides = *(stride * size for stride in tensor.stride()), 1
    return as_strided(marks[(_span(tensor)[0] - least) // unit :], (*tensor.shape, size), strides)
