"""Kernels in Triton: one pass over memory, and the positions that it found are all that is looked at again."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparsecomm.kernels.reference import LIMIT, OutOfRangeError, Reference, Update

# Elements per program, each of which adds to the one counter once at most. At a density of 1/1000, about a third of the
# programs find nothing, and are spared the prefix sum too.
_BLOCK = 1024
_LIMIT = tl.constexpr(LIMIT)


def compiled(function: Callable[..., None]) -> Any:
    """`function`, compiled for each dtype, kind of update and alignment, but not again for each number passed to it."""
    return triton.jit(function, do_not_specialize=["capacity"])


def inlined(function: Callable[..., Any]) -> Any:
    """`function`, for use in compiled ones."""
    return triton.jit(function)


@inlined
def _rounded(scalar: tl.float64, like: tl.tensor) -> tl.tensor:
    # Triton makes float32 of Python's floats, unless it is told what they are.
    return tl.full((), scalar, tl.float64).to(like.dtype)


@inlined
def _note(
    x: tl.tensor,
    positions: tl.tensor,
    inside: tl.tensor,
    threshold: tl.float64,
    found: tl.tensor,
    count: tl.tensor,
    capacity: tl.int64,
) -> None:
    """Appends positions for |x| >= threshold, blocks in any order. `count` counts also those that have no room."""
    reached = ((tl.abs(x) >= _rounded(threshold, x)) & inside).to(tl.int32)
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
    flaws: tl.tensor,
    kind: tl.constexpr,
    block: tl.constexpr,
) -> None:
    # Offsets in 64 bits: vectors may be longer than 2³¹. (Annotated with int, n and capacity would be 32 bits wide.)
    positions = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = positions < n
    v = tl.load(residual + positions, mask=inside, other=0.0)
    g = tl.load(gradient + positions, mask=inside, other=0.0)
    if flaws is not None:
        in_range = tl.abs(g) < _LIMIT
        if tl.sum((~in_range).to(tl.int32), 0) > 0:
            tl.store(flaws, 1)
        g = tl.where(in_range, g, 0.0)
    g = _rounded(scale, v) * g
    v = _rounded(keep, v) * v
    if kind != 0:
        u = _rounded(momentum, v) * tl.load(velocity + positions, mask=inside, other=0.0) + _rounded(gain, v) * g
        tl.store(velocity + positions, u, mask=inside)
    if kind == 0:
        v = v + g
    elif kind == 1:
        v = v + u
    else:
        v = (v + g) + _rounded(lookahead, v) * u
    tl.store(residual + positions, v, mask=inside)
    if count is not None:
        _note(v, positions, inside, threshold, found, count, capacity)


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
    positions = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = positions < n
    _note(tl.load(x + positions, mask=inside, other=0.0), positions, inside, threshold, found, count, capacity)


class Cuda(Reference):
    """Triton kernels for contiguous float32 and float64 vectors on CUDA."""

    def probe(self, update: Update, stride: int) -> Tensor:
        part = update.every(stride)
        self.update_(part._replace(gradient=part.gradient.contiguous()), None, 0)
        return part.residual.abs_()

    def update_(self, update: Update, threshold: float | None, capacity: int) -> Tensor | None:
        residual = update.residual
        n = residual.numel()
        found = count = flaws = None
        if threshold is not None:
            found, count = _room(residual, capacity)
        if update.checked:
            flaws = torch.zeros(1, dtype=torch.int64, device=residual.device)
        if n:
            with _on(residual.device):
                # Unfused, so that a product is rounded before it is added to, as it is everywhere else.
                _update[(triton.cdiv(n, _BLOCK),)](
                    residual,
                    update.velocity,
                    update.gradient,
                    n,
                    float(update.keep),
                    float(update.scale),
                    float(update.momentum),
                    float(update.gain),
                    float(update.lookahead or 0.0),
                    float(threshold or 0.0),
                    found,
                    count,
                    capacity,
                    flaws,
                    kind=0 if update.velocity is None else 1 if update.lookahead is None else 2,
                    block=_BLOCK,
                    enable_fp_fusion=False,
                )
        if flaws is not None and flaws.item():
            raise OutOfRangeError
        if found is None or count is None:
            return residual.new_empty(0, dtype=torch.int64)
        return _sorted(found, count)

    def reaching(self, x: Tensor, threshold: float, capacity: int) -> Tensor | None:
        x = x.contiguous()
        n = x.numel()
        found, count = _room(x, capacity)
        if n:
            with _on(x.device):
                _reaching[(triton.cdiv(n, _BLOCK),)](
                    x, n, float(threshold), found, count, capacity, block=_BLOCK, enable_fp_fusion=False
                )
        return _sorted(found, count)


def _room(x: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Where positions in `x` are noted, and how many were."""
    found = torch.empty(min(capacity, x.numel()), dtype=torch.int64, device=x.device)
    return found, torch.zeros(1, dtype=torch.int64, device=x.device)


def _sorted(found: Tensor, count: Tensor) -> Tensor | None:
    # The host waits for the device here.
    hits = int(count.item())
    return found[:hits].sort().values if hits <= found.numel() else None


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Launches go to `device`; in Triton's interpreter, that may be any."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
