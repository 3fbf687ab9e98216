"""One payload per rank, or what was selected in an all-reduce where that is shorter; here of one rank."""

import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout, Round, SparseVector, Vector, Wire
from lightning_sparsecomm.basis.mirror import MirrorWire
from lightning_sparsecomm.codecs import Compressor, Float16, Golomb, PayloadError, SparseCodec, TopK
from lightning_sparsecomm.exchange import Gather, NonFiniteGradientError
from tests.one_by_one import OneByOne

LAYOUT = Layout([("a", (4,)), ("b", (6,))])
CONTEXT = Round(LAYOUT)


@pytest.mark.parametrize("codec", [SparseCodec(TopK(0.3)), SparseCodec(TopK(0.3), Float16(), Golomb())])
def test_what_is_shared_is_the_decoded_payload(wire: Wire, codec: SparseCodec) -> None:
    values = torch.randn(10)
    shared, sent, present = Gather(codec).exchange(Vector(values, [True, True]), CONTEXT, wire)
    assert isinstance(sent, SparseVector)
    assert sent.indices.tolist() == codec.selector.select(values, CONTEXT).tolist()
    assert torch.equal(
        sent.values,
        codec.values.decode(codec.values.encode(values[sent.indices], sent.indices, LAYOUT), 3, codec.values.parameter),
    )
    assert torch.equal((shared.dense() if isinstance(shared, SparseVector) else shared), sent.dense())
    assert present == [True, True]


def test_lengths_are_gathered_only_where_there_is_no_bound(wire: Wire) -> None:
    x = Vector(torch.randn(10))
    for codec, calls in ((SparseCodec(TopK(0.3)), 1), (SparseCodec(TopK(0.3), indices=Golomb()), 1 + 2)):
        Gather(codec).exchange(x, CONTEXT, wire)
        assert wire.ledger.rows["gradients"]["all_gather"].calls == calls


def test_a_segment_without_a_gradient_is_not_sent(wire: Wire) -> None:
    x = Vector(torch.cat([torch.zeros(4), torch.ones(6)]), [False, True])
    _, sent, present = Gather(SparseCodec(TopK(1.0))).exchange(x, CONTEXT, wire)
    assert present == [False, True]
    assert (sent.dense() if isinstance(sent, SparseVector) else sent).tolist() == [0] * 4 + [1] * 6


def test_a_gradient_that_is_not_finite_is_reported(wire: Wire) -> None:
    with pytest.raises(NonFiniteGradientError, match="'b'"):
        Gather(SparseCodec(TopK(0.3))).exchange(Vector(torch.zeros(10), nonfinite_segment=1), CONTEXT, wire)


class Broken(Compressor):
    """Writes what it cannot read."""

    def encode(self, x: Vector, context: Round) -> Tensor:
        return torch.zeros(3, dtype=torch.uint8)

    def decode(self, payload: Tensor, size: int) -> Tensor:
        raise PayloadError("sparse body: nonsense.")

    def bound_bytes(self, context: Round) -> int:
        return 3


def test_whose_payload_is_corrupt_is_said(wire: Wire) -> None:
    with pytest.raises(PayloadError, match="rank 0's payload: sparse body: nonsense"):
        Gather(Broken()).exchange(Vector(torch.ones(10)), CONTEXT, wire)


class Noted(Compressor):
    """A codec whose decoded vectors are noted."""

    def __init__(self) -> None:
        self.codec, self.made = SparseCodec(TopK(0.2)), OneByOne()

    def encode(self, x: Vector, context: Round) -> Tensor:
        return self.codec.encode(x, context)

    def decode(self, payload: Tensor, size: int) -> SparseVector:
        return self.made.note(self.codec.decode(payload, size))

    def bound_bytes(self, context: Round) -> int | None:
        return self.codec.bound_bytes(context)


@pytest.mark.parametrize(("rank", "ranks", "held"), [(0, 2, [0, 0]), (1, 2, [0, 0]), (1, 3, [0, 0, 1])])
def test_only_what_this_rank_has_sent_is_held_while_the_next_is_decoded(rank: int, ranks: int, held: list[int]) -> None:
    """Of two ranks, each decodes its own last."""
    wire, compressor = MirrorWire(ranks), Noted()
    wire.rank = rank
    Gather(compressor).exchange(Vector(torch.randn(1000)), Round(Layout([("a", (1000,))])), wire)
    assert compressor.made.held == held
