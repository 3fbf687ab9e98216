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


_SPARSE = "_sparsecomm_sparse_gradient"


def note_sparse_gradient(parameter: Tensor) -> None:
    """Notes that backward passes give this parameter sparse gradients, so that all ranks know it before the first."""
    setattr(parameter, _SPARSE, True)


def has_sparse_gradient(parameter: Parameter) -> bool:
    """Whether that was noted."""
    return getattr(parameter, _SPARSE, False)


def gradient_of(name: str, parameter: Parameter) -> Tensor | None:
    """This rank's gradient, or None where the parameter got none; coalesced where a sparse one is expected.

    As for torch's optimizers, only `.grad` counts: a parameter that is frozen after the backward pass still has one.

    Raises:
        TypeError: The gradient is complex, which no exchange can take, or sparse (or dense), as was not expected.
    """
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.is_complex():
        raise TypeError(
            f"the gradient of {name!r} is complex, which this method cannot take. Build the layer with real"
            " parameters, or use strategy='ddp'."
        )
    sparse = gradient.layout != torch.strided
    if sparse != has_sparse_gradient(parameter):
        raise TypeError(
            f"the gradient of {name!r} is {'sparse' if sparse else 'dense'}, which was not to be expected of its layer:"
            " ranks must agree on that before the first step. Use nn.Embedding or nn.EmbeddingBag with sparse=True for"
            " sparse gradients, and for nothing else than looking up, or build the layer with dense gradients."
        )
    return gradient.detach().coalesce() if sparse else gradient.detach()


def elements_of(gradient: Tensor) -> Tensor:
    """All elements of a gradient that may not be zero."""
    return gradient if gradient.layout == torch.strided else gradient.coalesce().values()


def sparse_vector(
    gradients: Sequence[Tensor | None], layout: Layout, dtype: torch.dtype, device: torch.device
) -> SparseVector:
    """The vector over `layout` of gradients that are sparse and coalesced, or None."""
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
    return SparseVector(torch.cat(indices), torch.cat(values), layout.size)


def write_sparse_gradients(parameters: NamedParameters, exchanged: Exchanged, layout: Layout) -> None:
    """Puts a shared sparse vector into `.grad` as sparse tensors of whole rows, as an embedding's gradient has them.

    A parameter for which no rank has a gradient keeps what it has.
    """
    shared = exchanged.shared
    assert isinstance(shared, SparseVector)
    counts = layout.counts(shared.indices)
    parts = zip(layout.segments, shared.indices.split(counts), shared.values.split(counts))
    for (_, parameter), present, (segment, indices, values) in zip(parameters, exchanged.present, parts):
        if not present:
            continue
        length = segment.size // segment.shape[0]
        positions = indices - segment.offset
        rows, slots = torch.unique_consecutive(positions // length, return_inverse=True)
        content = parameter.new_zeros(rows.numel() * length)
        content[slots * length + positions % length] = values.to(content.dtype)
        parameter.grad = torch.sparse_coo_tensor(
            rows[None], content.view(-1, *segment.shape[1:]), segment.shape, is_coalesced=True, check_invariants=False
        )


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


def make_nonfinite_(parameters: NamedParameters) -> None:
    """Puts an infinity into a gradient, which is made where there is none, so that whoever looks knows of a step that
    is skipped for another rank's gradient."""
    held = [parameter for _, parameter in parameters if parameter.numel()]
    # One without a gradient may be frozen, and is to stay without one.
    parameter = next((p for p in held if p.grad is not None), next((p for p in held if p.requires_grad), None))
    if parameter is None:
        return
    if has_sparse_gradient(parameter):
        row = parameter.new_full((1, *parameter.shape[1:]), math.inf)
        first = torch.zeros(1, 1, dtype=torch.int64, device=parameter.device)
        parameter.grad = torch.sparse_coo_tensor(first, row, parameter.shape, is_coalesced=True, check_invariants=False)
        return
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    parameter.grad[(0,) * parameter.dim()] = math.inf


def first_nonfinite(gradients: Sequence[Tensor | None]) -> int | None:
    """The index of the first gradient that holds an infinity or a NaN; None where all are finite.

    A sum finds them at the cost of one read; it can also overflow by itself, so what it finds is looked at again.
    """
    sums = [elements_of(gradient).sum(dtype=torch.float32) for gradient in gradients if gradient is not None]
    if not sums or math.isfinite(torch.stack(sums).sum().item()):
        return None
    for index, gradient in enumerate(gradients):
        if gradient is not None and not bool(elements_of(gradient).isfinite().all()):
            return index
    return None


def norm_of(gradients: Sequence[Tensor]) -> float:
    """Euclidean norm of all gradients together; finite only where all their elements are.

    Its squares overflow float32 only beyond 1e19, where it is taken again in float64.
    """
    if not gradients:
        return 0.0
    gradients = [elements_of(gradient) for gradient in gradients]
    norm = float(torch.linalg.vector_norm(torch.stack([n.float() for n in torch._foreach_norm(gradients)])))
    if math.isinf(norm):
        norm = math.hypot(*(float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) for gradient in gradients))
    return norm
