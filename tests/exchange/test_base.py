"""What an exchange of one's own gets from its base class."""

import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout, Round, SparseVector, Vector, Wire
from lightning_sparsecomm.exchange import Exchange, Exchanged, NonFiniteGradientError, PlainExchange, SparseExchange
from lightning_sparsecomm.exchange.base import dense_values

LAYOUT = Layout([("a", (2,)), ("b", (3,))])
CONTEXT = Round(LAYOUT)


class Doubling(PlainExchange):
    """Only reduces, as its base asks for."""

    def __init__(self, sparse: bool) -> None:
        self.sparse = sparse
        self.reduced = 0

    def reduce(self, x: Vector, context: Round, wire: Wire) -> tuple[SparseVector | Tensor, SparseVector | Tensor]:
        self.reduced += 1
        shared, sent = x.values * 2, x.values.clone()
        if not self.sparse:
            return shared, sent
        everything = torch.arange(context.layout.size)
        return tuple(SparseVector(everything, each, context.layout.size) for each in (shared, sent))  # type: ignore[return-value]


@pytest.mark.parametrize("sparse", [True, False])
def test_a_plain_exchange_sends_nothing_for_a_segment_without_a_gradient(wire: Wire, sparse: bool) -> None:
    # The values of the segment that is not present are none of anybody's business.
    x = Vector(torch.ones(5), [True, False])
    shared, sent, present = Doubling(sparse).exchange(x, CONTEXT, wire)
    assert present == [True, False]
    for vector, expected in ((shared, [2, 2, 0, 0, 0]), (sent, [1, 1, 0, 0, 0])):
        assert isinstance(vector, SparseVector) == sparse
        assert (vector.dense() if isinstance(vector, SparseVector) else vector).tolist() == expected


def test_a_plain_exchange_is_called_for_finite_gradients_only(wire: Wire) -> None:
    exchange = Doubling(sparse=False)
    with pytest.raises(NonFiniteGradientError, match="'b'"):
        exchange.exchange(Vector(torch.zeros(5), nonfinite_segment=1), CONTEXT, wire)
    assert exchange.reduced == 0


class Whole(Exchange):
    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        values = dense_values(x, self)
        return Exchanged(values, values, [True] * 2)


class Early(Whole):
    def prepare(self, x: Vector, context: Round, wire: Wire) -> None:
        pass


def test_an_exchange_overlaps_where_it_prepares_something() -> None:
    assert not Whole().overlaps
    assert Early().overlaps
    assert not Doubling(sparse=False).overlaps


def test_defaults_hold_nothing_and_object_to_nothing(wire: Wire) -> None:
    exchange = Whole()
    exchange.prepare(Vector(torch.ones(5)), CONTEXT, wire)
    exchange.commit()
    exchange.abort()
    exchange.load_state_dict({})
    assert exchange.state_dict() == {}
    assert exchange.objection(LAYOUT) is None
    assert not isinstance(exchange, SparseExchange)


def test_sparse_vectors_are_refused_by_what_takes_whole_ones(wire: Wire) -> None:
    x = Vector(torch.ones(1), indices=torch.tensor([3]))
    with pytest.raises(TypeError, match=r"Whole cannot take sparse gradients. Use BlockReduce .*sparse=False"):
        Whole().exchange(x, CONTEXT, wire)
