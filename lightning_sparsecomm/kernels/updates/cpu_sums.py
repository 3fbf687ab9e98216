"""Sums of sparse vectors, and their elements in dense ones, in numba."""

import numpy as np
from numpy.typing import NDArray

from lightning_sparsecomm.kernels.numba_jit import Floats, Positions, Scalar, compiled

# Replaces a sum of squares that underflows in float64.
_TINY = float(np.finfo(np.float64).tiny)


@compiled
def add_at(sums: Floats, indices: Positions, values: Floats, factor: Scalar) -> int:
    """Adds `factor` times each value to the sum at its index. Returns the place of an index out of range, or -1."""
    size = np.uint64(sums.size)
    for i in range(indices.size):
        # Negative ones are large.
        at = np.uint64(indices[i])
        if at >= size:
            return i
        sums[at] += factor * values[i]
    return -1


@compiled
def put_at(total: Floats, indices: Positions, values: Floats, moves: Positions) -> int:
    """Sets elements to values; each row of `moves` is where some of them start, how many, and what to add to indices.

    Returns the number of an element whose place is out of range, or -1.
    """
    size = np.uint64(total.size)
    for move in range(moves.shape[0]):
        start, count, shift = moves[move]
        for i in range(np.uint64(start), np.uint64(start + count)):
            # Negative ones are large.
            at = np.uint64(indices[i] + shift)
            if at >= size:
                return int(np.int64(i))
            total[at] = values[i]
    return -1


@compiled
def sum_equal_indices(indices: Positions, values: Floats, order: Positions, unique: Positions, sums: Floats) -> int:
    """Writes the indices of `Reference.add_up` and their sums, and returns how many there are.

    `order` (`[m]`) sorts `indices` stably. `unique` and `sums` have room for m.
    """
    count = 0
    for i in range(order.size):
        index = indices[order[i]]
        if count and unique[count - 1] == index:
            sums[count - 1] += values[order[i]]
        else:
            unique[count] = index
            sums[count] = values[order[i]]
            count += 1
    return count


@compiled
def sum_squares(x: Floats, bounds: Positions, energies: NDArray[np.float64]) -> None:
    """Writes the sums of `Reference.energies` to `energies` (`[stretches]`)."""
    for stretch in range(energies.size):
        start, stop = bounds[stretch], bounds[stretch + 1]
        # Four sums, because in a single one each addition would wait for the one before it.
        a = b = c = d = 0.0
        quads = (stop - start) // 4
        for quad in range(quads):
            i = start + 4 * quad
            a += np.float64(x[i]) * np.float64(x[i])
            b += np.float64(x[i + 1]) * np.float64(x[i + 1])
            c += np.float64(x[i + 2]) * np.float64(x[i + 2])
            d += np.float64(x[i + 3]) * np.float64(x[i + 3])
        energy = (a + b) + (c + d)
        for i in range(start + 4 * quads, stop):
            energy += np.float64(x[i]) * np.float64(x[i])
        if energy == 0:
            for i in range(start, stop):
                if x[i] != 0:
                    energy = _TINY
        energies[stretch] = energy
