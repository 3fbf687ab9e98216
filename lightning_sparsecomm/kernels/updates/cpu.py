"""Updates in numba: one pass changes residual and velocity, and notes which magnitudes reach a threshold."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_sparsecomm.kernels.numba_jit import Flags, Floats, Positions, Scalar, compiled
from lightning_sparsecomm.kernels.updates.cpu_flags import FLAGS_PER_WORD, PIECE, append_flagged, flag
from lightning_sparsecomm.kernels.updates.cpu_moments import add_direction_
from lightning_sparsecomm.kernels.updates.cpu_ranking import find_largest, kth_largest_key
from lightning_sparsecomm.kernels.updates.cpu_rows import largest_in_rows
from lightning_sparsecomm.kernels.updates.cpu_sums import add_at, put_at, sum_equal_indices, sum_squares
from lightning_sparsecomm.kernels.updates.moments import Moments
from lightning_sparsecomm.kernels.updates.reference import (
    LIMIT,
    MOMENTUM,
    NESTEROV,
    PLAIN,
    OutOfRangeError,
    Reference,
    Stretch,
    Update,
)
from lightning_sparsecomm.kernels.updates.sums import Moves


class Cpu(Reference):
    """Numba kernels for contiguous float32 and float64 vectors on the CPU."""

    def update_(self, update: Update, threshold: float | None, capacity: int) -> Tensor | None:
        if update.moments is not None:
            return self._update_moments_(update, update.moments, threshold, capacity)
        residual, gradient = update.residual.numpy(), update.gradient.numpy()
        velocity = residual if update.velocity is None else update.velocity.numpy()
        numbers = update.keep, update.scale, update.momentum, update.gain, update.lookahead or 0.0, threshold or 0.0
        factors = Factors._make(map(residual.dtype.type, numbers))
        found = np.empty(0 if threshold is None else min(capacity, residual.size) + FLAGS_PER_WORD, np.int64)
        count, in_range = _update(residual, velocity, gradient, factors, update.checked, update.kind, found)
        if not in_range:
            raise OutOfRangeError
        return torch.from_numpy(found[:0]) if threshold is None else _within_capacity(found, count)

    def _update_moments_(
        self, update: Update, moments: Moments, threshold: float | None, capacity: int
    ) -> Tensor | None:
        if not add_direction_(update.residual, update.gradient, moments, update.keep, update.scale, update.checked):
            raise OutOfRangeError
        if threshold is None:
            return update.residual.new_empty(0, dtype=torch.int64)
        return self.reaching(update.residual, threshold, capacity)

    def is_ahead_by(self, weight: Tensor, shared: Tensor, ahead: Tensor, sign: int) -> bool:
        numbers = weight.numpy(), shared.numpy(), ahead.numpy()
        return bool(_is_ahead_by(*numbers, numbers[2].dtype.type(sign)))

    def reaching(self, x: Tensor, threshold: float, capacity: int) -> Tensor | None:
        values = x.numpy()
        found = np.empty(min(capacity, values.size) + FLAGS_PER_WORD, np.int64)
        return _within_capacity(found, _reaching(values, values.dtype.type(threshold), found))

    def kth_largest(self, magnitudes: Tensor, k: int) -> float:
        values = magnitudes.numpy()
        bits = values.view(f"u{values.itemsize}")
        return float(np.array([kth_largest_key(bits, k)[0]], bits.dtype).view(values.dtype)[0])

    def largest(self, x: Tensor, k: int, seed: int) -> Tensor:
        return self.largest_of_each(x, [(0, x.numel(), k)], seed)

    def largest_of_each(self, x: Tensor, stretches: Sequence[Stretch], seed: int) -> Tensor:
        values = x.numpy()
        bits = values.view(f"u{values.itemsize}")
        found = np.empty(sum(min(k, stop - start) for start, stop, k in stretches) + FLAGS_PER_WORD, np.int64)
        count = 0
        for start, stop, k in stretches:
            count += find_largest(bits[start:stop], k, seed, start, found[count:])
        return torch.from_numpy(found[:count])

    def largest_in_rows(self, rows: Tensor, k: int) -> Tensor:
        bits = rows.numpy().view(f"u{rows.element_size()}").reshape(-1)
        found = np.empty(k * rows.shape[0] + 1, np.int64)
        return torch.from_numpy(found[: largest_in_rows(bits, rows.shape[1], k, found)])

    def add_at_(self, total: Tensor, indices: Tensor, values: Tensor, factor: float) -> None:
        sums = total.numpy()
        wrong = add_at(sums, indices.numpy(), values.numpy(), sums.dtype.type(factor))
        if wrong >= 0:
            raise IndexError(f"index {wrong} is {int(indices[wrong])}, which is not from 0 to {total.numel() - 1}.")

    def put_at_(self, total: Tensor, indices: Tensor, values: Tensor, moves: Moves | None = None) -> None:
        places = indices.numpy()
        whole = np.array([[0, places.size, 0]]) if moves is None else torch.stack(moves, 1).numpy()
        wrong = put_at(total.numpy(), places, values.numpy(), whole)
        if wrong >= 0:
            raise IndexError(f"index {wrong} is {int(indices[wrong])}: its place is not from 0 to {total.numel() - 1}.")

    def add_up(self, indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        # A stable sort, which is fast on sorted runs.
        order = np.argsort(indices.numpy(), kind="stable")
        unique, sums = np.empty(order.size, np.int64), values.new_empty(order.size)
        count = sum_equal_indices(indices.numpy(), values.numpy(), order, unique, sums.numpy())
        return torch.from_numpy(unique[:count]), sums[:count]

    def energies(self, x: Tensor, bounds: Tensor) -> Tensor:
        energies = np.empty(bounds.numel() - 1, np.float64)
        sum_squares(x.numpy(), bounds.numpy(), energies)
        return torch.from_numpy(energies)


class Factors(NamedTuple):
    """The numbers of an `Update`, and the threshold, in the update's dtype."""

    keep: Scalar
    scale: Scalar
    momentum: Scalar
    gain: Scalar
    lookahead: Scalar
    threshold: Scalar


def _within_capacity(found: Positions, count: int) -> Tensor | None:
    return torch.from_numpy(found[:count]) if count <= found.size - FLAGS_PER_WORD else None


@compiled
def _reaching(x: Floats, threshold: Scalar, found: Positions) -> int:
    flags = np.zeros(PIECE, np.uint8)
    words = flags.view(np.uint64)
    count = 0
    for start in range(0, x.size, PIECE):
        piece = x[start : start + PIECE]
        if piece.size < PIECE:
            flags[:] = 0
        flag(piece, threshold, flags)
        count = append_flagged(flags, words, piece.size, start, found, count)
    return count


def _piece_update(kind: int) -> Callable[[Floats, Floats, Floats, Factors, bool, Flags], bool]:
    """Compiles the loop for one kind of update; as `kind` is a constant there, LLVM can vectorize the loop."""

    def update_piece(
        residual: Floats, velocity: Floats, gradient: Floats, factors: Factors, checked: bool, flags: Flags
    ) -> bool:
        keep, scale, momentum, gain, lookahead, threshold = factors
        limit = residual.dtype.type(LIMIT)
        any_excluded = False
        for i in range(residual.size):
            excluded = checked and not (abs(gradient[i]) < limit)
            any_excluded |= excluded
            g = scale * (residual.dtype.type(0) if excluded else gradient[i])
            if kind != PLAIN:
                u = momentum * velocity[i] + gain * g
                velocity[i] = u
            if kind == PLAIN:
                v = keep * residual[i] + g
            elif kind == MOMENTUM:
                v = keep * residual[i] + u
            else:
                v = (keep * residual[i] + g) + lookahead * u
            residual[i] = v
            flags[i] = abs(v) >= threshold
        return not any_excluded

    update_piece.__qualname__ = f"update_piece_of_kind_{kind}"
    return compiled(update_piece)


_update_plain, _update_momentum, _update_nesterov = (_piece_update(kind) for kind in (PLAIN, MOMENTUM, NESTEROV))


@compiled
def _update(
    residual: Floats, velocity: Floats, gradient: Floats, factors: Factors, checked: bool, kind: int, found: Positions
) -> tuple[int, bool]:
    """Updates in place; returns the count of positions noted in `found`, and whether the gradient is in range.

    An empty `found` notes nothing.
    """
    flags = np.zeros(PIECE, np.uint8)
    words = flags.view(np.uint64)
    count = 0
    in_range = True
    for start in range(0, residual.size, PIECE):
        part = slice(start, start + PIECE)
        v, u, g = residual[part], velocity[part], gradient[part]
        if v.size < PIECE:
            flags[:] = 0
        if kind == PLAIN:
            in_range &= _update_plain(v, u, g, factors, checked, flags)
        elif kind == MOMENTUM:
            in_range &= _update_momentum(v, u, g, factors, checked, flags)
        else:
            in_range &= _update_nesterov(v, u, g, factors, checked, flags)
        if found.size:
            count = append_flagged(flags, words, v.size, start, found, count)
    return count, in_range


@compiled
def _is_ahead_by(weight: Floats, shared: Floats, ahead: Floats, sign: Scalar) -> bool:
    """In stretches, so that loops have no branch."""
    size, stretch = np.uint64(weight.size), np.uint64(4096)
    for start in range(np.uint64(0), size, stretch):
        others = 0
        for i in range(start, min(start + stretch, size)):
            left = shared[i] - sign * ahead[i]
            others += (weight[i] != left) & ((weight[i] == weight[i]) | (left == left))
        if others:
            return False
    return True
