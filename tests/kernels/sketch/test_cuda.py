"""The sketch kernels in Triton against the reference: in Triton's interpreter, and on a GPU if present."""

import pytest
import torch

from lightning_sparsecomm.kernels import SketchKernels
from tests.kernels.bits import DTYPES, same_bits
from tests.kernels.triton_process import needs_triton, run


@needs_triton
@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))],
)
def test_triton(device, tmp_path):
    run(__name__, f"compare({device!r})", tmp_path, **({"TRITON_INTERPRET": "1"} if device == "cpu" else {}))


def compare(device: str) -> None:
    """`CudaSketchKernels` on `device` and the reference on the CPU give the same bits, when the sums are exact."""
    from lightning_sparsecomm.kernels.sketch.cuda import CudaSketchKernels

    reference, kernels = SketchKernels(), CudaSketchKernels()
    # Few, because the interpreter is slow.
    shapes = [(5, 100, 130, 2**64 - 5), (2, 3, 70, -3)]
    for (rows, columns, size, seed), dtype in zip(shapes, DTYPES):
        x, at = torch.randint(-9, 9, (size,)).to(dtype), torch.arange(0, size, 3)
        expected = torch.zeros(rows, columns, dtype=dtype)
        actual = expected.clone().to(device)
        reference.insert_(expected, x, seed)
        reference.insert_at_(expected, at, x[at], seed)
        kernels.insert_(actual, x.to(device), seed)
        kernels.insert_at_(actual, at.to(device), x[at].to(device), seed)
        assert same_bits(actual + 0.0, expected + 0.0)

        # Sums that rounding would change have the same bits each time, and those of the reference to round-off.
        x = torch.randn(size).to(dtype) * torch.logspace(-3, 3, size).to(dtype)
        rounded, again, once_more = torch.zeros_like(expected), *torch.zeros(2, *expected.shape, dtype=dtype).to(device)
        reference.insert_(rounded, x, seed)
        kernels.insert_(again, x.to(device), seed)
        kernels.insert_(once_more, x.to(device), seed)
        assert same_bits(again, once_more.cpu()) or dtype == torch.float64
        assert torch.allclose(again.cpu(), rounded, rtol=1e-5, atol=1e-3)
        x[1] = float("inf")
        kernels.insert_(again, x.to(device), seed)
        assert not bool(again.isfinite().all())

        expected += torch.randn(rows, columns, dtype=dtype)
        actual = expected.to(device)
        estimates = reference.query(expected, size, seed)
        assert same_bits(kernels.query(actual, size, seed), estimates)
        assert same_bits(kernels.query(actual, size, seed, 3), reference.query(expected, size, seed, 3))
        assert same_bits(kernels.query_at(actual, at.to(device), seed), estimates[at])
        threshold = float(estimates.abs().median())
        found = reference.reaching(expected, size, threshold, size, seed)
        count = found.positions.numel()
        ours = kernels.reaching(actual, size, threshold, count, seed)
        assert same_bits(ours.positions, found.positions) and same_bits(ours.estimates, found.estimates)
        assert kernels.reaching(actual, size, threshold, count - 1, seed) is None
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    assert kernels.query(actual, 0, 0).numel() == kernels.query_at(actual, nothing, 0).numel() == 0
