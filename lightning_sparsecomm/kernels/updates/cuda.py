"""Updates in Triton: all tensors of a model in one pass over memory."""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparsecomm.kernels.triton_jit import compiled, inlined, launch, own_places, rounded
from lightning_sparsecomm.kernels.updates.cuda_ranking import blocks_of, largest_of_each
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

# Elements per program.
_BLOCK = 1024
_LIMIT = tl.constexpr(LIMIT)
_PLAIN, _MOMENTUM, _NESTEROV = (tl.constexpr(kind) for kind in (PLAIN, MOMENTUM, NESTEROV))
# A kind of update beside those of `Update.kind`.
_MOMENTS = tl.constexpr(NESTEROV + 1)
# How many numbers describe an update; see `_row`.
_COLUMNS = 17
_WIDTH = tl.constexpr(_COLUMNS)


class Cuda(Reference):
    """Triton kernels for contiguous float32 and float64 vectors on CUDA."""

    many_at_once = True

    def update_(self, update: Update, threshold: float | None, capacity: int) -> Tensor | None:
        self.update_all_([update])
        if threshold is None:
            return update.residual.new_empty(0, dtype=torch.int64)
        return self.reaching(update.residual, threshold, capacity)

    def update_all_(self, updates: Sequence[Update], done: list[Update] | None = None) -> None:
        alike = defaultdict(list)
        for update in updates:
            kind = update.kind if update.moments is None else _MOMENTS.value
            alike[update.residual.dtype, kind, update.checked].append(update)
        # Here the host waits until the device has the gradients. An interrupt most likely arrives meanwhile: nothing is
        # applied by then, and nothing may be noted, or it would be taken back.
        described = [_described(several) for several in alike.values()]
        flags = []
        for (_, kind, _), several, description in zip(alike, alike.values(), described):
            if done is not None:
                done.extend(several)
            flags.append(_update_all_(*description, kind))
        if any(flag is not None and bool(flag.item()) for flag in flags):
            raise OutOfRangeError

    def reaching(self, x: Tensor, threshold: float, capacity: int) -> Tensor | None:
        x = x.contiguous()
        n = x.numel()
        found, count = position_buffer(x.device, min(capacity, n))
        arguments = x, n, float(threshold), found, count, capacity
        launch(_reaching, (triton.cdiv(n, _BLOCK),), x.device, *arguments, block=_BLOCK)
        return sorted_positions(found, count)

    def largest_of_each(self, x: Tensor, stretches: Sequence[Stretch], seed: int) -> Tensor:
        if x.dtype != torch.float32 or not stretches:
            return super().largest_of_each(x, stretches, seed)
        return largest_of_each(x, stretches, seed)


def _described(updates: Sequence[Update]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """What `_update` is told of updates of one kind and dtype."""
    residual = updates[0].residual
    device = residual.device
    out_of_range = torch.zeros(1, dtype=torch.int64, device=device) if updates[0].checked else None
    owners, starts = _blocks(tuple(update.residual.numel() for update in updates), device)
    rows = np.array([_row(update) for update in updates]).view(np.int64)
    # The new tensor names the dtype.
    return torch.from_numpy(rows).to(device), owners, starts, residual.new_empty(1), out_of_range


def _update_all_(
    table: Tensor, owners: Tensor, starts: Tensor, like: Tensor, out_of_range: Tensor | None, kind: int
) -> Tensor | None:
    """Applies described updates; a flag that is not 0 if they are checked and out of range."""
    arguments = table, owners, starts, like, out_of_range
    launch(_update, owners.shape, table.device, *arguments, kind=kind, block=_BLOCK)
    return out_of_range


@lru_cache(maxsize=64)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    return blocks_of([(0, size) for size in sizes], _BLOCK, device)


def _row(update: Update) -> list[float]:
    """The numbers of one update: five addresses and a length, as int64 in a float64's place, and eleven factors."""
    moments = update.moments
    tensors = [update.residual, update.gradient, update.velocity, None, None]
    factors = [update.momentum, update.gain, update.lookahead or 0.0]
    if moments is not None:
        tensors[2:] = moments.first, moments.second, moments.weights
        beta1, squares = moments.beta1, moments.beta2
        factors = [beta1, 1 - beta1, squares, 1 - squares, moments.unbias, moments.unbias_squares]
        factors += [moments.epsilon, moments.coherence, moments.decay]
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    whole = np.array([*addresses, update.residual.numel()]).view(np.float64)
    return [*whole, update.keep, update.scale, *factors, *[0.0] * (_COLUMNS - 8 - len(factors))]


def position_buffer(device: torch.device, capacity: int) -> tuple[Tensor, Tensor]:
    """`[capacity]` int64, uninitialized, for `append_reaching` to write to, and its counter."""
    found = torch.empty(capacity, dtype=torch.int64, device=device)
    return found, torch.zeros(1, dtype=torch.int64, device=device)


def sorted_positions(found: Tensor, count: Tensor) -> Tensor | None:
    """The positions in a buffer, sorted; None if there were more than it has room for.

    The host waits for the device here.
    """
    hits = int(count.item())
    return found[:hits].sort().values if hits <= found.numel() else None


@inlined
def append_reaching(
    x: tl.tensor,
    positions: tl.tensor,
    inside: tl.tensor,
    threshold: tl.float64,
    found: tl.tensor,
    count: tl.tensor,
    capacity: tl.int64,
) -> None:
    """Appends the positions where |x| >= threshold; blocks come in any order.

    `count` also counts positions that `found` has no room for.
    """
    reached = ((tl.abs(x) >= rounded(threshold, x)) & inside).to(tl.int32)
    hits = tl.sum(reached, 0)
    if hits > 0:
        first = tl.atomic_add(count, hits.to(tl.int64), sem="relaxed")
        places = first + tl.cumsum(reached, 0) - 1
        tl.store(found + places, positions, mask=(reached > 0) & (places < capacity))


@inlined
def _vector(row: tl.tensor, column: tl.constexpr, like: tl.tensor) -> tl.tensor:
    """The vector whose address is in a column, of the same dtype as another."""
    return tl.load(row + column).to(like.dtype)


@inlined
def _factor(row: tl.tensor, column: tl.constexpr, like: tl.tensor) -> tl.tensor:
    return rounded(tl.load(row + column).to(tl.float64, bitcast=True), like)


@inlined
def _direction(row: tl.tensor, residual: tl.tensor, g: tl.tensor, positions: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Takes a gradient into Adam's moments; the direction that they give then. See `Moments`."""
    first, second, weights = _vector(row, 2, residual), _vector(row, 3, residual), _vector(row, 4, residual)
    decayed = tl.load(row + 4) != 0
    # A scalar and a vector joined by & are no mask to the interpreter of Triton 3.9.
    w = tl.load(weights + positions, mask=tl.where(decayed, inside, False), other=0.0)
    g = tl.where(decayed, g + w * _factor(row, 16, g), g)
    m = tl.load(first + positions, mask=inside, other=0.0) * _factor(row, 8, g) + g * _factor(row, 9, g)
    entering = g * g * _factor(row, 15, g) * _factor(row, 11, g)
    v = tl.load(second + positions, mask=inside, other=0.0) * _factor(row, 10, g) + entering
    tl.store(first + positions, m, mask=inside)
    tl.store(second + positions, v, mask=inside)
    mean, square = m * _factor(row, 12, g), v * _factor(row, 13, g)
    if g.dtype == tl.float32:
        return tl.div_rn(mean, tl.sqrt_rn(square) + _factor(row, 14, g))
    else:
        return mean / (tl.sqrt(square) + _factor(row, 14, g))


@compiled
def _update(
    table: tl.tensor,
    owners: tl.tensor,
    starts: tl.tensor,
    like: tl.tensor,
    out_of_range: tl.tensor,
    kind: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One block of one of the tensors, which a row of the table describes; all are of the dtype of `like`."""
    row = table + tl.load(owners + tl.program_id(0)).to(tl.int64) * _WIDTH
    positions = tl.load(starts + tl.program_id(0)) + tl.arange(0, block)
    inside = positions < tl.load(row + 5)
    residual = _vector(row, 0, like)
    v = tl.load(residual + positions, mask=inside, other=0.0)
    g = tl.load(_vector(row, 1, like) + positions, mask=inside, other=0.0)
    if out_of_range is not None:
        in_range = tl.abs(g) < _LIMIT
        if tl.sum(tl.where(in_range, 0, 1), 0) > 0:
            tl.store(out_of_range, 1)
        g = tl.where(in_range, g, 0.0)
    g = _factor(row, 7, v) * g
    v = _factor(row, 6, v) * v
    if kind == _PLAIN:
        v = v + g
    elif kind == _MOMENTS:
        v = v + _direction(row, like, g, positions, inside)
    else:
        velocity = _vector(row, 2, like)
        u = tl.load(velocity + positions, mask=inside, other=0.0)
        u = _factor(row, 8, v) * u + _factor(row, 9, v) * g
        tl.store(velocity + positions, u, mask=inside)
        v = v + u if kind == _MOMENTUM else (v + g) + _factor(row, 10, v) * u
    tl.store(residual + positions, v, mask=inside)


@compiled
def _reaching(
    x: tl.tensor,
    n: tl.int64,
    threshold: tl.float64,
    found: tl.tensor,
    count: tl.tensor,
    capacity: tl.int64,
    block: tl.constexpr,
) -> None:
    positions, inside = own_places(n, block)
    values = tl.load(x + positions, mask=inside, other=0.0)
    append_reaching(values, positions, inside, threshold, found, count, capacity)
