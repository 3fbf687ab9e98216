"""Everything is sent, in DDP's own buckets."""

import pytest

from lightning_sparsecomm.methods import dense
from lightning_sparsecomm.sharing import BucketSync


def test_it_is_one_bucket_sync() -> None:
    (sync,) = dense("bfloat16").syncs
    assert isinstance(sync, BucketSync)
    assert sync.wire_dtype == "bfloat16"
    assert dense().averaging is None
    assert dense().fallback is None


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"wire_dtype must be one of same, float32, float16, bfloat16; got 'fp16'.*'same'"
    ):
        dense("fp16")  # type: ignore[arg-type]
