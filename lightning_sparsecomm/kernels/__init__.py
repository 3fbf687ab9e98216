"""The hot loops: a torch reference for any device, numba for the CPU and Triton for CUDA, with equal bits."""

from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import torch

from lightning_sparsecomm.kernels.checksums.reference import ChecksumKernels as ChecksumKernels
from lightning_sparsecomm.kernels.factors.reference import FactorKernels as FactorKernels
from lightning_sparsecomm.kernels.positions.reference import Parsed as Parsed
from lightning_sparsecomm.kernels.positions.reference import PositionKernels as PositionKernels
from lightning_sparsecomm.kernels.sketch.reference import Candidates as Candidates
from lightning_sparsecomm.kernels.sketch.reference import SketchKernels as SketchKernels
from lightning_sparsecomm.kernels.updates.moments import Moments as Moments
from lightning_sparsecomm.kernels.updates.moments import direction as direction
from lightning_sparsecomm.kernels.updates.reference import LIMIT as LIMIT
from lightning_sparsecomm.kernels.updates.reference import OutOfRangeError as OutOfRangeError
from lightning_sparsecomm.kernels.updates.reference import Reference as Reference
from lightning_sparsecomm.kernels.updates.reference import Update as Update
from lightning_sparsecomm.kernels.updates.sums import Moves as Moves
from lightning_sparsecomm.kernels.values.reference import LARGEST_THREE_BIT as LARGEST_THREE_BIT
from lightning_sparsecomm.kernels.values.reference import ValueKernels as ValueKernels

_COMPILED_DTYPES = (torch.float32, torch.float64)


def kernels_for(device: torch.device, dtype: torch.dtype) -> Reference:
    """The fastest kernels for vectors on `device`: the reference unless they are float32 or float64."""
    return _kernels(device.type if dtype in _COMPILED_DTYPES else "reference").updates


def position_kernels_for(device: torch.device) -> PositionKernels:
    """The fastest kernels that encode and decode positions on `device`."""
    return _kernels(device.type).positions


def value_kernels_for(device: torch.device) -> ValueKernels:
    """The fastest kernels that encode and decode values in few bits on `device`."""
    return _kernels(device.type).values


def sketch_kernels_for(device: torch.device, dtype: torch.dtype) -> SketchKernels:
    """The fastest kernels for count sketches on `device`: the reference unless they are float32 or float64."""
    return _kernels(device.type if dtype in _COMPILED_DTYPES else "reference").sketches


def factor_kernels_for(device: torch.device, dtype: torch.dtype) -> FactorKernels:
    """The fastest kernels for products of thin matrices on `device`: the reference unless float32 or float64."""
    return _kernels(device.type if dtype in _COMPILED_DTYPES else "reference").factors


def checksum_kernels_for(device: torch.device) -> ChecksumKernels:
    """The fastest kernel for the checksum of bytes on `device`."""
    return _kernels(device.type).checksums


class _Kernels(NamedTuple):
    updates: Reference = Reference()
    positions: PositionKernels = PositionKernels()
    sketches: SketchKernels = SketchKernels()
    values: ValueKernels = ValueKernels()
    factors: FactorKernels = FactorKernels()
    checksums: ChecksumKernels = ChecksumKernels()


@lru_cache
def _kernels(device_type: str) -> _Kernels:
    # These imports take seconds, so they wait until their device is used.
    if device_type == "cpu":
        from lightning_sparsecomm.kernels.factors.cpu import CpuFactorKernels
        from lightning_sparsecomm.kernels.positions.cpu import CpuPositionKernels
        from lightning_sparsecomm.kernels.sketch.cpu import CpuSketchKernels
        from lightning_sparsecomm.kernels.updates.cpu import Cpu
        from lightning_sparsecomm.kernels.values.cpu import CpuValueKernels

        return _Kernels(Cpu(), CpuPositionKernels(), CpuSketchKernels(), CpuValueKernels(), CpuFactorKernels())
    if device_type == "cuda" and find_spec("triton") is not None:
        from lightning_sparsecomm.kernels.checksums.cuda import CudaChecksumKernels
        from lightning_sparsecomm.kernels.positions.cuda import CudaPositionKernels
        from lightning_sparsecomm.kernels.sketch.cuda import CudaSketchKernels
        from lightning_sparsecomm.kernels.updates.cuda import Cuda

        return _Kernels(Cuda(), CudaPositionKernels(), CudaSketchKernels(), checksums=CudaChecksumKernels())
    return _Kernels()
