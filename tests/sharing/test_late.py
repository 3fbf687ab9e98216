"""Gradients whose exchange takes place while the next ones are computed; here of one rank."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, RMSprop

from lightning_sparsecomm.basis import Round, Vector, Wire
from lightning_sparsecomm.basis.stream import Stream
from lightning_sparsecomm.channel import Channel, ErrorFeedback, LocalAdam, Momentum, MomentumCorrection
from lightning_sparsecomm.channel.coherence import Coherence
from lightning_sparsecomm.codecs import SparseCodec, TopK
from lightning_sparsecomm.exchange import BlockReduce, DenseAllReduce, Exchanged, Gather, NonFiniteGradientError
from lightning_sparsecomm.methods import dgc, local_adam
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import GradientSync, Method, Sync
from lightning_sparsecomm.sharing.late import LateShare


class Calling(SGD):
    """Calls its parent's step, around which torch calls hooks too, once there is an optimizer of that class."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


RATES = [[0.1] * 6, [0.1, 0.2, 0.05, 0.0, 0.0, 0.3], [0.3, 0.3, 1e-6, 1e-6, 1e-6, 0.0]]


def late(*memories: Any, density: float = 1.0, **options: Any) -> Method:
    channel = Channel(Gather(SparseCodec(TopK(density))), memories or [ErrorFeedback()])
    return Method([GradientSync(channel, delay=1, **options)])


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.weight = nn.Parameter(torch.randn(4, 5, generator=generator))
        self.bias = nn.Parameter(torch.randn(4, generator=generator))


class Training:
    """One rank's training with gradients that are given."""

    def __init__(self, method: Method, kind: Any = SGD, **options: Any) -> None:
        self.module = Layers()
        self.engine = Engine(method, Wire())
        self.engine.registry.add_module(self.module)
        self.optimizer = kind(self.module.parameters(), **{"lr": 0.1, **options})

    @property
    def shares(self) -> list[LateShare]:
        found = [share for tracked in self.engine.registry.optimizers for share in tracked.shares.values()]
        assert all(isinstance(share, LateShare) for share in found)
        return found  # type: ignore[return-value]

    def train(self, weight: Tensor | None, bias: Tensor | None, rate: float = 0.1) -> None:
        """A step whose gradients are these."""
        self.optimizer.param_groups[0]["lr"] = rate
        self.module.weight.grad, self.module.bias.grad = weight, bias
        with self.engine.stepping(self.optimizer):
            self.engine.synchronize(self.optimizer)
            self.optimizer.step()

    def own(self) -> Tensor:
        return flat(self.module.weight, self.module.bias)

    def shared(self) -> Tensor:
        """The model that is validated and saved."""
        pairs = [pair for share in self.shares for pair in share.shared_weights()]
        values = {weight.data_ptr(): value for weight, value in pairs}
        return flat(*(values.get(each.data_ptr(), each) for each in self.module.parameters()))

    def saved(self) -> tuple[Any, Any, Tensor]:
        """What a checkpoint and the files beside it hold: of the engine, of the optimizer, and the shared weights."""
        return copy.deepcopy((self.engine.state.state_dict(), self.optimizer.state_dict(), self.shared()))

    def load(self, saved: tuple[Any, Any, Tensor], strict: bool = True) -> None:
        state, of_optimizer, weights = saved
        self.engine.register(self.optimizer)
        with torch.no_grad():
            for weight, part in zip(self.module.parameters(), weights.split([20, 4])):
                weight.copy_(part.view(weight.shape))
        self.optimizer.load_state_dict(of_optimizer)
        self.engine.restart()
        assert bool(self.engine.state.load_state_dict(state, as_many_ranks=True)) <= (not strict)


def flat(*tensors: Tensor) -> Tensor:
    return torch.cat([each.detach().flatten() for each in tensors])


def drawn(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 5, generator=generator), torch.randn(4, generator=generator)


@pytest.mark.usefixtures("wire")
def test_an_optimizer_whose_step_calls_its_parent_s_trains_alike() -> None:
    ends = []
    for kind in (SGD, Calling):
        training = Training(late(density=0.25), kind)
        for step in range(4):
            training.train(*drawn(step))
            if step == 1 and kind is Calling:
                # An error amid a step leaves nothing behind.
                with pytest.raises(ArithmeticError), training.engine.stepping(training.optimizer):
                    training.optimizer.step(_fail)
        ends.append((training.own(), training.shared()))
    assert all(torch.equal(*each) for each in zip(*ends))


@pytest.mark.usefixtures("wire")
def test_a_rank_trains_ahead_by_a_part_of_what_is_mostly_noise_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with many ranks, whose directions are far longer than that of all."""
    aheads, ends = [], []
    for part in (1.0, 0.25):
        monkeypatch.setattr(Coherence, "ahead", lambda *_, part=part: part)
        training = Training(local_adam(density=0.2, delay=1), AdamW, weight_decay=0.0)
        for step, rate in enumerate((0.1, 0.2, 0.05, 0.3)):
            training.train(*drawn(step), rate=rate)
            aheads.append(training.shared() - training.own())
        training.engine.settle()
        ends.append(training.own())
    for whole, some in zip(aheads[:4], aheads[4:]):
        assert whole.abs().max() > 0.01
        torch.testing.assert_close(some, 0.25 * whole, rtol=1e-4, atol=1e-6)
    assert torch.equal(*ends)


def _fail() -> float:
    raise ArithmeticError


class Reusing(DenseAllReduce):
    """It returns the same memory in each round."""

    room = torch.zeros(24)

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        exchanged = super().exchange(x, context, wire)
        return exchanged._replace(shared=self.room.copy_(exchanged.shared))


@pytest.mark.usefixtures("wire")
def test_the_next_exchange_may_end_before_this_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = LateShare.commit

    def last(share: LateShare) -> None:
        if share._flight is not None:
            share._flight._future.result()
        commit(share)

    monkeypatch.setattr(LateShare, "commit", last)
    ends = []
    for exchange in (DenseAllReduce(), Reusing()):
        training = Training(Method([GradientSync(Channel(exchange, [ErrorFeedback()]), delay=1)]))
        for step in range(4):
            training.train(*drawn(step))
        training.engine.settle()
        ends.append(training.own())
    assert torch.equal(*ends)


@pytest.mark.usefixtures("wire")
def test_own_gradients_count_at_once_and_shared_ones_a_step_later() -> None:
    training, begin = Training(late(density=0.25)), flat(*Layers().parameters())
    training.train(*drawn(0))
    assert torch.equal(training.shared(), begin)
    torch.testing.assert_close(training.own(), begin - 0.1 * flat(*drawn(0)))
    training.train(*drawn(1))
    moved = begin - training.shared()
    assert moved.count_nonzero() == 6
    largest = flat(*drawn(0)).abs().topk(6).indices
    torch.testing.assert_close(moved[largest], 0.1 * flat(*drawn(0))[largest])
    torch.testing.assert_close(training.own(), training.shared() - 0.1 * flat(*drawn(1)))
    training.engine.settle()
    torch.testing.assert_close(training.own(), begin - 0.1 * flat(*drawn(0)) - 0.1 * flat(*drawn(1)))
    assert training.engine.residual_norm() == 0
    assert torch.equal(training.shared(), training.own())


ALONE: dict[str, tuple[Callable[[], Method], Any, dict[str, Any]]] = {
    "no momentum": (late, SGD, {}),
    "momentum": (lambda: late(MomentumCorrection(), ErrorFeedback()), SGD, {"momentum": 0.9}),
    "dampening": (lambda: late(MomentumCorrection(), ErrorFeedback()), SGD, {"momentum": 0.9, "dampening": 0.5}),
    "nesterov": (lambda: dgc(1.0, warmup_steps=0, delay=1), SGD, {"momentum": 0.9, "nesterov": True}),
    "maximize": (lambda: dgc(1.0, warmup_steps=0, delay=1), SGD, {"momentum": 0.9, "maximize": True}),
    "clipped": (lambda: dgc(1.0, warmup_steps=0, clip=0.5, delay=1), SGD, {"momentum": 0.9}),
    "adam": (lambda: local_adam(1.0, delay=1), Adam, {}),
    "adamw": (lambda: local_adam(1.0, delay=1), AdamW, {"weight_decay": 0.0}),
}


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("name", ALONE)
def test_alone_at_full_density_a_rank_trains_as_without_delay(name: str) -> None:
    """Its own gradient is the mean. These gradients depend on the weights."""
    make, kind, options = ALONE[name]
    training, module = Training(make(), kind, **options), Layers()
    optimizer = kind(module.parameters(), **{"lr": 0.1, **options})
    aim = drawn(9)
    for step in range(12):
        rate = 0.1 if step < 6 else 0.03
        gradients = [weight.detach() - part for weight, part in zip(training.module.parameters(), aim)]
        for weight, part in zip(module.parameters(), aim):
            weight.grad = weight.detach() - part
        if name == "clipped":
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        training.train(*gradients, rate=rate)
        torch.testing.assert_close(training.own(), flat(*module.parameters()), rtol=1e-4, atol=1e-4)
    training.engine.settle()
    torch.testing.assert_close(training.own(), flat(*module.parameters()), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_each_gradient_counts_at_the_rate_of_its_own_step(rates: list[float], momentum: float) -> None:
    training = Training(late(MomentumCorrection(), ErrorFeedback(), density=0.25), momentum=momentum)
    expected, velocity = flat(*Layers().parameters()), torch.zeros(24)
    for step, rate in enumerate(rates):
        velocity = momentum * velocity + flat(*drawn(step))
        expected -= rate * velocity
        training.train(*drawn(step), rate=rate)
    training.engine.settle()
    torch.testing.assert_close(training.own(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("wire")
def test_no_turn_waits_for_its_own_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Stream.start

    class Held:
        """Work that begins when it is waited for."""

        def __init__(self, *started: Any) -> None:
            self.started = started

        def wait(self) -> Any:
            return start(*self.started).wait()

    monkeypatch.setattr(Stream, "start", lambda self, work, wire=None: Held(self, work, wire))
    training = Training(late())
    training.train(*drawn(0))
    ledger = training.engine.wire.ledger
    assert ledger.handed_bytes() == 0
    training.train(*drawn(1))
    assert ledger.handed_bytes() > 0


@pytest.mark.usefixtures("wire")
def test_a_gradient_that_is_missing_moves_nothing() -> None:
    training, begin = Training(late()), Layers()
    training.train(drawn(0)[0], None)
    training.train(*drawn(1))
    assert torch.equal(training.shared()[20:], begin.bias.detach())
    training.train(drawn(2)[0], None)
    torch.testing.assert_close(training.own()[20:], begin.bias.detach() - 0.1 * drawn(1)[1])


@pytest.mark.usefixtures("wire")
def test_a_gradient_that_is_missing_moves_nothing_after_a_step_at_rate_0_either() -> None:
    training, begin = Training(dgc(1.0, warmup_steps=0, delay=1), momentum=0.9, weight_decay=0.1), Layers()
    for seed, rate in enumerate([0.1, 0.1, 0.0, 0.1, 0.1]):
        training.train(drawn(seed)[0], None, rate)
    assert torch.equal(training.shared()[20:], begin.bias.detach())


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("rates", [[0.1] * 5, [0.1, 0.2, 0.0, 0.0, 0.1]])
@pytest.mark.parametrize(
    ("make", "kind", "options"),
    [
        (lambda: late(density=0.25), SGD, {}),
        (lambda: dgc(0.25, warmup_steps=0, delay=1), SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        (lambda: local_adam(0.25, delay=1), AdamW, {}),
    ],
    ids=["plain", "dgc", "local_adam"],
)
def test_saved_and_loaded_it_goes_on_to_the_bit(
    make: Callable[[], Method], kind: Any, options: dict[str, Any], rates: list[float]
) -> None:
    whole, first = (Training(make(), kind, **options) for _ in range(2))
    for step, rate in enumerate(rates[:3]):
        whole.train(*drawn(step), rate=rate)
        first.train(*drawn(step), rate=rate)
    saved = first.saved()
    second = Training(make(), kind, **options)
    second.load(saved)
    for step, rate in enumerate(rates[3:], start=3):
        for training in (whole, first, second):
            training.train(*drawn(step), rate=rate)
        assert torch.equal(whole.own(), second.own())
    for training in (whole, first, second):
        training.engine.settle()
    assert torch.equal(whole.own(), second.own())
    # A save changes nothing.
    assert torch.equal(whole.own(), first.own())


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_saved_between_the_exchange_and_the_step_it_goes_on_to_the_bit(steps: int) -> None:
    """As where gradients are clipped by hand, or a callback saves before the step."""
    first, second = (Training(dgc(0.25, warmup_steps=0, delay=1), momentum=0.9) for _ in range(2))
    for step in range(steps):
        first.train(*drawn(step))
    first.module.weight.grad, first.module.bias.grad = drawn(steps)
    first.engine.synchronize(first.optimizer)
    saved = first.saved()
    with first.engine.stepping(first.optimizer):
        first.optimizer.step()
    second.load(saved)
    # What the exchange gave is repeated, whatever is computed now.
    second.train(*drawn(steps))
    assert torch.equal(first.own(), second.own())
    assert torch.equal(first.shared(), second.shared())
    for training in (first, second):
        training.train(*drawn(steps + 1))
        training.engine.settle()
    assert torch.equal(first.own(), second.own())


@pytest.mark.usefixtures("wire")
def test_a_save_between_the_exchange_and_the_step_changes_nothing() -> None:
    """Though it waits for the exchange, after which momentum is masked."""
    ends = []
    for saves in (False, True):
        training = Training(dgc(0.25, warmup_steps=0, delay=1, momentum_masking=True), momentum=0.9)
        for step in range(4):
            training.module.weight.grad, training.module.bias.grad = drawn(step)
            with training.engine.stepping(training.optimizer):
                training.engine.synchronize(training.optimizer)
                if saves:
                    training.engine.state.state_dict()
                training.optimizer.step()
        ends.append(training.own())
    assert torch.equal(*ends)


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("follow_rate", [False, True])
def test_a_run_that_is_resumed_with_no_step_left_ends(follow_rate: bool) -> None:
    first, second = (
        Training(dgc(0.25, warmup_steps=0, delay=1, follow_rate=follow_rate), momentum=0.9) for _ in range(2)
    )
    for step in range(3):
        first.train(*drawn(step))
    second.load(first.saved())
    for training in (first, second):
        training.engine.settle()
    assert torch.equal(first.own(), second.own())


@pytest.mark.usefixtures("wire")
def test_after_an_error_weights_are_the_shared_ones_and_training_can_go_on() -> None:
    training = Training(late())
    training.train(*drawn(0))
    training.train(*drawn(1))
    shared = training.shared()
    for share in training.shares:
        share.abort()
        share.abort()
    assert torch.equal(training.own(), shared)
    assert training.engine.residual_norm() == pytest.approx(0, abs=1e-6)


@pytest.mark.usefixtures("wire")
def test_a_gradient_that_is_not_finite_is_refused_by_the_next_step() -> None:
    training = Training(late())
    training.train(*drawn(0))
    training.train(drawn(1)[0], torch.full((4,), float("nan")))
    # It does not reach the weights.
    assert bool(training.own().isfinite().all())
    with pytest.raises(NonFiniteGradientError, match="'bias'"):
        training.train(*drawn(2))
    # A checkpoint that is saved now counts that step, and lacks its gradient.
    assert training.engine.state.state_dict()["torn"]
    assert torch.equal(training.own(), training.shared())


@pytest.mark.usefixtures("wire")
def test_a_save_that_finds_an_error_is_written_and_the_next_step_raises_it() -> None:
    """As after a lost rank, where a callback saves."""
    training = Training(late())
    training.train(drawn(0)[0], torch.full((4,), float("nan")))
    for _ in range(2):
        state = training.engine.state.state_dict()
        assert state["torn"]
        assert "GradientSync.late, shared" not in state["streams"][0]["held"]
    with pytest.raises(NonFiniteGradientError, match="'bias'"):
        training.train(*drawn(1))


@pytest.mark.usefixtures("wire")
def test_weights_that_other_code_changes_are_refused() -> None:
    training = Training(late())
    training.train(*drawn(0))
    with torch.no_grad():
        training.module.weight.clamp_(-0.5, 0.5)
    with pytest.raises(ValueError, match=r"delay must be 0 where other code .* changed 'weight'. .* Leave it out"):
        training.train(*drawn(1))


@pytest.mark.usefixtures("wire")
def test_parameters_that_join_while_an_exchange_is_in_flight() -> None:
    training, begin = Training(late()), Layers()
    training.module.bias.requires_grad_(False)
    training.train(drawn(0)[0], None)
    training.module.bias.requires_grad_(True)
    training.train(*drawn(1))
    training.train(*drawn(2))
    torch.testing.assert_close(training.shared()[20:], begin.bias.detach() - 0.1 * drawn(1)[1])
    torch.testing.assert_close(
        training.own()[:20], flat(begin.weight) - 0.1 * sum(flat(drawn(step)[0]) for step in range(3))
    )


@pytest.mark.parametrize(
    ("channel", "options", "words"),
    [
        (Channel(DenseAllReduce(), [ErrorFeedback()]), {"delay": 2}, "delay must be 0 or 1, in optimizer steps; got 2"),
        (Channel(DenseAllReduce(), [ErrorFeedback()]), {"delay": 1.0}, "delay must be 0 or 1, in .*; got 1.0. Use 1"),
        (Channel(DenseAllReduce(), [ErrorFeedback()]), {"delay": True}, "delay must be 0 or 1, in .*; got True. Use 1"),
        (
            Channel(DenseAllReduce(), [ErrorFeedback()]),
            {"delay": 1, "local": "sum"},
            "must be left out with .* local mode",
        ),
        (Channel(DenseAllReduce(), [ErrorFeedback()]), {"delay": 1, "mask_momentum": True}, "or masked momentum"),
        (Channel(BlockReduce()), {"delay": 1, "sparse": True}, "delay must be left out with sparse gradients"),
        (Channel(DenseAllReduce()), {"delay": 1}, r"needs a channel with ErrorFeedback.*Use \[MomentumCorrection"),
        (Channel(DenseAllReduce(), [ErrorFeedback(), Momentum()]), {"delay": 1}, "and momentum before the exchange"),
    ],
)
def test_refused(channel: Channel, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GradientSync(channel, **options)


@pytest.mark.parametrize(
    ("memories", "optimizer", "defined"),
    [
        ([ErrorFeedback()], SGD([nn.Parameter(torch.zeros(1))], lr=1.0), True),
        ([ErrorFeedback()], SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9), False),
        ([ErrorFeedback()], RMSprop([nn.Parameter(torch.zeros(1))]), False),
        ([MomentumCorrection(), ErrorFeedback()], SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9), True),
        ([LocalAdam(), ErrorFeedback()], Adam([nn.Parameter(torch.zeros(1))]), True),
        ([ErrorFeedback()], Adam([nn.Parameter(torch.zeros(1))]), False),
    ],
)
def test_optimizers_that_it_is_defined_for(memories: Any, optimizer: Any, defined: bool) -> None:
    (sync,) = late(*memories).syncs
    objection = sync.objection(optimizer)
    assert (objection is None) == defined
    if objection is not None:
        assert re.search(r"with delay=1, a step must be the learning rate times .*or leave delay out", objection)


def test_momentum_cannot_join_after_the_exchange() -> None:
    (sync,) = late().syncs
    with pytest.raises(ValueError, match=r"with delay=1, momentum comes before the exchange. Add MomentumCorrection"):
        sync.joining(None, Momentum())


def test_its_repr_tells_the_delay() -> None:
    (sync,) = late().syncs
    assert isinstance(sync, GradientSync)
    assert repr(sync).endswith(", delay=1)")
    assert "delay" not in repr(sync.at(0))
    assert sync.at(0).drifts is False
    assert isinstance(sync, Sync) and sync.drifts
