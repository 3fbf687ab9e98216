"""Which kernels are chosen for a device and dtype."""

import pytest
import torch

from lightning_sparsecomm.kernels import (
    FactorKernels,
    PositionKernels,
    Reference,
    SketchKernels,
    factor_kernels_for,
    kernels_for,
    position_kernels_for,
    sketch_kernels_for,
)
from lightning_sparsecomm.kernels.factors.cpu import CpuFactorKernels
from lightning_sparsecomm.kernels.positions.cpu import CpuPositionKernels
from lightning_sparsecomm.kernels.sketch.cpu import CpuSketchKernels
from lightning_sparsecomm.kernels.updates.cpu import Cpu


@pytest.mark.parametrize(
    ("dtype", "kernels"), [(torch.float32, Cpu), (torch.float64, Cpu), (torch.bfloat16, Reference)], ids=str
)
def test_kernels_for(dtype, kernels):
    assert type(kernels_for(torch.device("cpu"), dtype)) is kernels


def test_position_kernels_for():
    assert type(position_kernels_for(torch.device("cpu"))) is CpuPositionKernels
    assert type(position_kernels_for(torch.device("meta"))) is PositionKernels


@pytest.mark.parametrize(
    ("device", "dtype", "kernels"),
    [
        ("cpu", torch.float32, CpuSketchKernels),
        ("cpu", torch.float64, CpuSketchKernels),
        ("cpu", torch.float16, SketchKernels),
        ("meta", torch.float32, SketchKernels),
    ],
)
def test_sketch_kernels_for(device, dtype, kernels):
    assert type(sketch_kernels_for(torch.device(device), dtype)) is kernels


@pytest.mark.parametrize(
    ("dtype", "kernels"), [(torch.float64, CpuFactorKernels), (torch.bfloat16, FactorKernels)], ids=str
)
def test_factor_kernels_for(dtype, kernels):
    assert type(factor_kernels_for(torch.device("cpu"), dtype)) is kernels
