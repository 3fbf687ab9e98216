"""The update kernels in Triton: in its interpreter, compiled for a GPU without having one, and on a GPU if present."""

import itertools
import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_sparsecomm.kernels import OutOfRangeError, Reference, Update
from tests.kernels.bits import DTYPES, numbers, same_bits
from tests.kernels.triton_process import needs_triton, run
from tests.kernels.updates.cases import KINDS, copy_of, out_of_range, same_update, thresholds_for, update_of

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
            for kind in ("fading", "dampened", "dampened nesterov", "shared moments"):
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

    compare_many(device)
    compare_ranking(device, *more_sizes)


def compare_many(device: str) -> None:
    """`Cuda.update_all_` gives the bits of the reference for tensors of all kinds at once."""
    from lightning_sparsecomm.kernels.updates import cuda
    from lightning_sparsecomm.kernels.updates.cuda import _BLOCK, Cuda

    sizes = (3, _BLOCK + 1, 1, 0, 70, 4, 99, 64, 2 * _BLOCK)
    many = [update_of(kind, size, dtype) for dtype in DTYPES for kind, size in zip(KINDS, sizes, strict=True)]
    for far in (False, True):
        expected = [copy_of(update)._replace(checked=index % 2 > 0) for index, update in enumerate(many)]
        if far:
            expected[3].gradient[-1:] = expected[1].gradient[-1] = float("inf")
        actual = [copy_of(update, device) for update in expected]
        for kernels, updates in ((Reference(), expected), (Cuda(), actual)):
            done: list[Update] = []
            with pytest.raises(OutOfRangeError) if far else nullcontext():
                kernels.update_all_(updates, done)
            assert {id(update) for update in done} == {id(update) for update in updates}
        assert all(same_update(mine, other) for mine, other in zip(actual, expected))
    Cuda().update_all_([])
    # What an interrupt leaves undone is not noted.
    done = []
    with mock.patch.object(cuda, "_blocks", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        Cuda().update_all_(actual, done)
    assert not done and all(same_update(mine, other) for mine, other in zip(actual, expected))


def compare_ranking(device: str, *more_sizes: int) -> None:
    """`Cuda.largest_of_each` finds what the reference does, ties and zeros included."""
    from lightning_sparsecomm.kernels.updates.cuda import Cuda
    from lightning_sparsecomm.kernels.updates.cuda_ranking import _placed

    for dtype, size in itertools.product(DTYPES, (9000, *more_sizes)):
        x = numbers(size, dtype, 3)
        x[5000:6000] = x[5000:6000].mul(4).round().div(4)
        x[7000:8000] = 0.0
        x[7001:7003] = torch.tensor([-0.0, 1e-40])
        x[6200:6400] = -3.0
        x[8000:9000] = x[8000:9000].mul(4).round().div(4)
        stretches = [
            (0, 300, 300),
            (301, 4500, 42),
            (4500, 6000, 333),
            (6100, 6101, 1),
            (6200, 6400, 77),
            (6500, 7000, 1),
            (7000, 8000, 30),
            (8000, size, 99),
        ]
        for some, seed in itertools.product(
            (stretches, stretches[2:3], [(0, 300, 300), (301, 4500, 5000)], []), (0, 2**40 + 7)
        ):
            expected = Reference().largest_of_each(x, some, seed)
            assert same_bits(Cuda().largest_of_each(x.to(device), some, seed), expected)
    # What is as long as the vector is not made anew where only k changes, as in a warm-up.
    made = _placed.cache_info().misses
    for k in range(1, 5):
        Cuda().largest_of_each(x.float().to(device), [(0, 300, k)], 0)
    assert _placed.cache_info().misses == made + 1


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

    from lightning_sparsecomm.kernels.updates import cuda, cuda_ranking

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
                for factor in (1.0, 0.0, 1e-300):
                    numbers = {"keep": factor, "scale": factor, "momentum": factor, "gain": factor}
                    kernels.update_all_([update._replace(**numbers)] * int(1 + 16 * factor))
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
        compiling = Compiling(cuda._update)
        with mock.patch.object(cuda, "_update", compiling):
            kernels.update_all_([update_of("shared moments", 2048, dtype)])
        ptx = compiling.compiled[0].asm["ptx"]
        # Quotients and roots, too, are the nearest numbers.
        assert re.search(rf"\bdiv\.rn\.{width}", ptx) and re.search(rf"\bsqrt\.rn\.{width}", ptx)
        assert not re.search(r"\bfma\.|\.ftz\b|\.approx\b|\.full\b", ptx)
    ranking = {name: Compiling(getattr(cuda_ranking, name)) for name in ("_count", "_descend", "_mark")}
    with mock.patch.multiple(cuda_ranking, **ranking):
        kernels.largest_of_each(torch.ones(9000), [(0, 5000, 3), (5000, 9000, 5)], 0)
    assert all(each.compiled for each in ranking.values())
    # Lengths may need 64 bits.
    compiling = Compiling(cuda._reaching)
    with mock.patch.object(cuda, "_reaching", compiling):
        for size in (17, 33, 2**31 + 1):
            with mock.patch.object(torch.Tensor, "numel", lambda self, size=size: size):
                kernels.reaching(torch.zeros(17), 1.0, 5)
    kernel = compiling.compiled[0]
    assert all(again is kernel for again in compiling.compiled)
    assert kernel.src.signature["n"] == kernel.src.signature["capacity"] == "i64"
