"""Gradients are read before an exchange and written after it, dense or sparse."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from lightning_sparsecomm.basis import Layout, SparseVector
from lightning_sparsecomm.exchange import Exchanged
from lightning_sparsecomm.sharing.gradients import (
    NamedParameters,
    add_,
    gradient_of,
    has_sparse_gradient,
    make_nonfinite_,
    note_sparse_gradient,
    wide_dtype,
    write_gradients,
    write_sparse_gradients,
)
from lightning_sparsecomm.sharing.local_mode import LOCAL_MODES, LocalMode

LAYOUT = Layout([("a", (2,)), ("b", (3,))])


def named(*parameters: nn.Parameter) -> NamedParameters:
    return [(str(index), parameter) for index, parameter in enumerate(parameters)]


def sparse(x: Tensor) -> SparseVector:
    return SparseVector(x.nonzero().view(-1), x[x != 0], x.numel())


def pair(*gradients: Sequence[float] | None) -> NamedParameters:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.tensor(gradient)
    return named(*parameters)


def gradients(parameters: NamedParameters) -> list[list[float] | None]:
    return [None if parameter.grad is None else parameter.grad.tolist() for _, parameter in parameters]


# Reading


def test_the_gradient_is_this_ranks_own() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    assert gradient_of("a", parameter) is None
    parameter.grad = torch.ones(2)
    # It still counts where the parameter was frozen after the backward pass.
    parameter.requires_grad_(False)
    found = gradient_of("a", parameter)
    assert found is not None
    assert found.data_ptr() == parameter.grad.data_ptr()


def test_a_sparse_gradient_is_coalesced() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    note_sparse_gradient(table.weight)
    assert has_sparse_gradient(table.weight)
    table(torch.tensor([1, 1, 3])).sum().backward()
    found = gradient_of("table", table.weight)
    assert found is not None
    assert found.is_coalesced()
    assert found.values().tolist() == [[2, 2], [1, 1]]


def test_gradients_that_no_exchange_can_take_are_refused() -> None:
    turned = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    turned.grad = torch.ones(2, dtype=torch.complex64)
    with pytest.raises(TypeError, match="the gradient of 'a' is complex"):
        gradient_of("a", turned)
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"the gradient of 'table' is sparse.*sparse=True"):
        gradient_of("table", table.weight)
    noted = nn.Parameter(torch.zeros(2, 2))
    noted.grad = torch.ones(2, 2)
    note_sparse_gradient(noted)
    with pytest.raises(TypeError, match=r"the gradient of 'b' is dense.*sparse=True"):
        gradient_of("b", noted)


# Held for them


def test_state_is_as_wide_as_the_widest_parameter_and_float32_at_least() -> None:
    narrow, wide = (
        ("a", nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))),
        ("b", nn.Parameter(torch.zeros(1, dtype=torch.float64))),
    )
    assert wide_dtype([]) == wide_dtype([narrow]) == torch.float32
    assert wide_dtype([narrow, wide]) == torch.float64


# Writing


@pytest.mark.parametrize("as_sparse", [True, False])
@pytest.mark.parametrize("mode", LOCAL_MODES)
def test_the_optimizer_sees_what_the_local_mode_says(mode: str, as_sparse: bool) -> None:
    own = torch.tensor([4.0, 8, 12, 16, 20])
    shared, sent = torch.tensor([1.0, 0, 3, 0, 5]), torch.tensor([2.0, 0, 6, 0, 10])
    parameters = pair(own[:2].tolist(), own[2:].tolist())
    held = [parameter.grad for _, parameter in parameters]
    vectors = (sparse(shared), sparse(sent)) if as_sparse else (shared, sent)
    local: LocalMode = LOCAL_MODES[mode]
    write_gradients(parameters, Exchanged(*vectors, [True, True]), LAYOUT, local, world_size=4)
    expected = local.own * own / 4 + local.shared * shared + local.sent * sent / 4
    assert torch.cat([parameter.grad for _, parameter in parameters]).tolist() == expected.tolist()
    # In place: whoever holds the gradient sees it.
    assert all(parameter.grad is each for (_, parameter), each in zip(parameters, held, strict=True))


@pytest.mark.parametrize("as_sparse", [True, False])
def test_only_what_some_rank_has_a_gradient_for_is_written(as_sparse: bool) -> None:
    shared = torch.tensor([1.0, 2, 0, 0, 0])
    exchanged = Exchanged(sparse(shared) if as_sparse else shared, shared, [True, False])
    for before, after in (([9.0] * 3, [9.0] * 3), (None, None)):
        parameters = pair(None, before)
        write_gradients(parameters, exchanged, LAYOUT, LOCAL_MODES["none"], world_size=2)
        assert gradients(parameters) == [[1, 2], after]
    parameters = pair([7.0, 7.0], None)
    write_gradients(parameters, exchanged._replace(present=[False, False]), LAYOUT, LOCAL_MODES["none"], world_size=2)
    assert gradients(parameters) == [[7, 7], None]


def test_a_gradient_keeps_its_memory_format() -> None:
    layout = Layout([("kernel", (2, 3, 2, 2))])
    kernel = nn.Parameter(torch.zeros(2, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    shared = torch.arange(24.0)
    for vector in (shared, sparse(shared)):
        kernel.grad = None
        write_gradients(named(kernel), Exchanged(vector, vector, [True]), layout, LOCAL_MODES["none"], world_size=2)
        assert kernel.grad is not None
        assert kernel.grad.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(kernel.grad, shared.view(2, 3, 2, 2))


def test_sparse_gradients_are_whole_rows() -> None:
    layout = Layout([("table", (4, 3)), ("other", (2, 2))])
    table, other = nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(2, 2))
    shared = SparseVector(torch.tensor([3, 5, 11]), torch.tensor([1.0, 2.0, 3.0]), 16)
    write_sparse_gradients(named(table, other), Exchanged(shared, shared, [True, False]), layout)
    assert other.grad is None
    assert table.grad is not None
    assert table.grad.is_sparse
    assert table.grad.indices().tolist() == [[1, 3]]
    assert table.grad.values().tolist() == [[1, 0, 2], [0, 0, 3]]
    # Nothing was sent for a table that some rank has a gradient for: a sparse gradient without rows.
    nothing = SparseVector(torch.empty(0, dtype=torch.int64), torch.empty(0), 16)
    write_sparse_gradients(named(table, other), Exchanged(nothing, nothing, [True, True]), layout)
    assert table.grad._nnz() == 0
    assert other.grad is not None
    assert other.grad.is_sparse


@pytest.mark.parametrize("as_sparse", [True, False])
def test_a_vector_is_added_to_tensors_of_its_shapes(as_sparse: bool) -> None:
    x = torch.tensor([1.0, 2, 0, 4, 5])
    a, b = torch.ones(2), torch.ones(3, dtype=torch.float64)
    add_([a, b], sparse(x) if as_sparse else x, LAYOUT)
    assert (a.tolist(), b.tolist()) == ([2, 3], [1, 5, 6])
    add_([None, b], sparse(x) if as_sparse else x, LAYOUT)
    assert (a.tolist(), b.tolist()) == ([2, 3], [1, 9, 11])


# A step that all ranks skip


def test_one_element_is_made_infinite_in_place() -> None:
    empty, frozen = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(2), requires_grad=False)
    first, second = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.tensor(1.0))
    make_nonfinite_([])
    make_nonfinite_(named(empty, frozen))
    assert empty.grad is None and frozen.grad is None
    # Where there is no gradient at all, one is made.
    make_nonfinite_(named(empty, frozen, first, second))
    assert first.grad is not None and first.grad.flatten().tolist() == [math.inf, 0, 0, 0, 0, 0]
    assert frozen.grad is None and second.grad is None
    first.grad, second.grad = None, torch.tensor(2.0)
    held = second.grad
    make_nonfinite_(named(empty, frozen, first, second))
    assert first.grad is None
    assert second.grad is held and held == math.inf


def test_a_sparse_gradient_is_made_infinite_as_one() -> None:
    table = nn.Parameter(torch.zeros(4, 2))
    note_sparse_gradient(table)
    make_nonfinite_(named(table))
    assert table.grad is not None
    assert table.grad.is_sparse
    assert table.grad.to_dense().isinf().tolist() == [[True, True]] + [[False, False]] * 3
