"""Count sketches in Triton: every element hashes for itself, which costs a GPU less than to remember."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparsecomm.kernels.cuda import _note, _on, _rounded, _sorted, inlined
from lightning_sparsecomm.kernels.sketch import (
    GOLDEN,
    MULTIPLIERS,
    Candidates,
    SketchKernels,
    block_of,
    position_dtype,
    sampled,
    signed,
)

# Elements per program that inserts.
_BLOCK = 1024
# Pairs of rows that are compared, over all elements, per program that queries.
_PAIRS = 4096

_GOLDEN = tl.constexpr(GOLDEN)
_FIRST, _SECOND = (tl.constexpr(multiplier) for multiplier in MULTIPLIERS)


def compiled(function: Callable[..., None]) -> Any:
    """`function`, compiled for each dtype and form of sketch, but not again for each number passed to it."""
    return triton.jit(function, do_not_specialize=["size", "seed", "stride", "columns", "capacity"])


@inlined
def _mixed(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 30)) * tl.full((), _FIRST, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), _SECOND, tl.uint64)
    return x ^ (x >> 31)


@inlined
def _hashed(
    positions: tl.tensor, row: tl.tensor, columns: tl.int64, seed: tl.int64, width: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Columns, int64, of elements in a row, and whether they are negated there."""
    golden = tl.full((), _GOLDEN, tl.uint64)
    key = _mixed(seed.to(tl.uint64) + (row + 1).to(tl.uint64) * golden)
    block, offset = positions // width, positions % width
    state = key + (2 * block + 1).to(tl.uint64) * golden
    start = (((_mixed(state) >> 32) * columns.to(tl.uint64)) >> 32).to(tl.int64)
    negative = (_mixed(state + golden) >> offset.to(tl.uint64)) & 1
    column = start + offset
    return tl.where(column < columns, column, column - columns), negative != 0


@inlined
def _estimate(
    table: tl.tensor,
    positions: tl.tensor,
    inside: tl.tensor,
    columns: tl.int64,
    seed: tl.int64,
    rows: tl.constexpr,
    width: tl.constexpr,
) -> tl.tensor:
    """Medians over the rows; a zero is +0."""
    # Blocks of a GPU have a power of two of everything: what is added ranks behind the rows' estimates.
    padded: tl.constexpr = triton.next_power_of_2(rows)
    row = tl.arange(0, padded)[None, :].to(tl.int64)
    column, negative = _hashed(positions[:, None], row, columns, seed, width)
    read = tl.load(table + row * columns + column, mask=inside[:, None] & (row < rows), other=0.0)
    read = tl.where(row < rows, tl.where(negative, -read, read), float("inf"))
    # Where each would be if they were sorted: how many are less, or as large and in a row before.
    one, other = read[:, :, None], read[:, None, :]
    earlier = tl.arange(0, padded)[None, None, :] < tl.arange(0, padded)[None, :, None]
    rank = tl.sum(((other < one) | ((other == one) & earlier)).to(tl.int32), 2)
    # Sums of one number and zeros.
    median = tl.sum(tl.where(rank == rows // 2, read, tl.zeros_like(read)), 1)
    if rows % 2 == 0:
        lower = tl.sum(tl.where(rank == rows // 2 - 1, read, tl.zeros_like(read)), 1)
        median = (lower + median) * _rounded(0.5, median)
    return median + tl.zeros_like(median)


@compiled
def _insert(
    table: tl.tensor,
    x: tl.tensor,
    at: tl.tensor,
    size: tl.int64,
    columns: tl.int64,
    seed: tl.int64,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = places < size
    positions = places if at is None else tl.load(at + places, mask=inside, other=0)
    row = tl.program_id(1).to(tl.int64)
    column, negative = _hashed(positions, row, columns, seed, width)
    values = tl.load(x + places, mask=inside, other=0.0)
    tl.atomic_add(table + row * columns + column, tl.where(negative, -values, values), mask=inside, sem="relaxed")


@compiled
def _query(
    table: tl.tensor,
    out: tl.tensor,
    at: tl.tensor,
    size: tl.int64,
    stride: tl.int64,
    columns: tl.int64,
    seed: tl.int64,
    rows: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = places < size
    if at is None:
        positions = places // width * stride * width + places % width
    else:
        positions = tl.load(at + places, mask=inside, other=0)
    tl.store(out + places, _estimate(table, positions, inside, columns, seed, rows, width), mask=inside)


@compiled
def _reaching(
    table: tl.tensor,
    size: tl.int64,
    columns: tl.int64,
    seed: tl.int64,
    threshold: tl.float64,
    found: tl.tensor,
    count: tl.tensor,
    capacity: tl.int64,
    rows: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    positions = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = positions < size
    estimates = _estimate(table, positions, inside, columns, seed, rows, width)
    _note(estimates, positions, inside, threshold, found, count, capacity)


class CudaSketchKernels(SketchKernels):
    """Triton kernels for float32 and float64 on CUDA. Insertion adds in any order."""

    def insert_(self, table: Tensor, x: Tensor, seed: int) -> None:
        self._insert_(table, None, x, seed)

    def insert_at_(self, table: Tensor, positions: Tensor, values: Tensor, seed: int) -> None:
        self._insert_(table, positions.contiguous(), values, seed)

    def query(self, table: Tensor, size: int, seed: int, stride: int = 1) -> Tensor:
        return self._queried(table, None, sampled(size, block_of(table.shape[1]), stride), seed, stride)

    def query_at(self, table: Tensor, positions: Tensor, seed: int) -> Tensor:
        return self._queried(table, positions.contiguous(), positions.numel(), seed, 1)

    def reaching(self, table: Tensor, size: int, threshold: float, capacity: int, seed: int) -> Candidates | None:
        rows, columns = table.shape
        found = torch.empty(min(capacity, size), dtype=torch.int64, device=table.device)
        count = torch.zeros(1, dtype=torch.int64, device=table.device)
        if size:
            block = _reads(rows)
            with _on(table.device):
                _reaching[(triton.cdiv(size, block),)](
                    table,
                    size,
                    columns,
                    signed(seed),
                    float(threshold),
                    found,
                    count,
                    found.numel(),
                    rows=rows,
                    width=block_of(columns),
                    block=block,
                    enable_fp_fusion=False,
                )
        positions = _sorted(found, count)
        if positions is None:
            return None
        # Estimated again: they are few.
        return Candidates(positions.to(position_dtype(size)), self.query_at(table, positions, seed))

    def _insert_(self, table: Tensor, positions: Tensor | None, values: Tensor, seed: int) -> None:
        (rows, columns), size = table.shape, values.numel()
        if size:
            with _on(table.device):
                _insert[(triton.cdiv(size, _BLOCK), rows)](
                    table,
                    values.contiguous(),
                    positions,
                    size,
                    columns,
                    signed(seed),
                    width=block_of(columns),
                    block=_BLOCK,
                )

    def _queried(self, table: Tensor, positions: Tensor | None, size: int, seed: int, stride: int) -> Tensor:
        rows, columns = table.shape
        estimates = table.new_empty(size)
        if size:
            block = _reads(rows)
            with _on(table.device):
                _query[(triton.cdiv(size, block),)](
                    table,
                    estimates,
                    positions,
                    size,
                    stride,
                    columns,
                    signed(seed),
                    rows=rows,
                    width=block_of(columns),
                    block=block,
                    enable_fp_fusion=False,
                )
        return estimates


def _reads(rows: int) -> int:
    """How many elements a program estimates."""
    return min(max(_PAIRS >> 2 * (rows - 1).bit_length(), 16), _BLOCK)
