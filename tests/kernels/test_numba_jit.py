"""Kernels that are compiled once per machine, by processes that know nothing of each other."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core.caching import CacheImpl

from lightning_sparsecomm.kernels.numba_jit import CacheFile, compiled
from lightning_sparsecomm.kernels.updates.cpu import flag

ROOT = Path(__file__).parents[2]


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


_COMPILE = """
import sys, numpy as np
from lightning_sparsecomm.kernels.updates import cpu
factors = cpu.Factors(*map(np.float64, (1, 1, 0.5, 1, 0.5, 0)))
pieces = (cpu._update_plain, cpu._update_momentum, cpu._update_nesterov)
for kind in map(int, sys.argv[2]):
    residual, velocity, gradient = np.ones(4), np.ones(4), np.ones(4)
    if sys.argv[1] == "piece":
        pieces[kind](residual, velocity, gradient, factors, False, np.zeros(4096, np.uint8))
    else:
        cpu._update(residual, velocity, gradient, factors, False, kind, np.empty(0, np.int64))
    print(residual[0])
"""


@pytest.mark.slow
def test_kernels_of_several_processes_are_not_taken_for_one_another(tmp_path: Path) -> None:
    """Each process compiles another kind first, so numba gives it the same number; a later one links them."""

    def run(what: str, kinds: str) -> str:
        command = [sys.executable, "-c", _COMPILE, what, kinds]
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    assert run("piece", "0").split() == ["2.0"]
    assert run("piece", "2").split() == ["2.75"]
    assert run("whole", "02").split() == ["2.0", "2.75"]


def test_kernels_of_one_name_are_refused() -> None:
    def kernel(x: Any) -> Any:
        return x

    compiled(kernel)
    with pytest.raises(ValueError, match=r"the __qualname__ of a kernel must be its own in its module; .*kernel is"):
        compiled(kernel)
