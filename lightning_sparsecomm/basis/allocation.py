"""Memory for vectors as long as the model, which a round needs for a moment."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# From here on NumPy asks Linux for huge pages, which torch does not by itself. Memory that is returned after each step,
# as glibc does with large pieces, is mapped anew in the next one: 44 MB take 6 ms with huge pages, and 25 ms without.
_LARGE = 4 * 2**20


def empty(size: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`[size]` of any content, with the dtype (or the one given) and the device of `like`."""
    dtype = dtype or like.dtype
    if like.device.type != "cpu" or size * dtype.itemsize < _LARGE:
        return like.new_empty(size, dtype=dtype)
    return torch.from_numpy(np.empty(size * dtype.itemsize, np.uint8)).view(dtype)


def zeros(size: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`[size]` zeros, with the dtype (or the one given) and the device of `like`."""
    dtype = dtype or like.dtype
    if like.device.type != "cpu" or size * dtype.itemsize < _LARGE:
        return like.new_zeros(size, dtype=dtype)
    # Of memory that is mapped anew, pages are zero already: `calloc` knows, and sets only other memory to zero.
    return torch.from_numpy(np.zeros(size * dtype.itemsize, np.uint8)).view(dtype)


def copied(vector: Tensor) -> Tensor:
    """A copy of `[n]`."""
    return empty(vector.numel(), vector).copy_(vector)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """`[n]`: one or more vectors, one after the other. A single one is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts), out=empty(sum(part.numel() for part in parts), parts[0]))


def picked(vector: Tensor, indices: Tensor) -> Tensor:
    """`[k]`: the elements of `[n]` at `indices`, `[k]` int64."""
    return torch.index_select(vector, 0, indices, out=empty(indices.numel(), vector))
