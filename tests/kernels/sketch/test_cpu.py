"""The sketch kernels, in numba and in torch, against each other and the definition, bit for bit."""

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.kernels import SketchKernels
from lightning_sparsecomm.kernels.sketch.cpu import CpuSketchKernels
from lightning_sparsecomm.kernels.sketch.reference import sampled_size
from tests.kernels.bits import DTYPES, numbers, same_bits
from tests.reference.count_sketch import insert, query

KERNELS = [SketchKernels(), CpuSketchKernels()]
# Around the blocks of 64.
SIZES = [0, 1, 63, 64, 65, 1000]
COLUMNS = [1, 2, 3, 31, 63, 64, 65, 100, 1009]
SEEDS = [0, 7, 2**63, 2**64 - 1, -3]

# float64 kernels are the same code as float32 kernels, and take as long to compile.
each_dtype = pytest.mark.parametrize(
    "dtype", [pytest.param(each, marks=() if each == torch.float32 else pytest.mark.slow) for each in DTYPES], ids=str
)


def tables(rows: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.zeros(rows, columns, dtype=dtype) for _ in KERNELS]


@each_dtype
@pytest.mark.parametrize("columns", COLUMNS)
def test_insert_and_query_follow_the_definition(columns, dtype):
    """The definition is slow, so not every size is combined with every number of rows."""
    for rows, size in [(1, 1000), (2, 64), (2, 0), (3, 65), (4, 63), (5, 1), (5, 65), (6, 63)]:
        seed = SEEDS[(rows + size) % len(SEEDS)]
        x = numbers(size, dtype, size)
        positions = list(range(0, size, 3))
        expected = np.zeros((rows, columns), x.numpy().dtype)
        insert(expected, list(range(size)), x.numpy(), seed)
        estimates = query(expected, list(range(size)), seed)
        twice = expected.copy()
        insert(twice, positions, x.numpy()[positions], seed)
        at = torch.tensor(positions, dtype=torch.int64)
        for kernels, table in zip(KERNELS, tables(rows, columns, dtype)):
            kernels.insert_(table, x, seed)
            assert same_bits(table, torch.from_numpy(expected))
            assert same_bits(kernels.query(table, size, seed), torch.from_numpy(estimates))
            assert same_bits(kernels.query_at(table, at, seed), torch.from_numpy(estimates[positions]))
            kernels.insert_at_(table, at, x[at], seed)
            assert same_bits(table, torch.from_numpy(twice))


@each_dtype
@pytest.mark.parametrize("columns", COLUMNS)
def test_numba_equals_the_reference(columns, dtype):
    for rows in (1, 2, 3, 4, 5, 6, 9, 15):
        for size in SIZES:
            x, seed = numbers(size, dtype, size), SEEDS[rows % len(SEEDS)]
            at = torch.arange(size % 5, size, 1 + rows)
            reference, cpu = tables(rows, columns, dtype)
            for kernels, table in zip(KERNELS, (reference, cpu)):
                kernels.insert_(table, x, seed)
                kernels.insert_at_(table, at, x[at], seed + 1)
            assert same_bits(reference, cpu)
            estimates = KERNELS[0].query(reference, size, seed)
            assert same_bits(CpuSketchKernels().query(cpu, size, seed), estimates)
            assert same_bits(CpuSketchKernels().query_at(cpu, at, seed), estimates[at])


@each_dtype
@pytest.mark.parametrize("columns", [1, 3, 64, 1009])
def test_sampled_blocks(columns, dtype):
    table = torch.randn(3, columns, dtype=dtype)
    width = 1 << min(columns, 64).bit_length() - 1
    for size in (*SIZES, 64 * 61 + 5):
        for stride in (1, 2, 3, 61):
            chosen = torch.arange(size) // width % stride == 0
            expected = KERNELS[0].query(table, size, 5)[chosen]
            assert sampled_size(size, width, stride) == expected.numel()
            for kernels in KERNELS:
                assert same_bits(kernels.query(table, size, 5, stride), expected)


@each_dtype
@pytest.mark.parametrize("columns", [1, 3, 64, 1009])
def test_reaching(columns, dtype):
    table = torch.randn(3, columns, dtype=dtype).mul_(4).round_()
    for size in (*SIZES, 64 * 40 + 5):
        estimates = KERNELS[0].query(table, size, 5)
        for threshold in (1e-300 if dtype == torch.float64 else 1e-40, 2.0, 4.5, 1e9):
            expected = (estimates.abs() >= threshold).nonzero().view(-1)
            count = expected.numel()
            # Ample, just enough, one too few, none.
            for capacity in {10**9, size, count, max(count - 1, 0), 0}:
                for kernels in KERNELS:
                    found = kernels.reaching(table, size, threshold, capacity, 5)
                    if count > capacity:
                        assert found is None
                    else:
                        assert same_bits(found.positions, expected.to(torch.int32))
                        assert same_bits(found.estimates, estimates[expected])


def test_estimates_of_zeros_are_positive_zeros():
    # Half of the elements are negated.
    for rows in (1, 2, 3, 4, 5):
        for kernels, table in zip(KERNELS, tables(rows, 100, torch.float32)):
            zeros = torch.zeros(500)
            assert same_bits(kernels.query(table, 500, 3), zeros)
            assert same_bits(kernels.query(table.neg_(), 500, 3), zeros)
            assert same_bits(kernels.query_at(table, torch.arange(500), 3), zeros)


def test_positions_beyond_32_bits():
    positions = torch.tensor([0, 2**31 - 1, 2**31, 2**40 + 7, 2**62])
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    expected = np.zeros((3, 1009), np.float32)
    insert(expected, positions.tolist(), values.numpy(), 11)
    for kernels, table in zip(KERNELS, tables(3, 1009, torch.float32)):
        kernels.insert_at_(table, positions, values, 11)
        assert same_bits(table, torch.from_numpy(expected))
        assert kernels.query_at(table, positions, 11).tolist() == query(expected, positions.tolist(), 11).tolist()


def test_the_most_columns():
    # One row of 2³¹ columns; only touched pages take memory.
    table = torch.from_numpy(np.zeros((1, 2**31), np.float32))
    positions = torch.tensor([0, 64, 1000, 10**9])
    expected = torch.tensor([1.0, 2.0, 3.0, 4.0])
    CpuSketchKernels().insert_at_(table, positions, expected, 2)
    assert CpuSketchKernels().query_at(table, positions, 2).tolist() == expected.tolist()
    assert SketchKernels().query_at(table, positions, 2).tolist() == expected.tolist()
