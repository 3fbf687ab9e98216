"""The gradients of parameters: read before an exchange, and written after it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sparsecomm.basis import Layout, SparseVector
from lightning_sparsecomm.exchange import Exchanged
from lightning_sparsecomm.kernels import kernels_for
from lightning_sparsecomm.sharing.local_mode import LocalMode

NamedParameters = Sequence[tuple[str, Parameter]]

_SPARSE, _FEW_ROWS = "_sparsecomm_sparse_gradient", "_sparsecomm_few_rows"


def note_sparse_gradient(parameter: Tensor) -> None:
    """Notes that this parameter gets sparse gradients, so that all ranks know it before the first backward pass."""
    setattr(parameter, _SPARSE, True)


def has_sparse_gradient(parameter: Parameter) -> bool:
    """Whether `note_sparse_gradient` was called for it."""
    return getattr(parameter, _SPARSE, False)


def note_few_rows(parameter: Tensor, rows: int) -> None:
    """Notes how many rows of this table's gradient are not zero if these are few, else 0; equal on all ranks."""
    setattr(parameter, _FEW_ROWS, rows)


def few_rows_of(parameter: Parameter) -> int:
    """What `note_few_rows` has noted last; 0 without it."""
    return getattr(parameter, _FEW_ROWS, 0)


def has_few_rows(parameter: Parameter) -> bool:
    """Whether `note_few_rows` has found few rows."""
    return few_rows_of(parameter) > 0


def wide_dtype(parameters: NamedParameters) -> torch.dtype:
    """The dtype of state that is held for parameters: float32, or wider where one of them is."""
    dtype = torch.float32
    for _, parameter in parameters:
        dtype = torch.promote_types(dtype, parameter.dtype)
    return dtype


def gradient_of(name: str, parameter: Parameter) -> Tensor | None:
    """This rank's gradient, coalesced if sparse; None where the parameter has none.

    As for torch's optimizers, only `.grad` counts: a parameter that is frozen after the backward pass still has one.

    Raises:
        TypeError: The gradient is complex, or unexpectedly sparse or dense.
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
            f"the gradient of {name!r} is {'sparse' if sparse else 'dense'}, which its layer did not announce: ranks"
            " must agree on that before the first step. For sparse gradients use nn.Embedding or nn.EmbeddingBag with"
            " sparse=True, and only for look-ups; otherwise build the layer with dense gradients."
        )
    return gradient.detach().coalesce() if sparse else gradient.detach()


def write_sparse_gradients(parameters: NamedParameters, exchanged: Exchanged, layout: Layout) -> None:
    """Writes a shared sparse vector to `.grad`, as sparse tensors of whole rows like an embedding's own gradient.

    Where no rank has a gradient, `.grad` stays as it is.
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
    """Writes what the optimizer is to see to each parameter's `.grad`, in place where there is one.

    Where no rank has a gradient, `.grad` stays as it is, as under DDP: optimizers skip the parameter.
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
    """What to add to the rank's own gradient. In a world of one, `partial` adds exact zeros."""
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
    """Adds a vector over the layout to tensors of its shapes, in place; those that are None are left out."""
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
        # Positions count in row-major order; a channels-last gradient lies differently in memory.
        contiguous = gradient.is_contiguous()
        flat = gradient.view(-1) if contiguous else gradient.new_zeros(segment.size)
        flat.index_add_(0, indices - segment.offset, part.to(flat.dtype))
        if not contiguous:
            gradient.add_(flat.view(segment.shape))


def make_nonfinite_(parameters: NamedParameters) -> None:
    """Writes an infinity to one gradient, so that whoever looks at gradients sees that all ranks skip this step."""
    held = [parameter for _, parameter in parameters if parameter.numel()]
    # A parameter without a gradient may be frozen, and must stay without one.
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
