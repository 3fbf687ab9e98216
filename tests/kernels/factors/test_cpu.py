"""Products of two thin matrices, to the same bits everywhere."""

import numpy as np
import pytest
import torch

from lightning_sparsecomm.kernels.factors.cpu import CpuFactorKernels
from lightning_sparsecomm.kernels.factors.reference import FactorKernels


@pytest.mark.parametrize("kernels", [FactorKernels(), CpuFactorKernels()], ids=["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "rank"), [(1, 1, 1), (3, 50_000, 2), (90, 300, 3), (70_000, 2, 2), (31, 17, 4), (9, 65, 7)]
)
def test_a_product_rounds_each_operation_by_itself(
    rows: int, columns: int, rank: int, dtype: torch.dtype, kernels: FactorKernels
) -> None:
    p, q = torch.randn(rank, rows, dtype=dtype), torch.randn(columns, rank, dtype=dtype).t()
    out = torch.full((rows, columns), torch.nan, dtype=dtype)
    kernels.product_(out, p, q)
    left, right = p.numpy()[:, :, None], q.numpy()[:, None]
    expected = left[0] * right[0]
    for k in range(1, rank):
        expected = expected + left[k] * right[k]
    np.testing.assert_array_equal(out.numpy(), expected)
