"""The position kernels in Triton against the reference: in Triton's interpreter, and on a GPU if present."""

import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.kernels import PositionKernels
from tests.kernels.bits import same_bits
from tests.kernels.triton_process import needs_triton, run


@needs_triton
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))])
def test_triton(device, tmp_path):
    run(__name__, f"compare({device!r})", tmp_path, **({"TRITON_INTERPRET": "1"} if device == "cpu" else {}))


def positions(scale: float, count: int) -> Tensor:
    """Positions whose gaps vary by scale from part to part."""
    gaps = torch.rand(count).log().neg() * scale * torch.linspace(0.1, 4, count)
    return (gaps.long() + 1).cumsum(0) - 1


def compare(device: str) -> None:
    """`CudaPositionKernels` on `device` and the reference on the CPU give the same bits."""
    from lightning_sparsecomm.kernels.positions.cuda import CudaPositionKernels

    reference, kernels = PositionKernels(), CudaPositionKernels()
    # Few, because the interpreter is slow.
    sizes = (0, 70) if device == "cpu" else (0, 1, 63, 64, 65, 1000, 100_003)
    for scale in (3.0, 1e6) if device == "cpu" else (0.5, 3.0, 1000.0, 1e6):
        for count in sizes:
            indices = positions(scale, count)
            size = int(indices[-1]) + 1 if count else 0
            there = indices.to(device)
            best, kept = reference.choices(indices)
            assert same_bits(kernels.choices(there)[0], best) and same_bits(kernels.choices(there)[1], kept)
            codes = reference.choose_codes(indices)
            assert same_bits(kernels.choose_codes(there), codes)
            section = reference.write_blocks(indices, codes)
            assert same_bits(kernels.write_blocks(there, codes.to(device)), section)
            read = kernels.read_blocks(section.to(device), count, size)
            assert same_bits(read.indices, indices) and read[1:] == reference.read_blocks(section, count, size)[1:]
            # Written with fewer remainder bits than suit them, prefixes go on over several stretches.
            usual = int(scale).bit_length()
            for remainder_bits in (max(0, usual - 3), usual):
                section = reference.write_golomb(indices, remainder_bits)
                same_golomb(kernels, section, count, size, remainder_bits, device)
    for section in (torch.zeros(130), torch.full((130,), 255), torch.randint(256, (130,))):
        for count, remainder_bits in ((10, 0), (700, 3), (30, 31)):
            same_golomb(kernels, section.to(torch.uint8), count, 2**20, remainder_bits, device)


def same_golomb(
    kernels: PositionKernels, section: Tensor, count: int, size: int, remainder_bits: int, device: str
) -> None:
    expected = PositionKernels().read_golomb(section, count, size, remainder_bits)
    actual = kernels.read_golomb(section.to(device), count, size, remainder_bits)
    assert same_bits(actual.indices, expected.indices) and actual[1:] == expected[1:]
