"""The update kernels in Triton: in its interpreter, compiled for a GPU without having one, and on a GPU if present."""

import itertools
import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_sparsecomm.kernels import OutOfRangeError, Reference
from tests.kernels.bits import DTYPES, numbers, same_bits
from tests.kernels.triton_process import needs_triton, run
from tests.kernels.updates.cases import copy_of, out_of_range, same_update, thresholds_for, update_of

pytestmark = needs_triton


def test_interpreted(tmp_path):
    run(__name__, "compare('cpu')", tmp_path, TRITON_INTERPRET="1")


def test_compiled_for_a_gpu(tmp_path):
    run(__name__, "check_compiled()", tmp_path)


@pytest.mark.gpu(1)
def test_on_a_gpu(tmp_path):
    run(__name__, "compare('cuda', 10**6 + 3)", tmp_path)


def compare(device: str, *more_sizes: int) -> None:
    """`Cuda` on `device` and the reference on the CPU give the same bits."""
    from lightning_sparsecomm.kernels.updates.cuda import _BLOCK, Cuda

    kernels = Cuda()
    for dtype in DTYPES:
        for size in (0, 1, _BLOCK, _BLOCK + 1, *more_sizes):
            for kind in ("sum", "fading", "dampened", "dampened nesterov"):
                start, expected = update_of(kind, size, dtype), update_of(kind, size, dtype)
                Reference().update_(expected, None, 0)

                actual = copy_of(start, device)
                assert same_bits(kernels.update_(actual, None, 0), torch.empty(0, dtype=torch.int64))
                assert same_update(actual, expected)

                actual = copy_of(start, device)
                assert same_bits(kernels.probe(actual, 3), expected.residual[::3].abs())
                assert same_update(actual, start)

                for threshold in thresholds_for(expected.residual):
                    actual = copy_of(start, device)
                    found = Reference().reaching(expected.residual, threshold, size)
                    assert found is not None
                    assert same_bits(kernels.update_(actual, threshold, size + 1), found)
                    assert same_update(actual, expected)
                    assert same_bits(kernels.reaching(actual.residual, threshold, found.numel()), found)

                # Room for one too few, at the last threshold.
                if found.numel():
                    actual = copy_of(start, device)
                    assert kernels.update_(actual, threshold, found.numel() - 1) is None
                    assert same_update(actual, expected)
                    assert kernels.reaching(actual.residual, threshold, found.numel() - 1) is None
        start = update_of("dampened nesterov", 2 * _BLOCK + 3, dtype)
        for update in out_of_range(start):
            for threshold in (None, 1.0):
                expected, actual = copy_of(update), copy_of(update, device)
                for each, own in ((Reference(), expected), (kernels, actual)):
                    with pytest.raises(OutOfRangeError):
                        each.update_(own, threshold, 10**6)
                assert same_update(actual, expected)
        checked = copy_of(start, device)._replace(checked=True)
        assert kernels.update_(checked, 1.0, 10**6) is not None
        # An address that is no multiple of 16 bytes, like that of a tensor in the middle of a vector.
        x = numbers(3 * _BLOCK, dtype, 5)
        found = Reference().reaching(x[1:-2], 1.0, x.numel())
        assert same_bits(kernels.reaching(x.to(device)[1:-2], 1.0, x.numel()), found)


class Compiling:
    """Replaces a kernel: compiles it for the arguments of each call, and launches nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: list[Any] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        return lambda *args, **kwargs: self.compiled.append(self.kernel.warmup(*args, grid=grid, **kwargs))


def check_compiled() -> None:
    """GPU code rounds every operation and keeps subnormals, and new numbers do not compile it again."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from lightning_sparsecomm.kernels.updates import cuda

    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", 80, 32),
        )
    )
    kernels = cuda.Cuda()
    operations = {"sum": (2, 1), "momentum": (4, 2), "nesterov": (5, 3)}
    for dtype in DTYPES:
        width = "f32" if dtype == torch.float32 else "f64"
        for (kind, (products, sums)), checked in itertools.product(operations.items(), (False, True)):
            compiling = Compiling(cuda._update)
            with mock.patch.object(cuda, "_update", compiling):
                update = update_of(kind, 2048, dtype)._replace(checked=checked)
                for factor in (1.0, 0.0, 0.9, 1e-300, 16.0):
                    numbers = {"keep": factor, "scale": factor, "momentum": factor, "gain": factor}
                    for capacity in (0, 1, 2, 16, 2**33):
                        kernels.update_(update._replace(**numbers), factor, capacity)
            kernel = compiling.compiled[0]
            assert all(again is kernel for again in compiling.compiled)
            ptx = kernel.asm["ptx"]
            assert not re.search(r"\bfma\.|\.ftz\b", ptx)
            # As many operations as the formulas have, for each element of a thread.
            elements = len(re.findall(rf"\badd(\.rn)?\.{width}", ptx)) / sums
            assert elements >= 1
            # Triton 3.5 computes some products twice, to the same bits.
            found = len(re.findall(rf"\bmul(\.rn)?\.{width}", ptx))
            assert products * elements <= found < 1.2 * products * elements
            assert len(re.findall(rf"\bsetp\.ge\.{width}", ptx)) == elements
    # Lengths may need 64 bits.
    compiling = Compiling(cuda._reaching)
    with mock.patch.object(cuda, "_reaching", compiling):
        for size in (17, 33, 2**31 + 1):
            with mock.patch.object(torch.Tensor, "numel", lambda self, size=size: size):
                kernels.reaching(torch.zeros(17), 1.0, 5)
    kernel = compiling.compiled[0]
    assert all(again is kernel for again in compiling.compiled)
    assert kernel.src.signature["n"] == kernel.src.signature["capacity"] == "i64"
