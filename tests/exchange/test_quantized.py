"""An all-reduce in a few bits; here of one rank."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout, Round, Vector, Wire
from lightning_sparsecomm.codecs import dense_codec
from lightning_sparsecomm.exchange import NonFiniteGradientError, QuantizedAllReduce

LAYOUT = Layout([("weight", (30, 20)), ("bias", (7,))])
CONTEXT = Round(LAYOUT)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_what_is_shared_is_rounded_twice_and_what_is_sent_is_that(wire: Wire, bits: Any) -> None:
    x, codec = torch.randn(LAYOUT.size), dense_codec(bits)
    shared, sent, present = QuantizedAllReduce(bits).exchange(Vector(x, [True, True]), CONTEXT, wire)
    once = codec.decode(codec.encode(x), LAYOUT.size)
    assert torch.equal(shared, codec.decode(codec.encode(once), LAYOUT.size))
    torch.testing.assert_close(sent, shared)
    assert present == [True, True]
    lost = float((x - shared).square().sum() / x.square().sum())
    assert 0 < lost < {8: 1e-4, 4: 0.03, 2: 0.15}[bits]
    # Two messages, the first with room for a bit for each tensor.
    assert wire.ledger.handed_bytes() == 2 * (16 + codec.size_bytes(LAYOUT.size)) + 1
    assert wire.ledger.rows["gradients"].keys() == {"all_to_all", "all_gather"}


def test_a_tensor_without_a_gradient_sends_nothing(wire: Wire) -> None:
    x = torch.randn(LAYOUT.size)
    x[600:] = 0
    shared, sent, present = QuantizedAllReduce().exchange(Vector(x, [True, False]), CONTEXT, wire)
    assert isinstance(shared, Tensor)
    assert isinstance(sent, Tensor)
    assert present == [True, False]
    assert not shared[600:].any()
    assert not sent[600:].any()


def test_a_gradient_that_is_not_finite_is_reported(wire: Wire) -> None:
    for values in (torch.zeros(LAYOUT.size), torch.full((LAYOUT.size,), torch.nan)):
        with pytest.raises(NonFiniteGradientError, match="'bias'"):
            QuantizedAllReduce().exchange(Vector(values, nonfinite_segment=1), CONTEXT, wire)


def test_float64_stays_float64(wire: Wire) -> None:
    x = torch.randn(LAYOUT.size, dtype=torch.float64)
    shared, sent, _ = QuantizedAllReduce().exchange(Vector(x), CONTEXT, wire)
    assert isinstance(shared, Tensor)
    assert isinstance(sent, Tensor)
    assert shared.dtype == sent.dtype == torch.float64


@pytest.mark.parametrize(
    ("options", "text"), [({"bits": 3}, "bits must be 8, 4 or 2"), ({"block": 0}, "block must be")]
)
def test_refuses(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}"):
        QuantizedAllReduce(**options)
