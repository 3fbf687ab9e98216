"""The hot loops. Each has a torch reference for any device; numba on the CPU and Triton on CUDA give the same bits."""

from functools import lru_cache
from importlib.util import find_spec

import torch

from lightning_sparsecomm.kernels.positions import Parsed, PositionKernels
from lightning_sparsecomm.kernels.reference import LIMIT, OutOfRangeError, Reference, Update
from lightning_sparsecomm.kernels.sketch import Candidates, SketchKernels

__all__ = [
    "LIMIT",
    "Candidates",
    "OutOfRangeError",
    "Parsed",
    "PositionKernels",
    "Reference",
    "SketchKernels",
    "Update",
    "kernels_for",
    "position_kernels_for",
    "sketch_kernels_for",
]


def kernels_for(device: torch.device, dtype: torch.dtype) -> Reference:
    """The fastest kernels for vectors on `device`.

    Args:
        device: Where the vectors are.
        dtype: Theirs; numba and Triton have kernels for float32 and float64.
    """
    if dtype not in (torch.float32, torch.float64):
        return _kernels("reference")
    return _kernels(device.type)


def position_kernels_for(device: torch.device) -> PositionKernels:
    """The fastest kernels for positions, and the bytes that they are written in, on `device`."""
    return _position_kernels(device.type)


def sketch_kernels_for(device: torch.device, dtype: torch.dtype) -> SketchKernels:
    """The fastest kernels for count sketches on `device`.

    Args:
        device: Where the table is.
        dtype: Its; numba and Triton have kernels for float32 and float64.
    """
    if dtype not in (torch.float32, torch.float64):
        return _sketch_kernels("reference")
    return _sketch_kernels(device.type)


# What is imported here takes seconds, and is not needed where its device is not used.
@lru_cache
def _kernels(device_type: str) -> Reference:
    if device_type == "cpu":
        from lightning_sparsecomm.kernels.cpu import Cpu

        return Cpu()
    if device_type == "cuda" and find_spec("triton") is not None:
        from lightning_sparsecomm.kernels.cuda import Cuda

        return Cuda()
    return Reference()


@lru_cache
def _position_kernels(device_type: str) -> PositionKernels:
    if device_type == "cpu":
        from lightning_sparsecomm.kernels.positions_cpu import CpuPositionKernels

        return CpuPositionKernels()
    return PositionKernels()


@lru_cache
def _sketch_kernels(device_type: str) -> SketchKernels:
    if device_type == "cpu":
        from lightning_sparsecomm.kernels.sketch_cpu import CpuSketchKernels

        return CpuSketchKernels()
    if device_type == "cuda" and find_spec("triton") is not None:
        from lightning_sparsecomm.kernels.sketch_cuda import CudaSketchKernels

        return CudaSketchKernels()
    return SketchKernels()
