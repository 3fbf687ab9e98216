"""Layouts, and vectors over them."""

import pytest
import torch

from lightning_sparsecomm.basis.layout import MAX_SIZE, Layout, SparseVector, mean
from tests.one_by_one import OneByOne

LAYOUT = Layout([("a", (2, 3)), ("empty", (0, 4)), ("scalar", ()), ("b", (4,))])


def test_layout() -> None:
    assert LAYOUT.size == 11
    vector = torch.arange(11.0)
    views = LAYOUT.views(vector)
    assert [tuple(view.shape) for view in views] == [(2, 3), (0, 4), (), (4,)]
    assert torch.equal(torch.cat([view.flatten() for view in views]), vector)
    views[3][0] = -1
    assert vector[7] == -1
    assert LAYOUT.counts(torch.tensor([0, 5, 6, 10])) == [2, 0, 1, 1]
    assert LAYOUT.counts(torch.tensor([], dtype=torch.int64)) == [0, 0, 0, 0]


def test_layouts_differ_where_names_shapes_or_order_do() -> None:
    equal = Layout([("a", (2, 3)), ("empty", (0, 4)), ("scalar", ()), ("b", (4,))])
    assert equal == LAYOUT
    assert equal.fingerprint == LAYOUT.fingerprint
    for other in ([("a", (3, 2)), ("b", (4,))], [("b", (4,)), ("a", (2, 3))], [("a", (2, 3)), ("c", (4,))]):
        assert Layout(other).fingerprint != Layout([("a", (2, 3)), ("b", (4,))]).fingerprint
    with pytest.raises(ValueError, match=r"tensors must have different names; got 'a' twice\. Name each"):
        Layout([("a", (1,)), ("a", (2,))])
    with pytest.raises(ValueError, match="32-bit"):
        Layout([("a", (MAX_SIZE + 1,))])


@pytest.mark.parametrize("count", [1, 40, 400])
def test_mean_adds_in_order_sparse_or_dense(count: int) -> None:
    size = 500
    generator = torch.Generator().manual_seed(count)
    vectors, expected = [], torch.zeros(size)
    for _ in range(3):
        indices = torch.randperm(size, generator=generator)[:count].sort().values
        vectors.append(SparseVector(indices, torch.randn(count, generator=generator), size))
    for vector in vectors:
        expected += vector.dense()
    result = mean(vectors, torch.float32)
    assert isinstance(result, SparseVector) == (3 * count <= size // 8)
    dense = result.dense() if isinstance(result, SparseVector) else result
    assert torch.equal(dense, expected / 3)
    # One of the vectors is dense, and the sum is float64.
    mixed = mean([*vectors[:2], vectors[2].dense()], torch.float64)
    torch.testing.assert_close(mixed, expected.double() / 3)


def test_a_dense_mean_holds_no_vector_while_the_next_is_made() -> None:
    made = OneByOne()
    mean(made.vectors(3, 500), torch.float32)
    assert made.held == [0, 0, 0]
