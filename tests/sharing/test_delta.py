"""Changes of weights, exchanged every few steps; here of one rank."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from lightning_sparsecomm.basis import UPDATES, DensityWarmup, Layout, Round, Stages, Vector, Wire
from lightning_sparsecomm.channel import Channel, ClipLocalNorm, ErrorFeedback, LocalAdam, Momentum, MomentumCorrection
from lightning_sparsecomm.codecs import SparseCodec, TopK
from lightning_sparsecomm.exchange import DenseAllReduce, Exchanged, Gather, NonFiniteGradientError
from lightning_sparsecomm.sharing import DeltaSync, Turn
from lightning_sparsecomm.sharing.delta_share import DeltaShare


def started(
    sync: DeltaSync, wire: Wire, module: nn.Module | None = None, **options: Any
) -> tuple[nn.Module, DeltaShare]:
    module = nn.Linear(3, 2) if module is None else module
    return module, sync.start(SGD(module.parameters(), lr=0.1, **options), list(module.named_parameters()), wire)


def step(module: nn.Module, share: DeltaShare, by: float = 1.0) -> None:
    """An optimizer step that adds `by` to each weight."""
    share.before_step()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(by)
    share.after_step()


def turn(share: DeltaShare, step: int = 0, moment: Any = "weights") -> None:
    share.prepare(Turn(moment, step))
    share.exchange()
    share.commit()


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().float() for parameter in module.parameters()])


class Halving(DenseAllReduce):
    """The mean with a rank whose weights stayed as they were."""

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        exchanged = super().exchange(x, context, wire)
        return exchanged._replace(shared=exchanged.shared / 2)


def test_weights_become_the_anchor_moved_by_the_mean_change(wire: Wire) -> None:
    module, share = started(DeltaSync(Channel(Halving()), every=2), wire)
    start = weights(module)
    for _ in range(2):
        step(module, share)
    assert torch.equal(weights(module), start + 1 + 1)
    turn(share)
    torch.testing.assert_close(weights(module), start + 1)
    assert share.steps == 0
    assert share.shared_weights() == []
    step(module, share)
    shared = share.shared_weights()
    assert all(torch.equal(weight, anchor + 1) for weight, anchor in shared)
    assert wire.ledger.handed_bytes(UPDATES) == 4 * (8 + 2)
    assert wire.ledger.ddp_bytes == 3 * 4 * 8


def test_it_is_due_every_few_steps_and_in_the_end(wire: Wire) -> None:
    module, share = started(DeltaSync(Channel(DenseAllReduce()), every=Stages([1, 3], steps=[0, 4])), wire)
    due = []
    for number in range(10):
        step(module, share)
        due.append(share.due(Turn("weights", number)))
        if due[-1]:
            turn(share, number)
    assert due == [True] * 4 + [False, False, True] * 2
    assert not share.due(Turn("gradients", 9))
    assert not share.due(Turn("end", 9))
    step(module, share)
    assert share.due(Turn("end", 10))


def test_abort_goes_back_to_the_anchor(wire: Wire) -> None:
    module, share = started(DeltaSync(Channel(DenseAllReduce(), [ErrorFeedback()])), wire)
    share.abort()
    start = weights(module)
    step(module, share)
    share.prepare(Turn("weights", 0))
    share.exchange()
    share.abort()
    assert torch.equal(weights(module), start)
    assert share.steps == 0
    assert share.residual_norm() == pytest.approx(0, abs=1e-6)
    share.abort()
    step(module, share)
    turn(share)
    torch.testing.assert_close(weights(module), start + 1)


def test_a_change_that_is_not_finite_is_named_and_lost(wire: Wire) -> None:
    module, share = started(DeltaSync(Channel(Gather(SparseCodec(TopK(0.5))), [ErrorFeedback()])), wire)
    start = weights(module)
    step(module, share, by=float("inf"))
    share.prepare(Turn("weights", 3))
    with pytest.raises(
        NonFiniteGradientError, match="weight update that is not finite, for parameter 'weight' in step 3"
    ):
        share.exchange()
    share.abort()
    assert torch.equal(weights(module), start)


def test_a_change_counts_by_its_weight(wire: Wire) -> None:
    module, share = started(DeltaSync(Channel(Gather(SparseCodec(TopK(0.5))), [ErrorFeedback()])), wire)
    start = weights(module)
    share.weight = 0.25
    step(module, share)
    share.prepare(Turn("weights", 3))
    share.exchange()
    share.take_back()
    torch.testing.assert_close(weights(module), start + 1)
    assert (share.steps, share.residual_norm()) == (1, pytest.approx(0, abs=1e-6))
    turn(share)
    moved = weights(module) - start
    assert moved.count_nonzero() == 4
    torch.testing.assert_close(moved[moved != 0], torch.full((4,), 0.25))
    assert share.residual_norm() == pytest.approx(0.25 * 2)


def test_a_slow_rank_is_due_earlier(wire: Wire) -> None:
    _, share = started(DeltaSync(Channel(DenseAllReduce()), every=10), wire)
    for share.pace, needed in ((1.0, 10), (0.54, 5), (0.01, 1)):
        for share.steps in range(12):
            assert share.due(Turn("weights", share.steps)) == (share.steps >= needed)


def test_what_was_not_sent_is_sent_later(wire: Wire) -> None:
    module, share = started(DeltaSync(Channel(Gather(SparseCodec(TopK(0.5))), [ErrorFeedback()])), wire)
    start = weights(module)
    step(module, share)
    turn(share)
    assert (weights(module) - start).count_nonzero() == 4
    step(module, share, by=0.0)
    turn(share)
    torch.testing.assert_close(weights(module), start + 1)


def test_an_outer_optimizer_moves_the_anchor(wire: Wire) -> None:
    sync = DeltaSync(Channel(DenseAllReduce()), outer=partial(SGD, lr=0.5, momentum=0.9))
    module, share = started(sync, wire)
    start = weights(module)
    for moved in (0.5, 0.5 + 0.5 * 1.9):
        step(module, share)
        turn(share)
        torch.testing.assert_close(weights(module), start + moved)
    assert all(anchor.grad is None for anchor in share.anchors.values())


def test_narrow_weights_have_a_wide_anchor_and_send_no_rounding_error(wire: Wire) -> None:
    module = nn.Linear(3, 2).bfloat16()
    module, share = started(DeltaSync(Channel(DenseAllReduce(), [ErrorFeedback()])), wire, module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1.0)
    step(module, share, by=0.0)
    for anchor in share.anchors.values():
        assert anchor.dtype == torch.float32
        with torch.no_grad():
            anchor.fill_(1.001)
    turn(share)
    # The weights are the anchor as bfloat16 rounds it: nothing has changed.
    assert all((anchor == torch.tensor(1.001)).all() for anchor in share.anchors.values())
    assert (weights(module) == 1.0).all()


def test_the_local_optimizers_momentum_is_masked_where_this_rank_sent(wire: Wire) -> None:
    sync = DeltaSync(Channel(Gather(SparseCodec(TopK(0.5)))), mask_momentum=True)
    module, share = started(sync, wire, momentum=0.9)
    for parameter in module.parameters():
        share.optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    step(module, share)
    turn(share)
    held = torch.cat([share.optimizer.state[p]["momentum_buffer"].flatten() for p in module.parameters()])
    assert held.count_nonzero() == 4


@pytest.mark.parametrize("outer", [None, partial(SGD, lr=0.5, momentum=0.9)])
def test_a_resumed_share_goes_on(wire: Wire, outer: Any) -> None:
    sync = DeltaSync(Channel(Gather(SparseCodec(TopK(0.5))), [ErrorFeedback()]), every=2, outer=outer)
    module, share = started(sync, wire)
    assert share.state_dict() == {}
    for number in range(3):
        step(module, share)
        if share.due(Turn("weights", number)):
            turn(share, number)
    saved = share.state_dict()
    expected = {"ErrorFeedback", "anchor", "steps", "weights as noted"} | ({"outer optimizer"} if outer else set())
    assert saved.keys() == {f"DeltaSync.{kind}" for kind in expected}
    other = nn.Linear(3, 2)
    other.load_state_dict(module.state_dict())
    _, resumed = started(sync, wire, other)
    copied = {kind: dict(parts) for kind, parts in saved.items()}
    resumed.load_state_dict(copied)
    assert not any(copied.values())
    assert resumed.steps == 1
    for each, its_module in ((share, module), (resumed, other)):
        step(its_module, each, by=0.5)
        turn(each, 3)
    assert torch.equal(weights(module), weights(other))
    assert resumed.residual_norm() == share.residual_norm() > 0


def test_it_grows_with_an_anchor_for_each_new_parameter(wire: Wire) -> None:
    module = nn.Linear(3, 2)
    named = list(module.named_parameters())
    sync = DeltaSync(Channel(Halving()), outer=partial(SGD, lr=1.0))
    share = sync.start(SGD(module.parameters(), lr=0.1), named[:1], wire)
    share.before_step()
    share.extend(named)
    assert share.layout == Layout([("weight", (2, 3)), ("bias", (2,))])
    step(module, share)
    start = {name: anchor.detach().clone() for name, anchor in share.anchors.items()}
    turn(share)
    for name, parameter in named:
        torch.testing.assert_close(parameter.detach(), start[name] + 0.5)


def test_an_outer_optimizer_is_tried_on_the_shapes_of_the_anchors() -> None:
    sync = DeltaSync(Channel(DenseAllReduce()), outer=lambda parameters: SGD(parameters[:1], lr=1.0))
    sync.check(list(nn.Linear(3, 2, bias=False).named_parameters()))
    with pytest.raises(ValueError, match="lacks 1 of 2"):
        sync.check(list(nn.Linear(3, 2).named_parameters()))


CHANNEL = Channel(DenseAllReduce())


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: DeltaSync(CHANNEL, every=0),
            ValueError,
            r"every must be a whole number of optimizer steps, at least 1; got 0\.",
        ),
        (
            lambda: DeltaSync(CHANNEL, every=DensityWarmup(0.01, steps=5)),
            ValueError,
            r"every must be a number of optimizer steps, at least 1; .*DensityWarmup\(",
        ),
        (
            lambda: DeltaSync(CHANNEL, buffers="mean"),
            ValueError,
            "buffers must be one of average, own, broadcast; got 'mean'",
        ),  # type: ignore[arg-type]
        (lambda: DeltaSync(CHANNEL, outer=0.7), TypeError, "outer must make an optimizer"),  # type: ignore[arg-type]
        (lambda: DeltaSync(DenseAllReduce()), TypeError, r"channel must be a Channel .*Channel\(DenseAllReduce\(\)\)"),  # type: ignore[arg-type]
        *[
            (
                lambda memory=memory: DeltaSync(Channel(DenseAllReduce(), [memory])),
                ValueError,
                f"channel must be without MomentumCorrection, .* and ClipLocalNorm.*{type(memory).__name__}",
            )
            for memory in (MomentumCorrection(), Momentum(), LocalAdam(), ClipLocalNorm())
        ],
        (lambda: DeltaSync(CHANNEL, mask_momentum="no"), TypeError, "mask_momentum must be True or False; got 'no'"),  # type: ignore[arg-type]
    ],
)
def test_refuses(make: Callable[[], DeltaSync], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.compile(text)):
        make()
