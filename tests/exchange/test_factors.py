"""Orthonormal columns, to the same bits everywhere."""

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.exchange.factors import orthonormalized


def off(q: Tensor) -> float:
    """How far columns are from orthonormal."""
    q = q.double()
    return float((q.t() @ q - torch.eye(q.shape[1], dtype=torch.float64)).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (7, 7), (300, 4), (1025, 3)])
def test_columns_are_orthonormal_and_span_the_same(shape: tuple[int, int], dtype: torch.dtype) -> None:
    p = torch.randn(shape, dtype=dtype)
    (q,) = orthonormalized([p])
    assert q.dtype == dtype
    assert off(q) < (3e-7 if dtype == torch.float32 else 1e-14)
    torch.testing.assert_close(q @ (q.t() @ p), p)
    torch.testing.assert_close(q[:, 0], p[:, 0] / p[:, 0].norm())


def test_columns_that_are_nearly_the_same() -> None:
    """Rounded to bfloat16, a Gram-Schmidt in that dtype, or only once, would leave them far from orthogonal."""
    base = torch.randn(500, 1)
    for noise in (1e-2, 1e-4, 1e-6):
        p = (base + noise * torch.randn(500, 4)).to(torch.float32)
        (q,) = orthonormalized([p])
        assert off(q) < 3e-7
    wide = base.double()
    (q,) = orthonormalized([wide + 1e-9 * torch.randn(500, 4, dtype=torch.float64)])
    assert off(q) < 1e-14
    (q,) = orthonormalized([(base + 1e-2 * torch.randn(500, 4)).bfloat16().float()])
    assert off(q) < 3e-7


@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1.0, 1e20, 1e38])
def test_columns_of_any_size(scale: float) -> None:
    p = torch.randn(64, 3)
    p /= p.abs().max()
    (expected,) = orthonormalized([p])
    (q,) = orthonormalized([p * scale])
    torch.testing.assert_close(q, expected, rtol=0, atol=1e-5 if scale > 1e-38 else 1e-3)


def test_a_column_that_depends_on_others_is_zero() -> None:
    p = torch.randn(20, 4)
    p[:, 1], p[:, 2] = 0, -2 * p[:, 0]
    (q,) = orthonormalized([p])
    assert not q[:, 1:3].any()
    assert off(q[:, [0, 3]]) < 3e-7
    (zero,) = orthonormalized([torch.zeros(5, 2)])
    assert not zero.any()


def test_the_others_change_no_bit() -> None:
    matrices = [torch.randn(rows, rank) for rows, rank in ((9, 2), (16, 4), (10, 1), (300, 2), (12, 2))]
    together = orthonormalized(matrices)
    for matrix, found in zip(matrices, together, strict=True):
        (alone,) = orthonormalized([matrix])
        assert found.shape == matrix.shape
        assert torch.equal(alone, found)
    assert orthonormalized([]) == []


def test_sums_are_in_the_order_that_is_promised() -> None:
    """In pairs of halves, in float64, each operation rounded by itself."""
    p = np.random.default_rng(0).standard_normal((5, 2)).astype(np.float32)
    x = np.zeros((8, 2))
    x[:5] = p / np.abs(p).max(0).astype(np.float64)

    def total(v: np.ndarray) -> float:
        while len(v) > 1:
            v = v[: len(v) // 2] + v[len(v) // 2 :]
        return float(v[0])

    for _ in range(2):
        x[:, 0] /= np.sqrt(total(x[:, 0] * x[:, 0]))
        x[:, 1] -= x[:, 0] * total(x[:, 0] * x[:, 1])
        x[:, 1] /= np.sqrt(total(x[:, 1] * x[:, 1]))
    (q,) = orthonormalized([torch.from_numpy(p)])
    np.testing.assert_array_equal(q.numpy(), x[:5].astype(np.float32))
