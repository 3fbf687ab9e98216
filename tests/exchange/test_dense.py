"""One all-reduce of whole vectors; here of one rank."""

import math

import pytest
import torch

from lightning_sparsecomm.basis import Layout, Round, Vector, Wire
from lightning_sparsecomm.exchange import DenseAllReduce, NonFiniteGradientError
from lightning_sparsecomm.exchange.dense import WIRE_DTYPES, addend_limit, check_wire_dtype

LAYOUT = Layout([("a", (2,)), ("b", (3,))])
CONTEXT = Round(LAYOUT)


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("dtype", WIRE_DTYPES)
def test_what_is_shared_is_what_was_sent_as_the_wire_rounds_it(wire: Wire, dtype: str, prepared: bool) -> None:
    exchange, values = DenseAllReduce(dtype), torch.randn(5)  # type: ignore[arg-type]
    x = Vector(values.clone(), [True, True])
    if prepared:
        exchange.prepare(x, CONTEXT, wire)
    shared, sent, present = exchange.exchange(x, CONTEXT, wire)
    rounded = values.to(WIRE_DTYPES[dtype] or values.dtype).to(values.dtype)
    assert torch.equal(shared, rounded)
    assert torch.equal(sent, rounded)
    assert torch.equal(x.values, values)
    assert present == [True, True]
    # Five elements and a count for each of two tensors, once.
    assert wire.ledger.handed_bytes() == 7 * (WIRE_DTYPES[dtype] or torch.float32).itemsize


def test_it_starts_early_and_forgets_what_was_aborted(wire: Wire) -> None:
    exchange = DenseAllReduce()
    assert exchange.overlaps
    exchange.prepare(Vector(torch.ones(5)), CONTEXT, wire)
    exchange.abort()
    shared, _, _ = exchange.exchange(Vector(torch.zeros(5)), CONTEXT, wire)
    assert shared.tolist() == [0] * 5


def test_a_subclass_that_overrides_exchange_does_not_start_early(wire: Wire) -> None:
    class Later(DenseAllReduce):
        def exchange(self, x: Vector, context: Round, wire: Wire):  # type: ignore[no-untyped-def]
            return super().exchange(x._replace(values=x.values * 3), context, wire)

    exchange, x = Later(), Vector(torch.ones(5))
    assert not exchange.overlaps
    exchange.prepare(x, CONTEXT, wire)
    assert wire.ledger.rows == {}
    assert exchange.exchange(x, CONTEXT, wire).shared.tolist() == [3] * 5


def test_a_gradient_that_is_not_finite_is_reported(wire: Wire) -> None:
    with pytest.raises(NonFiniteGradientError, match="'b'"):
        DenseAllReduce().exchange(Vector(torch.zeros(5), nonfinite_segment=1), CONTEXT, wire)


def test_float16_clamps_instead_of_overflowing(wire: Wire) -> None:
    values = torch.tensor([1e6, -1e6, 1.0, 0.0, 3e4])
    with pytest.warns(UserWarning, match="2 values beyond ±"):
        shared, sent, _ = DenseAllReduce("float16").exchange(Vector(values), CONTEXT, wire)
    assert wire.ledger.clamped_elements == 2
    assert torch.isfinite(shared).all()
    assert shared[0] == -shared[1] > 6e4
    assert shared[2:].tolist() == [1, 0, 3e4]
    assert torch.equal(shared, sent)


@pytest.mark.parametrize("addends", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_no_sum_of_so_many_addends_overflows(addends: int, dtype: torch.dtype) -> None:
    total, addend = torch.zeros((), dtype=dtype), torch.tensor(addend_limit(dtype, addends)).to(dtype)
    for _ in range(addends):
        total = total + addend
    assert math.isfinite(float(total))


def test_an_unknown_dtype_is_refused() -> None:
    for make in (DenseAllReduce, check_wire_dtype):
        with pytest.raises(ValueError, match=r"wire_dtype must be one of same, .*bfloat16; got 'fp16'. .*'same'"):
            make("fp16")  # type: ignore[arg-type]
