"""Count sketches in Triton: each element computes its own hash, since that costs a GPU less than to share one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparsecomm.kernels.sketch.reference import (
    GOLDEN,
    MULTIPLIERS,
    Candidates,
    SketchKernels,
    as_int64,
    block_of,
    position_dtype,
    sampled_size,
)
from lightning_sparsecomm.kernels.triton_jit import compiled, inlined, launch, own_places, rounded
from lightning_sparsecomm.kernels.updates.cuda import append_reaching, position_buffer, sorted_positions

# Elements per program that inserts; the most per program that estimates.
_BLOCK = 1024
# Pairs of rows that a program compares to estimate all of its elements.
_PAIRS = 4096

_GOLDEN = tl.constexpr(GOLDEN)
_FIRST, _SECOND = (tl.constexpr(multiplier) for multiplier in MULTIPLIERS)


class CudaSketchKernels(SketchKernels):
    """Triton kernels for float32 and float64 on CUDA.

    The order in which insertion adds is undefined. So it adds float32 numbers as whole multiples of a part of the
    largest, which have one sum in any order. Sums of float64 numbers may differ in their last bits from call to call.
    """

    def insert_(self, table: Tensor, x: Tensor, seed: int) -> None:
        self._insert_(table, None, x, seed)

    def insert_at_(self, table: Tensor, positions: Tensor, values: Tensor, seed: int) -> None:
        self._insert_(table, positions.contiguous(), values, seed)

    def query(self, table: Tensor, size: int, seed: int, stride: int = 1) -> Tensor:
        return self._estimates_of(table, None, sampled_size(size, block_of(table.shape[1]), stride), seed, stride)

    def query_at(self, table: Tensor, positions: Tensor, seed: int) -> Tensor:
        return self._estimates_of(table, positions.contiguous(), positions.numel(), seed, 1)

    def reaching(self, table: Tensor, size: int, threshold: float, capacity: int, seed: int) -> Candidates | None:
        rows, columns = table.shape
        found, count = position_buffer(table.device, min(capacity, size))
        arguments = table, size, columns, as_int64(seed), float(threshold), found, count, found.numel()
        block = _elements_per_program(rows)
        grid = (triton.cdiv(size, block),)
        launch(_reaching, grid, table.device, *arguments, rows=rows, width=block_of(columns), block=block)
        positions = sorted_positions(found, count)
        if positions is None:
            return None
        # They are few, so it is cheap to estimate them again.
        return Candidates(positions.to(position_dtype(size)), self.query_at(table, positions, seed))

    def _insert_(self, table: Tensor, positions: Tensor | None, values: Tensor, seed: int) -> None:
        (rows, columns), size = table.shape, values.numel()
        if not size:
            return
        exact = table.dtype == torch.float32
        into = torch.zeros(table.shape, dtype=torch.int64, device=table.device) if exact else table
        largest = values.abs().amax().double()
        # No sum of `size` multiples reaches 2^62.
        shift = 61 - size.bit_length() - torch.frexp(largest).exponent.to(torch.int64)
        # A float64 whose exponent is `shift`.
        scale = (((shift if exact else torch.zeros_like(shift)) + 1023) << 52).view(torch.float64)
        arguments = into, values.contiguous(), positions, scale, size, columns, as_int64(seed)
        grid = (triton.cdiv(size, _BLOCK), rows)
        launch(_insert, grid, table.device, *arguments, width=block_of(columns), block=_BLOCK)
        if exact:
            # What is not finite stays so: whoever sums tables looks for it there.
            table += torch.where(largest.isfinite(), into.double() / scale, largest).to(table.dtype)

    def _estimates_of(self, table: Tensor, positions: Tensor | None, size: int, seed: int, stride: int) -> Tensor:
        rows, columns = table.shape
        estimates = table.new_empty(size)
        arguments = table, estimates, positions, size, stride, columns, as_int64(seed)
        block = _elements_per_program(rows)
        grid = (triton.cdiv(size, block),)
        launch(_query, grid, table.device, *arguments, rows=rows, width=block_of(columns), block=block)
        return estimates


def _elements_per_program(rows: int) -> int:
    """How many elements a program estimates: a power of two."""
    return min(max(_PAIRS >> 2 * (rows - 1).bit_length(), 16), _BLOCK)


@inlined
def _mix64(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 30)) * tl.full((), _FIRST, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), _SECOND, tl.uint64)
    return x ^ (x >> 31)


@inlined
def _hashed(
    positions: tl.tensor, row: tl.tensor, columns: tl.int64, seed: tl.int64, width: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The columns of elements in a row, int64, and whether they are negated there."""
    golden = tl.full((), _GOLDEN, tl.uint64)
    key = _mix64(seed.to(tl.uint64) + (row + 1).to(tl.uint64) * golden)
    block, offset = positions // width, positions % width
    state = key + (2 * block + 1).to(tl.uint64) * golden
    start = (((_mix64(state) >> 32) * columns.to(tl.uint64)) >> 32).to(tl.int64)
    negative = (_mix64(state + golden) >> offset.to(tl.uint64)) & 1
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
    """Medians over the rows; zeros become +0."""
    # Triton's blocks need sizes that are powers of two. Rows added for that read as infinity and rank last.
    padded: tl.constexpr = triton.next_power_of_2(rows)
    row = tl.arange(0, padded)[None, :].to(tl.int64)
    column, negative = _hashed(positions[:, None], row, columns, seed, width)
    read = tl.load(table + row * columns + column, mask=inside[:, None] & (row < rows), other=0.0)
    read = tl.where(row < rows, tl.where(negative, -read, read), float("inf"))
    # The rank of each estimate: how many others are less, or equal and in an earlier row.
    one, other = read[:, :, None], read[:, None, :]
    earlier = tl.arange(0, padded)[None, None, :] < tl.arange(0, padded)[None, :, None]
    rank = tl.sum(((other < one) | ((other == one) & earlier)).to(tl.int32), 2)
    # All terms of each sum but one are zero.
    median = tl.sum(tl.where(rank == rows // 2, read, tl.zeros_like(read)), 1)
    if rows % 2 == 0:
        lower = tl.sum(tl.where(rank == rows // 2 - 1, read, tl.zeros_like(read)), 1)
        median = (lower + median) * rounded(0.5, median)
    return median + tl.zeros_like(median)


@compiled
def _insert(
    table: tl.tensor,
    x: tl.tensor,
    at: tl.tensor,
    scale: tl.tensor,
    size: tl.int64,
    columns: tl.int64,
    seed: tl.int64,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Adds to a table in its own dtype. Values are scaled first, by a power of two."""
    places, inside = own_places(size, block)
    positions = places if at is None else tl.load(at + places, mask=inside, other=0)
    row = tl.program_id(1).to(tl.int64)
    column, negative = _hashed(positions, row, columns, seed, width)
    values = tl.load(x + places, mask=inside, other=0.0)
    values = (tl.where(negative, -values, values).to(tl.float64) * tl.load(scale)).to(table.dtype.element_ty)
    tl.atomic_add(table + row * columns + column, values, mask=inside, sem="relaxed")


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
    places, inside = own_places(size, block)
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
    positions, inside = own_places(size, block)
    estimates = _estimate(table, positions, inside, columns, seed, rows, width)
    append_reaching(estimates, positions, inside, threshold, found, count, capacity)
