"""The gradients of parameters: read into a round, looked over, and written back."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sparsecomm.exchange.base import Exchanged
from lightning_sparsecomm.layout import Layout, SparseVector

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


def write_gradients(parameters: NamedParameters, exchanged: Exchanged, layout: Layout) -> None:
    """Puts the shared gradient into each parameter's `.grad`, in place where there is one.

    A parameter for which no rank has a gradient keeps what it has, as under DDP: an optimizer skips it.
    """
    shared = exchanged.shared
    if isinstance(shared, SparseVector):
        counts = layout.counts(shared.indices)
        indices, values = shared.indices.split(counts), shared.values.split(counts)
    else:
        views = layout.views(shared)
    for position, (segment, (_, parameter), present) in enumerate(zip(layout.segments, parameters, exchanged.present)):
        if not present:
            continue
        if parameter.grad is None:
            # Keeps the parameter's memory format, as autograd would.
            parameter.grad = torch.empty_like(parameter)
        gradient = parameter.grad.detach()
        if not isinstance(shared, SparseVector):
            gradient.copy_(views[position])
            continue
        # Positions count in row-major order, which is not how a channels-last gradient lies in memory.
        flat = gradient.view(-1) if gradient.is_contiguous() else gradient.new_empty(segment.size)
        flat.zero_().index_copy_(0, indices[position] - segment.offset, values[position].to(flat.dtype))
        if not gradient.is_contiguous():
            gradient.copy_(flat.view(segment.shape))


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
