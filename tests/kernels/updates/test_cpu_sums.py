"""Sums of sparse vectors, in numba and in torch, against the definition."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_sparsecomm.kernels import Moves, Reference
from lightning_sparsecomm.kernels.updates.cpu import Cpu
from tests.kernels.bits import DTYPES, each_dtype, same_bits

KERNELS = [Reference(), Cpu()]

each_kernels = pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: type(kernels).__name__)


def in_order(indices: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Sums by index, one addition after another in the precision of `x`."""
    sums: dict[int, np.floating] = {}
    for index, value in zip(indices.tolist(), x.numpy()):
        sums[index] = sums[index] + value if index in sums else value
    ordered = sorted(sums)
    return torch.tensor(ordered, dtype=torch.int64), torch.tensor([sums[i] for i in ordered], dtype=x.dtype)


def assert_adds_up(runs: list[list[int]], x: Tensor) -> None:
    indices = torch.tensor([index for run in runs for index in run], dtype=torch.int64)
    expected = in_order(indices, x)
    before = indices.clone(), x.clone()
    for kernels in KERNELS:
        unique, sums = kernels.add_up(indices, x)
        assert same_bits(unique, expected[0]) and same_bits(sums, expected[1])
    assert same_bits(indices, before[0]) and same_bits(x, before[1])


@each_dtype
@pytest.mark.parametrize(
    "runs",
    [
        [[]],
        [[5]],
        [[0, 3, 2**40]],
        [[], [1, 2]],
        [[1, 2], []],
        [[1, 2, 3], [1, 2, 3]],
        [[4, 5], [1, 2]],
        [[1, 4, 9], [], [0, 4, 9], [9]],
        [[7], [7], [7], [7]],
    ],
    ids=str,
)
def test_add_up(runs, dtype):
    # Cubed, so that a different order or precision gives a different sum.
    x = torch.randn(sum(map(len, runs)), dtype=dtype) ** 3
    assert_adds_up(runs, x)


@each_dtype
@each_kernels
def test_adds_up_in_the_order_of_the_runs(kernels, dtype):
    big = 8.0 / torch.finfo(dtype).eps
    indices = torch.zeros(4, dtype=torch.int64)
    # Added to the big number, a one is lost.
    for x, total in ([big, -big, 1, 1], 2), ([big, 1, 1, -big], 0), ([1, 1, big, -big], 0), ([1, big, -big, 1], 1):
        unique, sums = kernels.add_up(indices, torch.tensor(x, dtype=dtype))
        assert (unique.tolist(), sums.tolist()) == ([0], [total])


@each_dtype
def test_adds_up_long_runs(dtype):
    generator = torch.Generator().manual_seed(4)
    runs = [torch.randperm(3000, generator=generator)[:size].sort().values.tolist() for size in (1000, 2500, 0, 1)]
    assert all(a < b for run in runs for a, b in pairwise(run))
    assert_adds_up(runs, torch.randn(3501, dtype=dtype, generator=generator) ** 3)


@settings(deadline=None)  # numba compiles at the first call
@given(
    st.lists(st.lists(st.integers(0, 6), unique=True, max_size=6).map(sorted), min_size=1, max_size=4),
    st.sampled_from(DTYPES),
    st.data(),
)
def test_adds_up_anything(runs, dtype, data):
    # No negative zeros: the test below has them.
    size = sum(map(len, runs))
    elements = st.floats(-(2.0**99), 2.0**99, width=32).map(lambda value: value + 0.0)
    assert_adds_up(runs, torch.tensor(data.draw(st.lists(elements, min_size=size, max_size=size)), dtype=dtype))


@each_dtype
@each_kernels
def test_adds_up_negative_zeros(kernels, dtype):
    indices = torch.tensor([1, 2, 3, 2, 3])
    x = torch.tensor([-0.0, -0.0, -0.0, -0.0, 0.0], dtype=dtype)
    sums = kernels.add_up(indices, x)[1]
    assert same_bits(sums, torch.tensor([-0.0, -0.0, 0.0], dtype=dtype))


@each_kernels
@each_dtype
@pytest.mark.parametrize("factor", [1.0, -1.0, 0.5])
def test_adds_at_indices(kernels: Reference, dtype: torch.dtype, factor: float):
    generator = torch.Generator().manual_seed(0)
    total = torch.randn(1000, dtype=dtype, generator=generator)
    values = torch.randn(400, dtype=dtype, generator=generator)
    indices = torch.randperm(1000, generator=generator)[:400]
    expected = total.clone()
    expected[indices] += factor * values
    kernels.add_at_(total, indices, values, factor)
    assert same_bits(total, expected)


@each_kernels
@each_dtype
def test_puts_elements_in_their_places(kernels: Reference, dtype: torch.dtype):
    indices, x = torch.tensor([0, 2, 3, 7]), torch.tensor([1.0, -0.0, 3.0, 4.0], dtype=dtype)
    total = torch.full((9,), 5.0, dtype=dtype)
    kernels.put_at_(total, indices, x)
    assert same_bits(total, torch.tensor([1.0, 5, -0.0, 3, 5, 5, 5, 4, 5], dtype=dtype))
    # The first two by one further, none from 2 on, and the last by two fewer.
    moves = Moves(torch.tensor([0, 2, 3]), torch.tensor([2, 0, 1]), torch.tensor([1, 100, -2]))
    total = torch.full((9,), 5.0, dtype=dtype)
    kernels.put_at_(total, indices, x, moves)
    assert same_bits(total, torch.tensor([5, 1.0, 5, -0.0, 5, 4, 5, 5, 5], dtype=dtype))


@each_kernels
@pytest.mark.parametrize("wrong", [-1, 3, 2**40])
def test_places_out_of_range_are_refused(kernels: Reference, wrong: int):
    total = torch.zeros(5)[1:4]
    moves = Moves(torch.tensor([0, 1]), torch.tensor([1, 1]), torch.tensor([0, wrong]))
    with pytest.raises(IndexError, match=r"out of|not from 0 to 2"):
        kernels.put_at_(total, torch.tensor([0, 0]), torch.ones(2), moves)
    assert total[1:].tolist() == [0.0, 0.0]


@each_kernels
@pytest.mark.parametrize("wrong", [-1, 3, 2**40])
def test_indices_out_of_range_are_refused(kernels: Reference, wrong: int):
    total = torch.zeros(5)[1:4]
    with pytest.raises(IndexError, match=r"out of|not from 0 to 2"):
        kernels.add_at_(total, torch.tensor([0, wrong]), torch.ones(2), 1.0)
    assert total.tolist() == [1.0, 0.0, 0.0]
