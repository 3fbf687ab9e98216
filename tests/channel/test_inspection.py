"""Gradients looked over: which is not finite, their norm, and sparse ones joined."""

import math

import pytest
import torch

from lightning_sparsecomm.basis import Layout
from lightning_sparsecomm.channel.inspection import elements_of, first_nonfinite, joined_sparse, norm_of

CPU = torch.device("cpu")


def rows(indices: list[int], values: list[list[float]], size: int) -> torch.Tensor:
    return torch.sparse_coo_tensor([indices], values, (size, len(values[0])), check_invariants=True).coalesce()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_gradient_that_is_not_finite_is_found(bad: float) -> None:
    good = torch.ones(3)
    assert first_nonfinite([]) is None
    assert first_nonfinite([None, good, None]) is None
    assert first_nonfinite([None, good, torch.tensor([1.0, bad]), torch.tensor([bad])]) == 2
    assert first_nonfinite([rows([0, 2], [[1.0], [bad]], 4), good]) == 0


def test_a_sum_that_overflows_is_no_reason_to_refuse() -> None:
    large = torch.full((4,), 3e38)
    assert first_nonfinite([large, -large]) is None
    half = torch.full((4,), 6e4, dtype=torch.float16)
    assert first_nonfinite([half]) is None


def test_the_norm_of_all_gradients_together() -> None:
    assert norm_of([]) == 0
    assert norm_of([torch.tensor([3.0]), torch.tensor([[4.0]])]) == 5
    # Entries of one row that occur twice count once, with their sum.
    sparse = torch.sparse_coo_tensor([[1, 1]], [[1.0], [2.0]], (3, 1), check_invariants=True)
    assert norm_of([sparse, torch.tensor([4.0], dtype=torch.float16)]) == 5
    assert elements_of(sparse).tolist() == [[3.0]]


def test_the_norm_is_finite_exactly_where_all_elements_are() -> None:
    assert norm_of([torch.full((4,), 1e30)]) == pytest.approx(2e30)
    assert math.isinf(norm_of([torch.tensor([1.0, math.inf])]))
    assert math.isnan(norm_of([torch.tensor([1.0, math.nan])]))


def test_sparse_gradients_are_joined_in_row_major_order() -> None:
    layout = Layout([("a", (3, 2)), ("none", (4, 2)), ("cube", (2, 2, 2)), ("empty", (2, 2))])
    cube = torch.sparse_coo_tensor([[1], [0]], [[7.0, 8.0]], (2, 2, 2), check_invariants=True).coalesce()
    gradients = [
        rows([0, 2], [[1.0, 2.0], [3.0, 4.0]], 3),
        None,
        cube,
        torch.zeros(2, 2).to_sparse(1),
    ]
    values, indices = joined_sparse(gradients, layout, torch.float64, CPU)
    assert values.dtype == torch.float64
    assert values.tolist() == [1, 2, 3, 4, 7, 8]
    assert indices.tolist() == [0, 1, 4, 5, 14 + 4, 14 + 5]
    # The dense vector of the same gradients says the same.
    dense = torch.zeros(layout.size, dtype=torch.float64)
    for view, gradient in zip(layout.views(dense), gradients, strict=True):
        if gradient is not None:
            view.copy_(gradient.to_dense())
    assert torch.equal(dense[indices], values)
    assert dense.count_nonzero() == 6


def test_no_gradient_gives_an_empty_vector() -> None:
    values, indices = joined_sparse([None], Layout([("a", (3, 2))]), torch.float32, CPU)
    assert (values.shape, indices.shape, indices.dtype) == ((0,), (0,), torch.int64)
