"""Gradients exchanged every few steps; here of one rank."""

import contextlib
import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, RMSprop

from lightning_sparsecomm.basis import Stages
from lightning_sparsecomm.channel import Channel, ErrorFeedback, Momentum, MomentumCorrection
from lightning_sparsecomm.channel.coherence import Coherence
from lightning_sparsecomm.codecs import SparseCodec, TopK
from lightning_sparsecomm.exchange import DenseAllReduce, Gather, NonFiniteGradientError
from lightning_sparsecomm.methods import default, dgc, federated_averaging, gradient_dropping, local_adam
from lightning_sparsecomm.sharing import GradientSync, Method
from lightning_sparsecomm.sharing.ahead import Ahead
from lightning_sparsecomm.sharing.local_steps import LocalStepsShare
from tests.sharing import test_late
from tests.sharing.test_late import drawn

RATES = (0.1, 0.2, 0.05, 0.0, 0.1, 0.3, 0.3, 1e-6, 0.2)

OPTIMIZERS: list[tuple[Callable[..., Method], Any, dict[str, Any]]] = [
    (lambda **o: dgc(warmup_steps=0, **o), SGD, {"momentum": 0.9}),
    (lambda **o: dgc(warmup_steps=0, **o), SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    (local_adam, AdamW, {"weight_decay": 0.0}),
    (local_adam, Adam, {"maximize": True}),
]


COUNTS_TWICE = r"changed \.grad of '(weight|bias)' in a step between two exchanges.* a factor counts twice"


class Training(test_late.Training):
    @property
    def shares(self) -> list[LocalStepsShare]:  # type: ignore[override]
        found = [share for tracked in self.engine.registry.optimizers for share in tracked.shares.values()]
        return [share for share in found if isinstance(share, LocalStepsShare)]


def trained(method: Method, kind: Any, steps: int = len(RATES), **options: Any) -> Training:
    training = Training(method, kind, **options)
    for step, rate in zip(range(steps), RATES):
        training.train(*drawn(step), rate=rate)
    return training


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("every", [2, 4])
@pytest.mark.parametrize(("method", "kind", "options"), OPTIMIZERS)
def test_alone_a_rank_steps_as_if_it_exchanged_each_time(
    method: Callable[..., Method], kind: Any, options: dict[str, Any], every: int
) -> None:
    """What it steps along by itself is what an exchange of everything would give back."""
    often, seldom = (trained(method(density=1.0, every=number), kind, **options) for number in (1, every))
    torch.testing.assert_close(seldom.own(), often.own(), rtol=1e-5, atol=1e-6)
    # Step 8 has exchanged.
    assert torch.equal(seldom.own(), seldom.shared())


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(("method", "kind", "options"), OPTIMIZERS)
def test_with_residuals_in_weights_a_rank_is_where_it_would_be_if_it_had_sent_all(
    method: Callable[..., Method], kind: Any, options: dict[str, Any], every: int
) -> None:
    """Whatever the density; also where learning rates rise, fall, and are zero."""
    dense = trained(method(density=1.0), kind, **options)
    sparse = trained(method(density=0.2, every=every, residual_in_weights=True), kind, **options)
    torch.testing.assert_close(sparse.own(), dense.own(), rtol=1e-5, atol=1e-6)
    assert (sparse.shared() - dense.own()).abs().max() > 0.01
    sparse.engine.settle()
    torch.testing.assert_close(sparse.own(), dense.own(), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("in_weights", [False, True])
def test_a_rank_trains_ahead_by_a_part_of_what_is_mostly_noise_and_loses_nothing(
    in_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with many ranks, whose directions are far longer than that of all."""
    monkeypatch.setattr(Coherence, "ahead", lambda *_: 0.25)
    dense = trained(local_adam(density=1.0), AdamW, weight_decay=0.0)
    training = Training(local_adam(density=0.2, every=2, residual_in_weights=in_weights), AdamW, weight_decay=0.0)
    waits = []
    for step, rate in enumerate(RATES):
        training.train(*drawn(step), rate=rate)
        waits.append(torch.cat([share._waits() for share in training.shares]))
        ahead = training.shared() - training.own()
        counted = waits[-1] if in_weights else waits[-1] - waits[-2] if step % 2 else 0 * waits[-1]
        torch.testing.assert_close(ahead, 0.25 * counted, rtol=1e-4, atol=1e-5)
    assert waits[-1].abs().max() > 0.01
    training.engine.settle()
    torch.testing.assert_close(training.own(), dense.own(), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize(("method", "kind"), [(dgc, SGD), (local_adam, AdamW)])
def test_between_exchanges_nothing_is_sent(method: Callable[..., Method], kind: Any) -> None:
    training, sent = Training(method(density=0.3, every=3), kind), []
    for step in range(7):
        before = training.engine.wire.ledger.handed_bytes()
        training.train(*drawn(step))
        sent.append(training.engine.wire.ledger.handed_bytes() - before)
        assert torch.equal(training.own(), training.shared()) is (step % 3 == 0)
    assert [number > 0 for number in sent] == [True, False, False] * 2 + [True]


@pytest.mark.usefixtures("wire")
def test_the_number_of_steps_can_follow_a_schedule() -> None:
    training, equal = Training(dgc(0.3, every=Stages([1, 2], steps=[0, 3])), SGD), []
    for step in range(7):
        training.train(*drawn(step))
        equal.append(torch.equal(training.own(), training.shared()))
    assert equal == [True, True, True, False, True, False, True]


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("steps", [4, 5, 6])
@pytest.mark.parametrize(
    "when", [{"every": 3}, {"every": 3, "residual_in_weights": True}, {"residual_in_weights": True}]
)
@pytest.mark.parametrize(
    ("method", "kind", "options"),
    [
        (dgc, SGD, {"momentum": 0.9, "weight_decay": 0.01}),
        (local_adam, AdamW, {"weight_decay": 0.1}),
    ],
)
def test_a_run_resumes_between_two_exchanges(
    method: Callable[..., Method], kind: Any, options: dict[str, Any], when: dict[str, Any], steps: int
) -> None:
    whole = trained(method(density=0.3, **when), kind, **options)
    saved = trained(method(density=0.3, **when), kind, steps, **options).saved()
    resumed = Training(method(density=0.3, **when), kind, **options)
    resumed.load(copy.deepcopy(saved))
    for step in range(steps, len(RATES)):
        resumed.train(*drawn(step), rate=RATES[step])
    assert torch.equal(resumed.own(), whole.own())
    assert torch.equal(resumed.shared(), whole.shared())


@pytest.mark.usefixtures("wire")
def test_a_gradient_that_is_not_finite_is_refused_by_the_next_exchange() -> None:
    training = trained(dgc(0.3, every=3), SGD, 1, momentum=0.9)
    weight, bias = drawn(1)
    weight[0, 0] = math.nan
    training.train(weight, bias)
    assert training.own().isfinite().all()
    training.train(*drawn(2))
    with pytest.raises(NonFiniteGradientError, match=r"gradient of steps 1 to 3 that is not finite, .* 'weight'"):
        training.train(*drawn(3))
    # The run can go on without it.
    training.train(*drawn(4))
    assert training.own().isfinite().all()


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("when", [{"every": 3}, {"residual_in_weights": True}])
def test_an_error_leaves_the_weights_that_all_share(when: dict[str, Any]) -> None:
    training = trained(dgc(0.3, **when), SGD, 3, momentum=0.9)
    shared = training.shared()
    assert not torch.equal(training.own(), shared)
    for share in training.shares:
        assert isinstance(share, LocalStepsShare)
        share.abort()
    assert torch.equal(training.own(), shared)
    training.engine.settle()
    # What was trained since is in residuals, and not lost.
    whole = trained(dgc(0.3, **when), SGD, 3, momentum=0.9)
    whole.engine.settle()
    torch.testing.assert_close(training.own(), whole.own())


def clamped(training: Training, bound: float = 0.1) -> None:
    with torch.no_grad():
        training.module.weight.clamp_(-bound, bound)


@pytest.mark.filterwarnings("ignore:other code than the optimizer")
@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("ahead", [{}, {"density": 0.3, "residual_in_weights": True}])
@pytest.mark.parametrize(("kind", "method"), [(SGD, lambda **o: dgc(warmup_steps=0, **o)), (AdamW, local_adam)])
def test_what_other_code_sets_weights_to_becomes_theirs(
    kind: Any, method: Callable[..., Method], ahead: dict[str, Any]
) -> None:
    """One rank that sends everything steps as if it exchanged each time, also from weights that were set."""
    ends = []
    for when in ({}, {"every": 4} | ahead):
        training = Training(method(**({"density": 1.0} | when)), kind, weight_decay=0.0)
        for step in range(9):
            training.train(*drawn(step))
            if step in (1, 6):
                with torch.no_grad():
                    training.module.weight.copy_(drawn(99)[0])
        ends.append(training.own())
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (7,), (700, 600), (3, 400_000), (64, 40, 9, 9)])
def test_each_element_that_other_code_sets_is_found(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.randn(shape).to(dtype))
    if weight.dim() == 4:
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    ahead, named = Ahead(), [("weight", weight)]
    ahead.add("weight", torch.randn(shape), 0.3, torch.float32)
    ahead.leave(named, lambda: {"weight": -1})
    shared = ahead.anchors.of("weight").clone()
    ahead.look(named, lambda: {"weight": -1})
    assert not ahead.set.changes
    place = tuple(size // 2 + 1 if size > 2 else 1 for size in shape)
    before = weight.detach().clone()
    for value, looks in ((5.0, 2), (-3.0, 1)):
        weight.data[place] = value
        for _ in range(looks):
            ahead.look(named, lambda: {"weight": -1})
    assert int((ahead.set.changes["weight"] != 0).sum()) == 1
    ahead.anchors.restore(named)
    ahead.leave(named, lambda: {"weight": -1})
    assert torch.equal(ahead.anchors.of("weight"), shared)
    assert int((weight != before).sum()) == 1
    assert float(weight.detach()[place]) == pytest.approx(-3.0, rel=1e-2)


class Large(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(80, 60))
        self.bias = torch.nn.Parameter(torch.zeros(80))


@pytest.mark.filterwarnings("ignore:other code than the optimizer")
@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("every", [2, 4])
def test_one_row_of_many_that_is_set_stays_set(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_late, "Layers", Large)
    training = Training(local_adam(0.3, every=every, residual_in_weights=True), AdamW, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for step in range(5):
        gradients = torch.randn(80, 60, generator=generator), torch.randn(80, generator=generator)
        training.train(*gradients, rate=1e-3)
        if step == 1:
            with torch.no_grad():
                training.module.weight[1] = 5.0
    training.engine.settle()
    assert (training.module.weight[1] - 5).abs().max() < 0.02
    assert training.module.weight[0].abs().max() < 0.02


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("ahead", [False, True])
def test_where_weights_are_set_again_and_again_each_step_exchanges(ahead: bool) -> None:
    training, equal = Training(dgc(0.3, every=3, residual_in_weights=ahead), SGD), []
    for step in range(13):
        with (
            pytest.warns(UserWarning, match="changed 1 .* such as 'weight'") if step == 3 else contextlib.nullcontext()
        ):
            training.train(*drawn(step))
        equal.append(torch.equal(training.own()[:20], training.shared()[:20]))
        clamped(training)
    # Found by the exchanges of steps 3, 6 and 9.
    assert equal == [not ahead, False, False] * 3 + [not ahead] + [True] * 3
    assert training.own()[:20].abs().max() <= 0.1


@pytest.mark.filterwarnings("ignore:other code than the optimizer")
@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("steps", [2, 3])
def test_a_run_resumes_after_weights_were_set_amid_local_steps(steps: int) -> None:
    def going_on(training: Training, first: int, end: int) -> Training:
        for step in range(first, end):
            training.train(*drawn(step))
            if step == 1:
                clamped(training)
        return training

    method = dgc(0.3, every=4)
    whole = going_on(Training(method, SGD, momentum=0.9), 0, 6)
    saved = going_on(Training(method, SGD, momentum=0.9), 0, steps).saved()
    resumed = Training(method, SGD, momentum=0.9)
    resumed.load(saved)
    going_on(resumed, steps, 6)
    assert torch.equal(resumed.own(), whole.own())
    assert torch.equal(resumed.shared(), whole.shared())


@pytest.mark.filterwarnings("ignore:other code than the optimizer")
@pytest.mark.usefixtures("wire")
def test_what_was_set_after_the_last_exchange_is_kept_at_the_end_of_training() -> None:
    training = trained(dgc(1.0, warmup_steps=0, every=4), SGD, 2)
    with torch.no_grad():
        training.module.weight.fill_(0.25)
    training.engine.settle()
    torch.testing.assert_close(training.module.weight.detach(), torch.full((4, 5), 0.25))


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("index", [0, 1])
def test_a_gradient_that_is_not_finite_is_still_refused_where_weights_were_set(index: int) -> None:
    training = trained(dgc(0.3, every=3), SGD, 1)
    gradients = drawn(1)
    gradients[index].view(-1)[0] = math.nan
    training.train(*gradients)
    training.train(*drawn(2))
    clamped(training)
    with pytest.raises(NonFiniteGradientError, match="'bias'" if index else "'weight'"):
        training.train(*drawn(3))


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize(
    ("method", "kind", "options"),
    [
        (dgc(0.3, every=3), SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        (dgc(0.3, every=3), SGD, {"weight_decay": 0.1}),
        (local_adam(0.3, every=3), AdamW, {"weight_decay": 0.1}),
    ],
)
def test_grad_shows_what_a_rank_steps_along_and_hooks_can_change_it(
    method: Method, kind: Any, options: dict[str, Any]
) -> None:
    training = trained(method, kind, 1, **options)
    before, shared = training.own(), training.shared()
    training.module.weight.grad, training.module.bias.grad = drawn(1)
    with training.engine.stepping(training.optimizer):
        training.engine.synchronize(training.optimizer)
        for parameter in training.module.parameters():
            assert parameter.grad is not None
            parameter.grad *= 0.5
        along = torch.cat([each.grad.flatten() for each in training.module.parameters()])  # type: ignore[union-attr]
        with pytest.warns(UserWarning, match=COUNTS_TWICE):
            training.optimizer.step()
    assert along.abs().min() > 0
    after = torch.cat([each.grad.flatten() for each in training.module.parameters()])  # type: ignore[union-attr]
    assert torch.equal(after, along)
    # Decay moves the shared weights; what hooks have left of a rank's own step, its own.
    torch.testing.assert_close(training.shared() - training.own(), 0.1 * along)
    assert not torch.equal(training.shared(), shared)
    assert not torch.equal(training.own(), before)


def halved(parameter: torch.nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad *= 0.5


def halved_data(parameter: torch.nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.data.mul_(0.5)


def replaced(parameter: torch.nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = (0.5 * parameter.grad).add_(0.0)


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("halve", [halved, halved_data, replaced])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_what_hooks_leave_of_a_rank_s_own_step_is_what_it_shares(
    momentum: float, halve: Callable[[torch.nn.Parameter], None]
) -> None:
    """Own steps with half of `.grad`, or without, count as such in the next exchange."""
    training = Training(dgc(1.0, warmup_steps=0, every=3), SGD, momentum=momentum)
    end, velocity = training.own(), torch.zeros(24)
    for step, part in enumerate((1.0, 0.5, 0.0, 1.0)):
        training.module.weight.grad, training.module.bias.grad = drawn(step)
        says_so = pytest.warns(UserWarning, match=COUNTS_TWICE)
        with says_so if step == 1 else contextlib.nullcontext(), training.engine.stepping(training.optimizer):
            training.engine.synchronize(training.optimizer)
            for parameter in training.module.parameters():
                if part == 0:
                    parameter.grad = None
                elif part != 1:
                    halve(parameter)
            training.optimizer.step()
        velocity = momentum * velocity + torch.cat([each.flatten() for each in drawn(step)])
        end = end - 0.1 * part * velocity
    torch.testing.assert_close(training.own(), end)
    assert torch.equal(training.own(), training.shared())


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("ahead", [False, True])
def test_an_epoch_ends_with_weights_that_all_share(ahead: bool) -> None:
    training, equal = Training(dgc(0.3, every=4, residual_in_weights=ahead), SGD), []
    for step in range(8):
        training.engine.ends_epoch = step % 3 == 2
        training.train(*drawn(step))
        equal.append(torch.equal(training.own(), training.shared()))
    # Not in step 4, which is too soon after the end of the first one.
    assert equal == [not ahead, False, True, False, False, True, False, False]


class WritesGradients(SGD):
    """Adds to gradients in place, as old optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(weight.grad.add_(1.0), alpha=group["lr"])


@pytest.mark.filterwarnings("ignore:WritesGradients changes gradients")
@pytest.mark.usefixtures("wire")
def test_an_optimizer_of_the_user_s_own_may_write_to_gradients() -> None:
    training = trained(dgc(1.0, warmup_steps=0, every=3), WritesGradients, 1, momentum=0.0)
    shared, along = training.shared(), torch.cat([each.flatten() for each in drawn(1)])
    training.train(*drawn(1))
    torch.testing.assert_close(training.shared(), shared - 0.1)
    torch.testing.assert_close(training.own(), shared - 0.1 - 0.1 * along)


@pytest.mark.usefixtures("wire")
def test_what_was_not_finite_is_in_checkpoints_and_refused_at_the_end_of_training() -> None:
    training = trained(dgc(0.3, every=3), SGD, 1, momentum=0.9)
    weight, bias = drawn(1)
    weight[0, 0] = math.inf
    training.train(weight, bias)
    resumed = Training(dgc(0.3, every=3), SGD, momentum=0.9)
    resumed.load(training.saved())
    for each in (training, resumed):
        with pytest.raises(NonFiniteGradientError, match="for parameter 'weight'"):
            each.engine.settle()


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("steps", [4, 5])
def test_the_papers_form_does_not_use_what_waits_in_the_end(steps: int) -> None:
    training = trained(dgc(0.3, every=3, follow_rate=False), SGD, steps, momentum=0.9)
    shared = training.shared()
    training.engine.settle()
    assert torch.equal(training.own(), shared)


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("ahead", [False, True])
def test_weights_that_are_frozen_between_two_exchanges_stay(ahead: bool) -> None:
    training = trained(dgc(0.3, every=4, residual_in_weights=ahead), SGD, 2, momentum=0.9, weight_decay=0.5)
    training.module.bias.requires_grad_(False)
    shared = training.shared()
    for step in (2, 3):
        training.train(drawn(step)[0], None)
    assert torch.equal(training.shared()[20:], shared[20:])
    assert not torch.equal(training.shared()[:20], shared[:20])


@pytest.mark.usefixtures("wire")
def test_weights_that_are_frozen_are_no_longer_ahead_after_the_next_exchange() -> None:
    training = trained(dgc(0.3, residual_in_weights=True), SGD, 2, momentum=0.9)
    training.module.weight.requires_grad_(False)
    shared = training.shared()
    assert not torch.equal(training.own()[:20], shared[:20])
    training.train(None, drawn(2)[1])
    assert torch.equal(training.own()[:20], shared[:20])


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("method", [dgc(0.3, delay=1), federated_averaging(every=4), dgc(0.3, every=2)], ids=repr)
@pytest.mark.parametrize("ahead", [False, True])
def test_another_method_goes_on_from_the_shared_weights(method: Method, ahead: bool) -> None:
    before = trained(dgc(0.3, every=3, residual_in_weights=ahead), SGD, 5, momentum=0.9)
    assert not torch.equal(before.own(), before.shared())
    after = Training(method, SGD, momentum=0.9)
    after.load(before.saved(), strict=False)
    if repr(method).startswith("dgc(density=0.3, every"):
        assert torch.equal(after.own(), before.own())
    else:
        assert torch.equal(after.own(), before.shared())


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("options", [{"every": 2}, {"delay": 1}, {"residual_in_weights": True}])
def test_two_optimizers_of_one_parameter_are_refused(options: dict[str, int]) -> None:
    training = Training(dgc(0.3, **options), SGD)
    other = SGD(training.module.parameters(), 0.1)
    training.engine.register(training.optimizer)
    training.engine.register(other)
    training.train(*drawn(0))
    training.module.weight.grad, training.module.bias.grad = drawn(1)
    with pytest.raises(ValueError, match="parameter 'weight' belongs to two optimizers"):
        training.engine.synchronize(other)


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("options", [{"every": 3}, {"delay": 1}])
@pytest.mark.parametrize("by_value", [False, True])
def test_what_is_not_clipped_before_a_rank_steps_along_it_is_refused(options: dict[str, int], by_value: bool) -> None:
    channel = Channel(Gather(SparseCodec(TopK(1.0))), [ErrorFeedback()])
    training = Training(Method([GradientSync(channel, **options)]), SGD)
    with pytest.raises(ValueError, match=r"Put ClipLocalNorm\(\) before its other memories"):
        training.engine.clip(training.optimizer, 1.0, by_value)


CHANNEL = Channel(Gather(SparseCodec(TopK(0.1))), [ErrorFeedback()])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: dgc(every=0), "every must be a whole number of optimizer steps, at least 1; got 0. Use 1 or more."),
        (
            lambda: dgc(every=2, delay=1),
            "every must be 1 with delay=1, whose exchange takes a step; got 2. Use delay=0.",
        ),
        (lambda: local_adam(every=1.5), "every must be a whole number of optimizer steps, at least 1; got 1.5."),
        (lambda: default(residual_in_weights=True), "where the run's length chooses `every`, and this with it; got"),
        (lambda: default(every=0), "every must be a whole number, at least 1: optimizer steps between two exchanges"),
        (
            lambda: GradientSync(CHANNEL, every=2, local="sum"),
            "every must be left out with sparse gradients, a local mode",
        ),
        (lambda: GradientSync(CHANNEL, every=2, mask_momentum=True), "every must be left out with sparse gradients"),
        (
            lambda: GradientSync(CHANNEL, residual_in_weights=True, mask_momentum=True),
            "residual_in_weights must be left out with sparse gradients",
        ),
        (
            lambda: dgc(delay=1, residual_in_weights=True),
            "residual_in_weights must be False with delay=1, and where a residual does not follow the learning rate",
        ),
        (lambda: dgc(follow_rate=False, residual_in_weights=True), "Use delay=0 and follow_rate=True."),
        (
            lambda: GradientSync(Channel(DenseAllReduce()), residual_in_weights=True),
            "residual_in_weights=True needs a channel with ErrorFeedback",
        ),
        (lambda: GradientSync(Channel(DenseAllReduce()), every=2), "every=2 needs a channel with ErrorFeedback"),
        (
            lambda: GradientSync(Channel(DenseAllReduce(), [Momentum(), ErrorFeedback()]), every=2),
            "momentum before the exchange, which tell what a rank's own gradient would do; got",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make()


def test_optimizers_that_do_not_step_along_what_is_shared_are_refused() -> None:
    sync = GradientSync(CHANNEL, every=2)
    weights = [torch.zeros(2, 2, requires_grad=True)]
    for optimizer in (SGD(weights, 0.1, momentum=0.9), RMSprop(weights), Adam(weights)):
        objection = sync.objection(optimizer)
        assert objection is not None
        assert "with every=2, a step must be the learning rate times what is shared" in objection
        assert objection.endswith("or leave every out.")
    assert sync.objection(SGD(weights, 0.1)) is None


def test_its_repr_tells_the_steps() -> None:
    sync = GradientSync(Channel(DenseAllReduce(), [MomentumCorrection(), ErrorFeedback()]), every=2)
    assert repr(sync).endswith(", every=2)")
    assert sync.drifts
    assert "every" not in repr(sync.at(0))
    assert not sync.at(0).drifts
    assert repr(sync.at(0, 1, True)).endswith(", residual_in_weights=True)")
    assert sync.at(0, 1, True).drifts
    assert repr(dgc(0.1, every=2)) == "dgc(density=0.1, every=2)"
    assert repr(gradient_dropping(0.1)) == "gradient_dropping(density=0.1)"


@pytest.mark.usefixtures("wire")
def test_a_run_that_goes_on_without_local_steps_has_nothing_to_say_of_the_last_exchange() -> None:
    training = trained(dgc(0.3, every=4), SGD, 1, momentum=0.9)
    resumed = Training(dgc(0.3), SGD, momentum=0.9)
    resumed.engine.register(resumed.optimizer)
    state, _, _ = training.saved()
    dropped = resumed.engine.state.load_state_dict(state, as_many_ranks=True)
    assert not any("last exchange" in words for words in dropped)
