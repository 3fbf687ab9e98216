"""Methods whose bytes hardly depend on the number of ranks: their parts, and what they refuse."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from lightning_sparsecomm.channel import ErrorFeedback
from lightning_sparsecomm.exchange import BlockReduce, DenseAllReduce, SketchedTopK
from lightning_sparsecomm.methods import dense, s2_reducer, sketched_sgd
from lightning_sparsecomm.sharing import BucketSync, GradientSync, Method


def syncs(method: Method) -> list[GradientSync]:
    assert all(isinstance(sync, GradientSync) for sync in method.syncs)
    return list(method.syncs)  # type: ignore[arg-type]


def test_sketched_sgd_searches_weights_and_sends_the_rest_whole() -> None:
    sketched, dense = syncs(sketched_sgd(k=3, rows=7, columns=50, candidates=16, sketch_dtype="bfloat16"))
    exchange = sketched.channel.exchange
    assert isinstance(exchange, SketchedTopK)
    assert (exchange.k, exchange.rows, exchange.columns, exchange.candidates) == (3, 7, 50, 16)
    assert exchange.wire_dtype == "bfloat16"
    assert isinstance(dense.channel.exchange, DenseAllReduce)
    assert (sketched.min_dimensions, dense.rest) == (2, True)


def test_s2_reducer_has_a_sync_for_each_kind_of_parameter() -> None:
    top, sparse, dense = syncs(s2_reducer())
    for sync in (top, sparse):
        assert isinstance(sync.channel.exchange, BlockReduce)
        assert sync.channel.exchange.sketch_ratio == 0.5
    assert [top.channel.exchange.blocks.density, sparse.channel.exchange.blocks.density] == [1 / 32, 1.0]  # type: ignore[attr-defined]
    assert [type(memory) for memory in top.channel.memories] == [ErrorFeedback]
    assert sparse.channel.memories == ()
    assert (top.takes_sparse, sparse.takes_sparse, dense.takes_sparse) == (False, True, False)
    assert (top.min_dimensions, dense.rest) == (2, True)
    assert isinstance(dense.channel.exchange, DenseAllReduce)
    # What is excluded goes whole, and stays sparse where it is.
    _, _, excluded, _ = syncs(s2_reducer(exclude=["head.*"], error_feedback=False))
    assert excluded.parameters == ("head.*",)
    assert excluded.takes_sparse
    assert isinstance(excluded.channel.exchange, BlockReduce)
    assert excluded.channel.exchange.sketch_ratio is None


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: sketched_sgd(0.1, k=3), "density and k "),
        (lambda: sketched_sgd(k=0), "k must be a whole number, at least 1"),
        (lambda: sketched_sgd(rows=0), "rows must be"),
        (lambda: sketched_sgd(sketch_dtype="int8"), "sketch_dtype must be one of same, float16, bfloat16; got 'int8'"),
        (lambda: s2_reducer(block_density=2), "block_density must be in (0, 1]: the fraction of elements sent; got 2."),
        (lambda: s2_reducer(block_size=0), "block_size must be a whole number, at least 1"),
        (lambda: s2_reducer(sketch_ratio=0), "sketch_ratio must be a positive number"),
        (lambda: s2_reducer(sized_by="most"), "sized_by must be 'union'"),
        (lambda: s2_reducer(sparse_below=2), "sparse_below must be in [0, 1]"),
        (lambda: s2_reducer(sketch_ratio=None, always_sketch=True), "always_sketch=True needs a sketch"),
    ],
)
def test_refuses(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        make()


def test_dense_is_one_bucket_sync() -> None:
    (sync,) = dense("bfloat16").syncs
    assert isinstance(sync, BucketSync)
    assert sync.wire_dtype == "bfloat16"
    assert dense().averaging is None
    assert dense().fallback is None


def test_dense_refuses_an_unknown_dtype() -> None:
    with pytest.raises(
        ValueError, match=r"wire_dtype must be one of same, float32, float16, bfloat16; got 'fp16'.*'same'"
    ):
        dense("fp16")  # type: ignore[arg-type]
