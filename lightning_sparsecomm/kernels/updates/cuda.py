"""Updates in Triton: one pass over memory, which also notes the positions that reach a threshold."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparsecomm.kernels.triton_jit import compiled, inlined, launch, own_places, rounded
from lightning_sparsecomm.kernels.updates.reference import LIMIT, MOMENTUM, PLAIN, OutOfRangeError, Reference, Update

# Elements per program. A program adds at most once to the shared counter. At a density of 1/1000, about a third of the
# programs find nothing and skip the prefix sum too.
_BLOCK = 1024
_LIMIT = tl.constexpr(LIMIT)
_PLAIN, _MOMENTUM = tl.constexpr(PLAIN), tl.constexpr(MOMENTUM)


class Cuda(Reference):
    """Triton kernels for contiguous float32 and float64 vectors on CUDA."""

    def update_(self, update: Update, threshold: float | None, capacity: int) -> Tensor | None:
        if update.moments is not None:
            # In torch's own operations, which round square roots and quotients as the definition says.
            return super().update_(update, threshold, capacity)
        residual = update.residual
        n = residual.numel()
        found = count = out_of_range = None
        if threshold is not None:
            found, count = position_buffer(residual.device, min(capacity, n))
        if update.checked:
            out_of_range = torch.zeros(1, dtype=torch.int64, device=residual.device)
        vectors = residual, update.velocity, update.gradient
        numbers = update.keep, update.scale, update.momentum, update.gain, update.lookahead or 0.0, threshold or 0.0
        notes = found, count, capacity, out_of_range
        arguments = *vectors, n, *map(float, numbers), *notes
        launch(_update, (triton.cdiv(n, _BLOCK),), residual.device, *arguments, kind=update.kind, block=_BLOCK)
        if out_of_range is not None and out_of_range.item():
            raise OutOfRangeError
        if found is None or count is None:
            return residual.new_empty(0, dtype=torch.int64)
        return sorted_positions(found, count)

    def reaching(self, x: Tensor, threshold: float, capacity: int) -> Tensor | None:
        x = x.contiguous()
        n = x.numel()
        found, count = position_buffer(x.device, min(capacity, n))
        arguments = x, n, float(threshold), found, count, capacity
        launch(_reaching, (triton.cdiv(n, _BLOCK),), x.device, *arguments, block=_BLOCK)
        return sorted_positions(found, count)


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


@compiled
def _update(
    residual: tl.tensor,
    velocity: tl.tensor,
    gradient: tl.tensor,
    n: tl.int64,
    keep: tl.float64,
    scale: tl.float64,
    momentum: tl.float64,
    gain: tl.float64,
    lookahead: tl.float64,
    threshold: tl.float64,
    found: tl.tensor,
    count: tl.tensor,
    capacity: tl.int64,
    out_of_range: tl.tensor,
    kind: tl.constexpr,
    block: tl.constexpr,
) -> None:
    positions, inside = own_places(n, block)
    v = tl.load(residual + positions, mask=inside, other=0.0)
    g = tl.load(gradient + positions, mask=inside, other=0.0)
    if out_of_range is not None:
        in_range = tl.abs(g) < _LIMIT
        if tl.sum(tl.where(in_range, 0, 1), 0) > 0:
            tl.store(out_of_range, 1)
        g = tl.where(in_range, g, 0.0)
    g = rounded(scale, v) * g
    v = rounded(keep, v) * v
    if kind != _PLAIN:
        u = rounded(momentum, v) * tl.load(velocity + positions, mask=inside, other=0.0) + rounded(gain, v) * g
        tl.store(velocity + positions, u, mask=inside)
    if kind == _PLAIN:
        v = v + g
    elif kind == _MOMENTUM:
        v = v + u
    else:
        v = (v + g) + rounded(lookahead, v) * u
    tl.store(residual + positions, v, mask=inside)
    if count is not None:
        append_reaching(v, positions, inside, threshold, found, count, capacity)


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
