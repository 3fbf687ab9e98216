"""The gradients of parameters: read into a round, looked over, and written back."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sparsecomm.exchange.base import Exchanged
from lightning_sparsecomm.kernels import kernels_for
from lightning_sparsecomm.layout import Layout, SparseVector
from lightning_sparsecomm.local_mode import LocalMode

NamedParameters = Sequence[tuple[str, Parameter]]


def gradient_of(name: str, parameter: Parameter) -> Tensor | None:
    """This rank's gradient, or None where the parameter got none.

    As for torch's optimizers, only `.grad` counts: a parameter that is frozen after the backward pass still has one.

    Raises:
        TypeError: The gradient is sparse or complex, which no exchange of dense vectors can take.
    """
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.layout != torch.strided or gradient.is_complex():
        kind = "complex" if gradient.is_complex() else "sparse"
        raise TypeError(
            f"the gradient of {name!r} is {kind}, which this method cannot take. Build the layer with dense real"
            " gradients (nn.Embedding(sparse=False)), or use strategy='ddp'."
        )
    return gradient.detach()


def write_gradients(
    parameters: NamedParameters, exchanged: Exchanged, layout: Layout, local: LocalMode, world_size: int
) -> None:
    """Puts what the optimizer is to see into each parameter's `.grad`, in place where there is one.

    A parameter for which no rank has a gradient keeps what it has, as under DDP: an optimizer skips it.
    """
    gradients: list[Tensor | None] = []
    for (_, parameter), present in zip(parameters, exchanged.present):
        if present and parameter.grad is None:
            # Keeps the parameter's memory format, as autograd would.
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad.detach() if present and parameter.grad is not None else None)
    here = [gradient for gradient in gradients if gradient is not None]
    if not here:
        return
    if local.own:
        torch._foreach_mul_(here, local.own / world_size)
        add_(gradients, _others(exchanged, local, world_size), layout)
    elif isinstance(exchanged.shared, SparseVector):
        torch._foreach_zero_(here)
        add_(gradients, exchanged.shared, layout)
    else:
        for gradient, view in zip(gradients, layout.views(exchanged.shared)):
            if gradient is not None:
                gradient.copy_(view)


def _others(exchanged: Exchanged, local: LocalMode, world_size: int) -> SparseVector | Tensor:
    """What is added to the rank's own gradient. In a world of one, `partial` adds exact zeros."""
    shared, sent = exchanged.shared, exchanged.sent
    of_sent = local.sent / world_size
    if not local.sent:
        if isinstance(shared, SparseVector):
            return shared._replace(values=shared.values * local.shared)
        return shared * local.shared
    if isinstance(shared, SparseVector) and isinstance(sent, SparseVector):
        values = torch.cat([shared.values * local.shared, sent.values.to(shared.values.dtype) * of_sent])
        kernels = kernels_for(values.device, values.dtype)
        return SparseVector(*kernels.add_up(torch.cat([shared.indices, sent.indices]), values), shared.size)
    whole, own = (each.dense() if isinstance(each, SparseVector) else each for each in (shared, sent))
    return whole * local.shared + own.to(whole.dtype) * of_sent


def add_(gradients: Sequence[Tensor | None], vector: SparseVector | Tensor, layout: Layout) -> None:
    """Adds a vector over the layout to tensors of its shapes, in place; None where there is nothing to add to."""
    if not isinstance(vector, SparseVector):
        for gradient, view in zip(gradients, layout.views(vector)):
            if gradient is not None:
                gradient.add_(view)
        return
    counts = layout.counts(vector.indices)
    parts = zip(gradients, layout.segments, vector.indices.split(counts), vector.values.split(counts))
    for gradient, segment, indices, part in parts:
        if gradient is None or not indices.numel():
            continue
        # Positions count in row-major order, which is not how a channels-last gradient lies in memory.
        contiguous = gradient.is_contiguous()
        flat = gradient.view(-1) if contiguous else gradient.new_zeros(segment.size)
        flat.index_add_(0, indices - segment.offset, part.to(flat.dtype))
        if not contiguous:
            gradient.add_(flat.view(segment.shape))


def first_nonfinite(gradients: Sequence[Tensor | None]) -> int | None:
    """The index of the first gradient that holds an infinity or a NaN; None where all are finite.

    A sum finds them at the cost of one read; it can also overflow by itself, so what it finds is looked at again.
    """
    sums = [gradient.sum(dtype=torch.float32) for gradient in gradients if gradient is not None]
    if not sums or math.isfinite(torch.stack(sums).sum().item()):
        return None
    for index, gradient in enumerate(gradients):
        if gradient is not None and not bool(gradient.isfinite().all()):
            return index
    return None


def norm_of(gradients: Sequence[Tensor]) -> float:
    """Euclidean norm of all gradients together; finite only where all their elements are.

    Its squares overflow float32 only beyond 1e19, where it is taken again in float64.
    """
    if not gradients:
        return 0.0
    norm = float(torch.linalg.vector_norm(torch.stack([n.float() for n in torch._foreach_norm(list(gradients))])))
    if math.isinf(norm):
        norm = math.hypot(*(float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) for gradient in gradients))
    return norm
