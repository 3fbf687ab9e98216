"""Vectors that are hard to round, and their comparison bit for bit."""

import pytest
import torch
from torch import Tensor

DTYPES = [torch.float32, torch.float64]

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def numbers(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Normally distributed, scaled by powers of two; one in 16 is subnormal, and one in 16 a zero of either sign."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, dtype=dtype, generator=generator)
    x *= torch.exp2(torch.randint(-6, 7, (size,), generator=generator).to(dtype))
    special = torch.randint(16, (size,), generator=generator)
    x[special == 0] *= torch.finfo(dtype).tiny / 64
    x[special == 1] *= 0
    return x


def same_bits(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """Whether both are None, or have the same dtype, shape and bytes; −0 differs from +0."""
    if ours is None or theirs is None:
        return ours is theirs
    return (
        ours.dtype == theirs.dtype
        and ours.shape == theirs.shape
        and ours.cpu().numpy().tobytes() == theirs.cpu().numpy().tobytes()
    )
