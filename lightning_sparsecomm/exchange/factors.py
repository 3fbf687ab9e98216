"""Orthonormal columns, to the same bits on every processor.

All ranks compute them from equal sums, and what they share must be equal to the bit. A library sums in an order that
depends on the processor and on the number of threads. Here each operation is elementwise, in a fixed order, and rounded
by itself.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

# A column that is this small after the earlier ones were taken out, from at least 1, depends on them.
_DEPENDENT = 1e-12


def orthonormalized(matrices: Sequence[Tensor]) -> list[Tensor]:
    """An orthonormal basis of each matrix's columns. A column that depends on those before it becomes zero.

    Gram-Schmidt, twice, in float64: orthogonal to round-off, however close columns are to each other.

    Args:
        matrices: Each `[rows, columns]`, finite, of any dtype.

    Returns:
        For each matrix, one of its shape and dtype. Bits do not depend on the processor, its threads, or the other
        matrices.
    """
    found: list[Tensor] = [matrix.new_empty(0) for matrix in matrices]
    alike: dict[int, list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        # Padded with zeros to the next power of two, which changes no sum.
        alike[1 << max(0, matrix.shape[0] - 1).bit_length()].append(index)
    for rows, indices in alike.items():
        columns = max(matrices[index].shape[1] for index in indices)
        batch = matrices[indices[0]].new_zeros(len(indices), rows, columns, dtype=torch.float64)
        for place, index in enumerate(indices):
            matrix = matrices[index]
            batch[place, : matrix.shape[0], : matrix.shape[1]] = matrix
        largest = batch.abs().amax(1, keepdim=True)
        batch.div_(largest.masked_fill_(largest == 0, 1.0))
        for _ in range(2):
            _gram_schmidt_(batch)
        for place, index in enumerate(indices):
            matrix = matrices[index]
            found[index] = batch[place, : matrix.shape[0], : matrix.shape[1]].to(matrix.dtype)
    return found


def _gram_schmidt_(batch: Tensor) -> None:
    """Orthonormalizes the columns of each `[rows, columns]` of a batch, in place."""
    for column in range(batch.shape[2]):
        own, later = batch[:, :, column : column + 1], batch[:, :, column + 1 :]
        norm = _sum_of_rows(own * own).sqrt_()
        own.div_(norm.masked_fill_(norm <= _DEPENDENT, torch.inf))
        if later.shape[2]:
            later.sub_(own * _sum_of_rows(own * later))


def _sum_of_rows(x: Tensor) -> Tensor:
    """`[batch, 1, columns]`: sums over the rows, a power of two, in pairs of halves."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x
