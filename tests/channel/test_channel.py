"""One round through memories and an exchange, in one process; and what a channel saves."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout, Round, Vector, Wire
from lightning_sparsecomm.channel import (
    Channel,
    ClipLocalNorm,
    Contribution,
    ErrorFeedback,
    Memory,
    Momentum,
    MomentumCorrection,
    MomentumRule,
    StepSettings,
)
from lightning_sparsecomm.channel.saved import Saved
from lightning_sparsecomm.codecs import AdaptiveBins, SparseCodec, TopK
from lightning_sparsecomm.exchange import DenseAllReduce, Exchange, Exchanged, Gather, NonFiniteGradientError

CPU = torch.device("cpu")
LAYOUT = Layout([("a", (2, 2)), ("b", (3,))])
OTHER = Layout([("c", (5,))])
CONTEXT = Round(LAYOUT)


def gradients(layout: Layout = LAYOUT) -> list[Tensor]:
    return layout.views(torch.randn(layout.size))


def bound(channel: Channel, layout: Layout = LAYOUT) -> Channel:
    fresh = channel.fresh()
    fresh.bind(layout, torch.float32, CPU)
    return fresh


def dense(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else x.dense()


class Untouched(Memory):
    """A memory of someone else's, which passes gradients on."""

    def prepare(self, contribution: Contribution, context: Round) -> Contribution:
        return contribution


# Construction


@pytest.mark.parametrize(
    "memories",
    [
        (ErrorFeedback(), MomentumCorrection()),
        (MomentumCorrection(), ClipLocalNorm(0.001), ErrorFeedback()),
        (ErrorFeedback(), Untouched(), ClipLocalNorm()),
    ],
)
def test_memories_in_another_order_are_refused(memories: Sequence[Memory]) -> None:
    order = "memories must be in the order ClipLocalNorm, MomentumCorrection or LocalAdam, ErrorFeedback"
    with pytest.raises(
        ValueError, match=rf"{order}.*got \[.*ErrorFeedback\(decay=1.0, follow_rate=True\).*\]\. Change their order"
    ):
        Channel(DenseAllReduce(), memories)


def test_memories_in_order_are_taken_with_others_between_them() -> None:
    memories = (Untouched(), ClipLocalNorm(), Untouched(), MomentumCorrection(), ErrorFeedback())
    assert Channel(DenseAllReduce(), memories).memories == memories


def test_fresh_channels_share_nothing() -> None:
    prototype = Channel(DenseAllReduce(), [ErrorFeedback()])
    first, second = bound(prototype), bound(prototype)
    for channel in (first, second):
        assert channel.exchange is not prototype.exchange
    assert first.memories[0].held["residual"].flat is not None
    first.memories[0].held["residual"].flat.fill_(1)
    assert second.residual_norm() == prototype.residual_norm() == 0
    assert prototype.state_dict() == {}


# A round


def test_what_is_sent_and_what_is_held_is_what_was_taken_in(wire: Wire) -> None:
    channel = bound(Channel(Gather(SparseCodec(TopK(0.3))), [ErrorFeedback()]))
    total, sent = torch.zeros(LAYOUT.size), torch.zeros(LAYOUT.size)
    for step in range(5):
        given = gradients()
        exchanged = channel.reduce(given, Round(LAYOUT, step), wire)
        total += torch.cat([gradient.flatten() for gradient in given])
        sent += dense(exchanged.sent)
        assert torch.equal(dense(exchanged.shared), dense(exchanged.sent))
    residual = channel.state_dict()["ErrorFeedback"]
    held = torch.cat([residual[segment.name].flatten() for segment in LAYOUT.segments])
    torch.testing.assert_close(sent + held, total, rtol=0, atol=1e-5)
    assert channel.residual_norm() == pytest.approx(float(held.norm()), rel=1e-6)
    assert channel.residual_norm() > 0


def test_memories_may_change_what_is_shared(wire: Wire) -> None:
    channel = bound(Channel(DenseAllReduce(), [Momentum()]))
    settings = StepSettings([MomentumRule(0.5)] * 2)
    ones = LAYOUT.views(torch.ones(LAYOUT.size))
    for expected in (1.0, 1.5, 1.75):
        exchanged = channel.reduce(ones, CONTEXT, wire, settings)
        assert dense(exchanged.shared).tolist() == [expected] * 7
        assert dense(exchanged.sent).tolist() == [1.0] * 7


class Failing(DenseAllReduce):
    """Fails once the vector has been exchanged."""

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        super().exchange(x, context, wire)
        raise ConnectionError("cable cut")


def test_a_round_that_fails_leaves_memories_as_before(wire: Wire) -> None:
    memories = [MomentumCorrection(), ErrorFeedback()]
    channel = bound(Channel(Gather(SparseCodec(TopK(0.3))), memories))
    settings = StepSettings([MomentumRule(0.9)] * 2)
    channel.reduce(gradients(), CONTEXT, wire, settings)
    before = _copied(channel.state_dict())
    exchange, channel.exchange = channel.exchange, Failing()
    with pytest.raises(ConnectionError, match="cable cut"):
        channel.reduce(gradients(), CONTEXT, wire, settings)
    _assert_close(channel.state_dict(), before)
    # The next round can begin.
    channel.exchange = exchange
    channel.reduce(gradients(), CONTEXT, wire, settings)
    assert not torch.equal(channel.state_dict()["ErrorFeedback"]["a"], before["ErrorFeedback"]["a"])


def test_abort_may_come_without_prepare_and_more_than_once(wire: Wire) -> None:
    channel = bound(Channel(DenseAllReduce(), [ErrorFeedback()]))
    channel.abort()
    channel.prepare(gradients(), CONTEXT, wire)
    channel.run()
    channel.abort()
    channel.abort()
    assert channel.residual_norm() == pytest.approx(0, abs=1e-6)
    channel.reduce(gradients(), CONTEXT, wire)


class Noting(Exchange):
    """Shares nothing, and keeps in commit only how many rounds there were."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def prepare(self, x: Vector, context: Round, wire: Wire) -> None:
        self.calls.append("prepare")

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        self.calls.append("exchange")
        nothing = torch.zeros_like(x.values)
        return Exchanged(nothing, nothing, list(x.present))

    def commit(self) -> None:
        self.calls.append("commit")

    def abort(self) -> None:
        self.calls.append("abort")


def test_the_exchange_is_told_how_a_round_ended(wire: Wire) -> None:
    exchange = Noting()
    channel = Channel(exchange)
    channel.bind(LAYOUT, torch.float32, CPU)
    channel.reduce(gradients(), CONTEXT, wire)
    channel.prepare(gradients(), CONTEXT, wire)
    channel.abort()
    assert exchange.calls == ["prepare", "exchange", "commit", "prepare", "abort"]


@pytest.mark.parametrize("memories", [(), (ErrorFeedback(),), (MomentumCorrection(), ErrorFeedback()), (Untouched(),)])
@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_named_and_held_nowhere(
    wire: Wire, memories: Sequence[Memory], norm: float
) -> None:
    channel = bound(Channel(Gather(SparseCodec(TopK(0.3))), memories))
    settings = StepSettings([MomentumRule(0.9)] * 2, gradient_norm=norm)
    given = gradients()
    given[1][0] = math.inf
    with pytest.raises(NonFiniteGradientError, match="'b' in step 7"):
        channel.reduce(given, Round(LAYOUT, 7), wire, settings)
    assert channel.residual_norm() == pytest.approx(0, abs=1e-5)
    for tensors in channel.state_dict().values():
        assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())


def test_a_memory_of_ones_own_is_given_finite_gradients_only(wire: Wire) -> None:
    class Asserting(ErrorFeedback):
        def prepare(self, contribution: Contribution, context: Round) -> Contribution:
            assert all(bool(part.isfinite().all()) for part in contribution.parts if part is not None)
            return super().prepare(contribution, context)

    channel = bound(Channel(DenseAllReduce(), [Asserting()]))
    given = gradients()
    given[0][1, 1] = math.nan
    with pytest.raises(NonFiniteGradientError, match="'a'"):
        channel.reduce(given, CONTEXT, wire)


def test_a_parameter_without_a_gradient_keeps_what_is_held_for_it(wire: Wire) -> None:
    channel = bound(Channel(DenseAllReduce(), [ErrorFeedback()]))
    channel.memories[0].load_state_dict({"residual": {"a": torch.ones(2, 2), "b": torch.ones(3)}})
    first, _ = gradients()
    exchanged = channel.reduce([first, None], CONTEXT, wire)
    assert exchanged.present == [True, False]
    residual = channel.state_dict()["ErrorFeedback"]
    assert residual["a"].abs().max() < 1e-6
    assert residual["b"].tolist() == [1, 1, 1]
    assert dense(exchanged.sent)[4:].tolist() == [0, 0, 0]


# What is saved


class TwoVectors(Memory):
    """Holds two named vectors, and adds one to each part."""

    def __init__(self) -> None:
        super().__init__("slow", "fast")

    def prepare(self, contribution: Contribution, context: Round) -> Contribution:
        for vector in self.held.values():
            assert vector.flat is not None
            vector.flat.add_(1)
        return contribution


class FreeNames(DenseAllReduce):
    """Keeps a tensor under a name that is no parameter's."""

    def __init__(self, number: float = 0.0) -> None:
        super().__init__()
        self.basis = torch.tensor(number)

    def state_dict(self) -> dict[str, Tensor]:
        return {"basis": self.basis}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.basis = state["basis"].clone()


class OtherNames(Untouched):
    """A memory that keeps tensors under names of its own, in a group of its own."""

    def __init__(self, number: float = 0.0) -> None:
        super().__init__()
        self.count = torch.tensor(number)

    def state_dict(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {"counts": {"rounds": self.count}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.count = state["counts"]["rounds"].clone()


def _copied(saved: Saved) -> Saved:
    return {kind: {name: tensor.clone() for name, tensor in parts.items()} for kind, parts in saved.items()}


def _assert_close(found: Saved, expected: Saved) -> None:
    assert found.keys() == expected.keys()
    for kind, parts in expected.items():
        assert found[kind].keys() == parts.keys()
        for name, tensor in parts.items():
            torch.testing.assert_close(found[kind][name], tensor, rtol=1e-5, atol=1e-5)


def _names(layout: Layout) -> list[str]:
    return [segment.name for segment in layout.segments]


def test_two_channels_of_one_optimizer_are_saved_together_and_find_their_own_again(wire: Wire) -> None:
    """Two named vectors, and tensors under free names, which both channels have: none is mistaken for the other's."""

    def make(number: float) -> Channel:
        return Channel(FreeNames(number), [TwoVectors(), ErrorFeedback(0.5), OtherNames(number)])

    first, second = make(1.0), make(2.0)
    for channel, layout in ((first, LAYOUT), (second, OTHER)):
        channel.bind(layout, torch.float32, CPU)
        for step in range(2):
            channel.reduce(gradients(layout), Round(layout, step), wire)
    for index, channel in enumerate((first, second)):
        for name, vector in channel.memories[0].held.items():
            assert vector.flat is not None
            vector.flat.fill_({"slow": 10.0, "fast": 20.0}[name] + index)
    saved: Saved = {}
    for channel in (first, second):
        for kind, parts in channel.state_dict().items():
            assert not saved.setdefault(kind, {}).keys() & parts.keys()
            saved[kind].update(parts)
    assert saved.keys() == {"TwoVectors.slow", "TwoVectors.fast", "ErrorFeedback", "OtherNames.counts", "FreeNames"}
    expected = [_copied(channel.state_dict()) for channel in (first, second)]

    others = make(0.0), make(0.0)
    # In another order than they were saved.
    for channel, layout in reversed(list(zip(others, (LAYOUT, OTHER), strict=True))):
        channel.load_state_dict(saved, _names(layout))
        channel.bind(layout, torch.float32, CPU)
    for channel, state in zip(others, expected, strict=True):
        _assert_close(channel.state_dict(), state)
    assert [float(channel.exchange.basis) for channel in others] == [1, 2]  # type: ignore[attr-defined]
    assert [float(channel.memories[2].count) for channel in others] == [1, 2]  # type: ignore[attr-defined]
    assert not any(saved.values())


def test_several_memories_of_one_class_are_numbered(wire: Wire) -> None:
    channel = bound(Channel(DenseAllReduce(), [ErrorFeedback(), ErrorFeedback(0.5)]))
    for memory, value in zip(channel.memories, (1.0, 2.0), strict=True):
        assert memory.held["residual"].flat is not None
        memory.held["residual"].flat.fill_(value)
    saved = _copied(channel.state_dict())
    assert {kind: float(parts["a"][0, 0]) for kind, parts in saved.items()} == {
        "ErrorFeedback": 1,
        "ErrorFeedback 2": 2,
    }
    other = channel.fresh()
    other.load_state_dict(_copied(saved), _names(LAYOUT))
    _assert_close(other.state_dict(), saved)


def test_the_state_of_another_method_is_left_for_others() -> None:
    saved: Saved = {"ErrorFeedback": {"a": torch.ones(2, 2), "elsewhere": torch.ones(1)}, "Other": {"a": torch.ones(1)}}
    channel = Channel(DenseAllReduce(), [ErrorFeedback()])
    channel.load_state_dict(saved, _names(LAYOUT))
    channel.bind(LAYOUT, torch.float32, CPU)
    assert channel.residual_norm() == 2
    assert saved.keys() == {"ErrorFeedback", "Other"}
    assert list(saved["ErrorFeedback"]) == ["elsewhere"]
    assert list(saved["Other"]) == ["a"]


class Unsavable(Untouched):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def state_dict(self) -> Any:
        return {"numbers": self.state}


class UnsavableExchange(DenseAllReduce):
    def state_dict(self) -> Any:
        return {"count": 3}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Channel(DenseAllReduce(), [Unsavable({"count": 3})]), "Unsavable must hold tensors by name.*'count'"),
        (lambda: Channel(DenseAllReduce(), [Unsavable({1: torch.ones(1)})]), "Unsavable must hold tensors by name.*1"),
        (lambda: Channel(UnsavableExchange()), "UnsavableExchange must hold tensors by name.*int for 'count'"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_training(make: Callable[[], Channel], text: str) -> None:
    channel = make()
    with pytest.raises(TypeError, match=rf"state_dict of {text}.*torch\.tensor\("):
        channel.bind(LAYOUT, torch.float32, CPU)


def test_the_first_memory_that_objects_is_heard() -> None:
    adam = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
    assert Channel(DenseAllReduce(), [ErrorFeedback()]).objection(adam) is None
    objection = Channel(DenseAllReduce(), [MomentumCorrection(), ErrorFeedback()]).objection(adam)
    assert objection is not None
    assert "Adam" in objection


def test_memories_are_taken_back_even_where_the_exchange_fails_to_abort() -> None:
    class Stubborn(DenseAllReduce):
        def abort(self) -> None:
            raise KeyError("abort")

    channel = bound(Channel(Stubborn(), [ErrorFeedback()]))
    channel.prepare(gradients(), CONTEXT, FakeWire())  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        channel.abort()
    assert channel.residual_norm() == 0


class FakeWire:
    """One rank, on which an all-reduce leaves what it is given."""

    rank, world_size = 0, 1

    def all_reduce_later_(self, tensor: Tensor) -> Callable[[], None]:
        return lambda: None


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Channel("dense"), TypeError, r"exchange must be an Exchange; got 'dense'\. Use DenseAllReduce"),  # type: ignore[arg-type]
        (lambda: Channel(DenseAllReduce(), ErrorFeedback()), TypeError, "memories must be a list of memories"),  # type: ignore[arg-type]
        (lambda: Channel(DenseAllReduce(), [ErrorFeedback]), TypeError, "memories must be a list of memories"),  # type: ignore[list-item]
        (lambda: Channel(DenseAllReduce(), [Momentum(), Momentum()]), ValueError, "momentum is applied twice"),
    ],
)
def test_what_no_channel_can_be_made_of(make: Callable[[], Channel], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize("momentum", [False, True])
def test_a_compressor_that_asks_is_told_what_has_entered(momentum: bool, wire: Wire) -> None:
    """What a round adds to the residual, and zeros where this rank has no gradient; nothing where nobody asks."""
    noted: list[Vector] = []

    class Noting(AdaptiveBins):
        def encode(self, x: Vector, context: Round) -> Tensor:
            noted.append(x._replace(values=x.values.clone()))
            return super().encode(x, context)

    before: list[Memory] = [MomentumCorrection(False)] if momentum else []
    channel = bound(Channel(Gather(Noting(2)), [*before, ErrorFeedback()]))
    settings = StepSettings([MomentumRule(0.5)] * 2)
    first, second = gradients(), gradients()
    channel.reduce(first, CONTEXT, wire, settings)
    residual = channel.memories[-1].held["residual"].flat.clone()
    channel.reduce([second[0], None], CONTEXT, wire, settings)
    added = noted[1].entering
    assert added is not None
    expected = second[0] + 0.5 * first[0] if momentum else second[0]
    torch.testing.assert_close(added[:4].view(2, 2), expected)
    torch.testing.assert_close(noted[1].values[:4], residual[:4] + added[:4])
    if not momentum:
        assert not added[4:].any()

    noted.clear()
    bound(Channel(Gather(Noting(2)))).reduce(first, CONTEXT, wire)
    assert noted[0].entering is None
