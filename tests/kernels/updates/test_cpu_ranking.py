"""Selection of the largest magnitudes, in numba and in torch, against the definition."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_sparsecomm.kernels import Reference
from lightning_sparsecomm.kernels.updates.cpu import Cpu
from tests.kernels.bits import DTYPES, each_dtype, numbers, same_bits
from tests.reference.selection import top_k

KERNELS = [Reference(), Cpu()]


def values(kind: str, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, dtype=dtype, generator=generator)
    if kind == "heavy-tailed":
        return x**3
    if kind == "sparse":
        return x * (torch.rand(size, generator=generator) < 0.02)
    if kind == "constant":
        return torch.full((size,), -1.5, dtype=dtype)
    if kind == "sorted":
        return x.sort().values
    if kind == "zero":
        return x * 0
    if kind == "ties":
        return (2 * x).round()
    if kind == "negative":
        return -x.abs()
    if kind == "subnormal":
        # Multiples of the smallest subnormal, some of them 0.
        return (4 * x).round() * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    if kind == "mixed":
        return numbers(size, dtype, size)
    return x


VALUES = ["normal", "heavy-tailed", "sparse", "constant", "sorted", "zero", "ties", "negative", "subnormal", "mixed"]
each_values = pytest.mark.parametrize("kind", VALUES)


@each_dtype
@each_values
def test_largest(kind, dtype):
    for size in (0, 1, 33, 2049):
        x = values(kind, size, dtype)
        before = x.clone()
        for k in sorted({0, 1, 2, size // 100, size // 2, size - 1, size, size + 1, 3 * size} - {-1}):
            seed = (0, 1, 2**62 + 12345, 2**63 - 1)[k % 4]
            expected = torch.tensor(top_k(x.numpy(), k, seed), dtype=torch.int64)
            for kernels in KERNELS:
                assert same_bits(kernels.largest(x, k, seed), expected)
        assert same_bits(x, before)


@pytest.mark.few(8)
@each_dtype
@each_values
def test_largest_of_many(kind, dtype):
    """Of so many that a sample tells where the k-th largest is about; of some kinds there are too many about there."""
    size = 70_001
    x = values(kind, size, dtype)
    for k in (0, 1, 20, size // 100, size // 5, size // 2, size - 5000, size - 1, size):
        expected = torch.tensor(top_k(x.numpy(), k, 12345), dtype=torch.int64)
        assert same_bits(Cpu().largest(x, k, 12345), expected), k


@each_dtype
@pytest.mark.parametrize("rows", [0.01, 0.05, 0.3])
def test_largest_where_most_are_zero(rows, dtype):
    """As in gradients of embeddings, in which few rows are not: of k, near their number, and more."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1100, 64, dtype=dtype, generator=generator)
    x = (x * (torch.rand(1100, 1, generator=generator) < rows)).view(-1)
    found = int(x.count_nonzero())
    for k in (1, found // 2, found - 1, found, found + 1, 2 * found, 60_000):
        assert same_bits(Cpu().largest(x, k, 7), Reference().largest(x, k, 7)), k


@each_dtype
@pytest.mark.parametrize("sampled", [0.0, 1e-3, 1e3])
def test_largest_where_the_sample_misleads(dtype, sampled):
    x = values("normal", 70_001, dtype)
    # Any element that a sample with a fixed odd stride of up to 9 can have.
    for stride in range(1, 10, 2):
        x[::stride][:: 9 // stride + 1] *= sampled
    for k in (1, 700, 35_000, 69_000):
        assert same_bits(Cpu().largest(x, k, 0), Reference().largest(x, k, 0))


@each_dtype
@each_values
def test_kth_largest(kind, dtype):
    for size in (1, 33, 2049):
        magnitudes = values(kind, size, dtype).abs()
        ordered = magnitudes.sort(descending=True).values.tolist()
        for k in sorted({1, 2, max(1, size // 100), (size + 1) // 2, max(1, size - 1), size}):
            for kernels in KERNELS:
                assert kernels.kth_largest(magnitudes, min(k, size)) == ordered[min(k, size) - 1]


least = float(np.finfo(np.float32).smallest_subnormal)
# Few distinct magnitudes, so ties are common.
crowded = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, least, -least, 2 * least, 3e38, -3e38])
spread = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None)  # numba compiles at the first call
@given(
    st.lists(crowded, max_size=70) | st.lists(spread, max_size=70),
    st.sampled_from(DTYPES),
    st.integers(1, 80),
    st.integers(0, 2**63 - 1),
)
def test_selection_of_anything(elements, dtype, k, seed):
    x = torch.tensor(elements, dtype=dtype)
    expected = top_k(x.numpy(), k, seed)
    ordered = sorted((abs(value) for value in x.tolist()), reverse=True)
    for kernels in KERNELS:
        assert kernels.largest(x, k, seed).tolist() == expected
        if elements:
            assert kernels.kth_largest(x.abs(), min(k, len(elements))) == ordered[min(k, len(elements)) - 1]


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda each: type(each).__name__)
@each_values
@each_dtype
def test_the_largest_of_every_row(kernels: Reference, kind: str, dtype: torch.dtype) -> None:
    for columns, k in ((1, 1), (7, 3), (64, 64), (65, 64), (500, 20), (4096, 64), (4096, 1024)):
        rows = values(kind, 5 * columns, dtype).view(5, columns)
        before = rows.clone()
        found = kernels.largest_in_rows(rows, k)
        assert found.dtype == torch.int64 and bool((found.diff() > 0).all())
        assert same_bits(rows, before)
        for number, row in enumerate(rows.abs().numpy()):
            taken = found[(found >= number * columns) & (found < (number + 1) * columns)].numpy() - number * columns
            # The first ones of those that tie, in numba; torch takes any.
            expected = np.argsort(-row, kind="stable")[: min(k, np.count_nonzero(row))]
            np.testing.assert_array_equal(np.sort(row[taken]), np.sort(row[expected]))
            if isinstance(kernels, Cpu):
                np.testing.assert_array_equal(taken, np.sort(expected))
    assert kernels.largest_in_rows(torch.empty(0, 4, dtype=dtype), 2).numel() == 0
