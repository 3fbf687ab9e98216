"""Checks gradients for NaN and infinity, computes their norm, and joins sparse ones into one vector."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparsecomm.basis.layout import Layout


def elements_of(gradient: Tensor) -> Tensor:
    """All elements of a gradient that may be non-zero."""
    return gradient if gradient.layout == torch.strided else gradient.coalesce().values()


def first_nonfinite(gradients: Sequence[Tensor | None]) -> int | None:
    """The index of the first gradient that holds an infinity or a NaN; None where all are finite.

    It costs one read: the sum of a gradient is not finite if an element is not. A sum can also overflow by itself, so a
    suspect gradient is read again.
    """
    sums = [elements_of(gradient).sum(dtype=torch.float32) for gradient in gradients if gradient is not None]
    if not sums or math.isfinite(torch.stack(sums).sum().item()):
        return None
    for index, gradient in enumerate(gradients):
        if gradient is not None and not bool(elements_of(gradient).isfinite().all()):
            return index
    return None


def norm_of(gradients: Sequence[Tensor]) -> float:
    """Euclidean norm of all gradients together; finite only where all elements are.

    Squares overflow float32 only for norms beyond 1e19; then the norm is taken again in float64.
    """
    if not gradients:
        return 0.0
    gradients = [elements_of(gradient) for gradient in gradients]
    norm = float(torch.linalg.vector_norm(torch.stack([n.float() for n in torch._foreach_norm(gradients)])))
    if math.isinf(norm):
        norm = math.hypot(*(float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) for gradient in gradients))
    return norm


def joined_sparse(
    gradients: Sequence[Tensor | None], layout: Layout, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Sparse, coalesced gradients as one vector over `layout`: values `[k]` in `dtype`, positions `[k]` int64."""
    indices = [torch.empty(0, dtype=torch.int64, device=device)]
    values = [torch.empty(0, dtype=dtype, device=device)]
    for gradient, segment in zip(gradients, layout.segments):
        if gradient is None or not gradient._nnz():
            continue
        held = gradient.values()
        length = held[0].numel()
        # Where each row (or whatever its indices point at) begins.
        starts = torch.zeros_like(gradient.indices()[0])
        for index, extent in zip(gradient.indices(), segment.shape):
            starts.mul_(extent).add_(index)
        starts.mul_(length).add_(segment.offset)
        indices.append((starts[:, None] + torch.arange(length, device=device)).view(-1))
        values.append(held.reshape(-1).to(dtype))
    return torch.cat(values), torch.cat(indices)
