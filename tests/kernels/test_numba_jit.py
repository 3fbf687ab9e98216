"""Kernels that are compiled once per machine, by processes that know nothing of each other."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core.caching import CacheImpl

from lightning_sparsecomm.kernels.numba_jit import CacheFile, compiled
from lightning_sparsecomm.kernels.updates.cpu import flag


def test_processes_that_compile_at_the_same_time_do_not_mix_up_their_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have read the index before either has written it; then the first one writes its kernel last."""
    first, second = (CacheFile(str(tmp_path), "kernel", "stamp") for _ in range(2))
    with monkeypatch.context() as stale:
        stale.setattr(CacheFile, "_load_index", lambda file: {})
        first.save("float32", "kernel of float32")
        second.save("float64", "kernel of float64")
        first.save("float32", "kernel of float32")
    later = CacheFile(str(tmp_path), "kernel", "stamp")
    assert later.load("float32") == "kernel of float32"
    # Lost from the index: it is compiled again.
    assert later.load("float64") is None
    second.save("float64", "kernel of float64")
    assert [later.load(key) for key in ("float32", "float64")] == ["kernel of float32", "kernel of float64"]


def test_kernels_use_that_cache() -> None:
    kernel: Any = flag
    assert type(kernel._cache._cache_file) is CacheFile


def test_a_kernel_works_where_no_cache_is_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])

    def doubled(x: Any) -> Any:
        return 2 * x

    kernel: Any = compiled(doubled)
    assert kernel(np.float32(3)) == 6
