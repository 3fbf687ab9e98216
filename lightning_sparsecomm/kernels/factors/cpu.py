"""The product of two thin matrices in numba, in one pass over it."""

import numpy as np
from torch import Tensor

from lightning_sparsecomm.kernels.factors.reference import FactorKernels
from lightning_sparsecomm.kernels.numba_jit import Floats, compiled


class CpuFactorKernels(FactorKernels):
    """Numba kernels for float32 and float64 on the CPU."""

    def product_(self, out: Tensor, p: Tensor, q: Tensor) -> None:
        _product(out.numpy(), p.contiguous().numpy(), q.contiguous().numpy())


@compiled
def _product(out: Floats, p: Floats, q: Floats) -> None:
    """Four terms at a time while a row's elements pass, since most products have no more."""
    rank = p.shape[0]
    for i in range(np.uint64(out.shape[0])):
        a = p[0, i]
        b = p[1, i] if rank > 1 else a
        c = p[2, i] if rank > 2 else a
        d = p[3, i] if rank > 3 else a
        if rank == 1:
            for j in range(np.uint64(out.shape[1])):
                out[i, j] = a * q[0, j]
        elif rank == 2:
            for j in range(np.uint64(out.shape[1])):
                out[i, j] = a * q[0, j] + b * q[1, j]
        elif rank == 3:
            for j in range(np.uint64(out.shape[1])):
                out[i, j] = a * q[0, j] + b * q[1, j] + c * q[2, j]
        else:
            for j in range(np.uint64(out.shape[1])):
                out[i, j] = a * q[0, j] + b * q[1, j] + c * q[2, j] + d * q[3, j]
        for k in range(np.uint64(4), np.uint64(rank)):
            e = p[k, i]
            for j in range(np.uint64(out.shape[1])):
                out[i, j] += e * q[k, j]
