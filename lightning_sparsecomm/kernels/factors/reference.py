"""The definition of the product of two thin matrices, in torch operations that run on any device."""

import torch
from torch import Tensor

# Elements of a product that are computed at once. On CPUs, they stay in the processor's cache.
_BLOCK, _BLOCK_ELSEWHERE = 2**16, 2**24


class FactorKernels:
    """The kernels in torch. Subclasses are faster, and give the same bits."""

    def product_(self, out: Tensor, p: Tensor, q: Tensor) -> None:
        """Writes Pᵀ Q into `out`: p[0] q[0], plus p[1] q[1], and so on, each operation rounded by itself.

        A library sums in an order that depends on the processor and its threads; this does not.

        Args:
            out: `[rows, columns]`, contiguous.
            p: `[rank, rows]`, of the same dtype; a rank of 1 or more.
            q: `[rank, columns]`, of the same dtype.
        """
        block = _BLOCK if out.device.type == "cpu" else _BLOCK_ELSEWHERE
        step = max(1, block // max(1, out.shape[1]))
        for start in range(0, out.shape[0], step):
            part, own = out[start : start + step], p[:, start : start + step, None]
            torch.mul(own[0], q[0], out=part)
            for left, right in zip(own[1:], q[1:]):
                part.add_(left * right)
