"""The checksum in Triton against zlib's: in Triton's interpreter, and on a GPU if present."""

import zlib

import pytest
import torch

from tests.kernels.triton_process import needs_triton, run


@needs_triton
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))])
def test_triton(device, tmp_path):
    run(__name__, f"compare({device!r})", tmp_path, **({"TRITON_INTERPRET": "1"} if device == "cpu" else {}))


def compare(device: str) -> None:
    """`CudaChecksumKernels` on `device` and zlib give the same numbers."""
    from lightning_sparsecomm.kernels.checksums.cuda import CudaChecksumKernels

    kernels = CudaChecksumKernels()
    kernels.least = 4
    # Few, because the interpreter is slow.
    for size in (0, 3, 4, 5, 1023, 1024, 1025, 3000) + ((1 << 20, 10**6 + 7) if device == "cuda" else ()):
        data = torch.randint(256, (size,), dtype=torch.uint8)
        for start in (0, zlib.crc32(b"a head")):
            for part in (data, data[1:]):
                assert kernels.crc32(part.to(device), start) == zlib.crc32(part.numpy().data, start)
