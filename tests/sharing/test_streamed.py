"""Exchanges of weight changes in flight; here of one rank."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_sparsecomm.basis import Round, Stages, Vector, Wire
from lightning_sparsecomm.channel import Channel, ErrorFeedback
from lightning_sparsecomm.channel.saved import Saved
from lightning_sparsecomm.codecs import PayloadError, SparseCodec, TopK
from lightning_sparsecomm.exchange import DenseAllReduce, Exchanged, Gather
from lightning_sparsecomm.sharing import DeltaSync, Turn
from lightning_sparsecomm.sharing.streamed import Mix, StreamedShare
from tests.distributed.launch import run_ranks

DENSE = Channel(DenseAllReduce())
SPARSE = Channel(Gather(SparseCodec(TopK(0.5))), [ErrorFeedback()])


class Held(Gather):
    """An exchange that takes place when the test lets it, and then may fail."""

    def __init__(self) -> None:
        super().__init__(SparseCodec(TopK(0.5)))
        self.may_go, self.error = threading.Event(), None

    def __deepcopy__(self, memo: object) -> "Held":
        return self

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        assert self.may_go.wait(60)
        if self.error is not None:
            raise self.error
        return super().exchange(x, context, wire)


class Run:
    """A linear layer, whose optimizer adds 1, 2, 3, ... to its weights."""

    def __init__(self, wire: Wire, channel: Channel = DENSE, steps: int = 0, **options: Any) -> None:
        torch.manual_seed(0)
        self.module = nn.Linear(3, 1)
        self.named = list(self.module.named_parameters())
        options = {"every": 4, "delay": 2} | options
        self.optimizer = SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        share = DeltaSync(channel, **options).start(self.optimizer, self.named, wire)
        assert isinstance(share, StreamedShare)
        self.share, self.made = share, 0
        self.step(steps)

    @property
    def weights(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for _, parameter in self.named])

    @property
    def anchor(self) -> Tensor:
        return torch.cat([self.share.anchors[name].detach().flatten() for name, _ in self.named])

    def train(self, by: float = 1.0) -> None:
        """A step of the optimizer, without a turn."""
        self.share.before_step()
        with torch.no_grad():
            start = 1
            for _, parameter in self.named:
                change = by * torch.arange(start, start + parameter.numel()).view(parameter.shape)
                parameter.add_(change)
                start += parameter.numel()
        self.share.after_step()

    def step(self, count: int = 1, by: float = 1.0) -> None:
        for _ in range(count):
            self.train(by)
            self.turn("weights")
            self.made += 1

    def turn(self, moment: Any) -> None:
        turn = Turn(moment, self.made)
        if self.share.due(turn):
            self.share.prepare(turn)
            self.share.exchange()
            self.share.commit()


COUNT = torch.arange(1.0, 5.0)


def test_training_goes_on_while_an_exchange_is_in_flight(wire: Wire) -> None:
    exchange = Held()
    run = Run(wire, Channel(exchange, [ErrorFeedback()]))
    start = run.weights
    run.step(5)
    # It has started after the fourth step, and nobody has waited.
    torch.testing.assert_close(run.weights, start + 5 * COUNT)
    assert torch.equal(run.anchor, start)
    assert wire.ledger.exchange_seconds < 60
    exchange.may_go.set()
    run.step()
    # Half of the elements were sent: the two largest. What was trained since is kept on top of the anchor.
    sent = 4 * torch.tensor([0.0, 0.0, 3.0, 4.0])
    torch.testing.assert_close(run.anchor, start + sent)
    torch.testing.assert_close(run.weights, start + sent + 2 * COUNT)
    assert run.share.residual_norm() == pytest.approx(4 * 5**0.5)


@pytest.mark.parametrize(("mix", "kept"), [("keep", None), (0, 0.0), (0.5, 0.5), (0.25, 0.25)])
def test_how_local_weights_are_mixed(wire: Wire, mix: Mix, kept: float | None) -> None:
    run = Run(wire, mix=mix)
    start = run.weights
    run.step(6)
    anchor, local = start + 4 * COUNT, start + 6 * COUNT
    torch.testing.assert_close(run.anchor, anchor)
    expected = local if kept is None else kept * local + (1 - kept) * anchor
    torch.testing.assert_close(run.weights, expected)


def test_a_late_exchange_of_one_rank_that_keeps_everything_changes_nothing(wire: Wire) -> None:
    run = Run(wire)
    start = run.weights
    run.step(23)
    torch.testing.assert_close(run.weights, start + 23 * COUNT)
    run.turn("end")
    torch.testing.assert_close(run.anchor, start + 23 * COUNT)
    assert torch.equal(run.weights, run.anchor)
    assert run.share.shared_weights() == []
    # Nothing is left for another turn.
    assert not run.share.due(Turn("end", 23))


@pytest.mark.parametrize("steps", [4, 5, 6, 7, 8])
def test_what_is_sent_and_what_is_held_is_all_that_has_changed(wire: Wire, steps: int) -> None:
    run = Run(wire, SPARSE)
    start = run.weights
    run.step(steps)
    run.turn("end")
    held = torch.cat([part.flatten() for part in run.share.state_dict()["DeltaSync.ErrorFeedback"].values()])
    # Without a step since the start, a second exchange sends the other half.
    assert (held.norm() > 0) == (steps % 4 != 0)
    torch.testing.assert_close(run.anchor + held, start + steps * COUNT)


@pytest.mark.parametrize("moment", ["at the end", "when it lands", "a save before it lands"])
def test_an_exchange_that_fails_in_flight_leaves_the_last_good_model(wire: Wire, moment: str) -> None:
    exchange = Held()
    exchange.may_go.set()
    run = Run(wire, Channel(exchange, [ErrorFeedback()]), steps=6)
    good = run.anchor
    residual = run.share.residual_norm()
    exchange.error = PayloadError("altered")
    run.step(3)
    if moment == "a save before it lands":
        # It is written: its error may be that of a rank that was lost.
        for _ in range(2):
            assert "DeltaSync.in flight, mean" not in run.share.state_dict()
    if moment != "at the end":
        with pytest.raises(PayloadError, match="altered"):
            run.step()
    else:
        with pytest.raises(PayloadError, match="altered"):
            run.turn("end")
    run.share.abort()
    assert torch.equal(run.weights, good) and torch.equal(run.anchor, good)
    assert run.share.residual_norm() == pytest.approx(residual)
    assert run.share.shared_weights() == []
    # Training may go on.
    exchange.error = None
    run.step(12)
    assert not torch.equal(run.anchor, good)


@pytest.mark.parametrize("mix", ["keep", 0.5])
@pytest.mark.parametrize("steps", range(8, 13))
@pytest.mark.parametrize("outer", [None, partial(SGD, lr=0.5, momentum=0.9)])
def test_a_run_resumes_with_an_exchange_in_flight(wire: Wire, outer: Any, steps: int, mix: Mix) -> None:
    run = Run(wire, SPARSE, steps, outer=outer, mix=mix, mask_momentum=True)
    state: Saved = {kind: dict(parts) for kind, parts in run.share.state_dict().items()}
    in_flight = "DeltaSync.in flight, mean" in state
    assert in_flight == (steps in (8, 9, 12))
    state = {kind: {n: v.clone() if isinstance(v, Tensor) else v for n, v in p.items()} for kind, p in state.items()}
    resumed = Run(wire, SPARSE, outer=outer, mix=mix, mask_momentum=True)
    resumed.module.load_state_dict(run.module.state_dict())
    resumed.share.load_state_dict(state)
    assert not any(state.values())
    resumed.made = run.made
    for _ in range(9):
        run.step(by=0.3)
        resumed.step(by=0.3)
        assert torch.equal(run.weights, resumed.weights) and torch.equal(run.anchor, resumed.anchor)
    run.turn("end")
    resumed.turn("end")
    assert torch.equal(run.weights, resumed.weights)


def test_where_every_is_short_an_exchange_arrives_before_the_next_one_starts(wire: Wire) -> None:
    """Every step at first, which must wait for it; then every 2 steps, one step late; then every 6, three late."""
    run = Run(wire, every=Stages([1, 2, 6], steps=[0, 3, 7]), delay=3)
    start, apart = run.weights, []
    for made in range(19):
        run.step()
        apart.append(round(float((run.weights - run.anchor)[0])))
        torch.testing.assert_close(run.weights, start + (made + 1) * COUNT)
    # How many steps weights are ahead of the anchors: after steps 0 to 2, 3 to 6, and later.
    assert apart == [0, 0, 0, 1, 2, 1, 2, 1, 2, 3, 4, 5, 6, 7, 8, 3, 4, 5, 6]


def test_an_exchange_arrives_sooner_where_the_next_one_is_due_sooner(wire: Wire) -> None:
    run = Run(wire, every=Stages([12, 3], steps=[0, 13]), delay=9)
    run.step(13)
    torch.testing.assert_close(run.anchor, run.weights - 13 * COUNT)
    run.step(2)
    # It started after step 12, and would have arrived after step 21; but three steps later, another one is due.
    torch.testing.assert_close(run.anchor, run.weights - 3 * COUNT)


def test_a_run_with_a_delay_goes_on_where_one_without_stopped(wire: Wire) -> None:
    """Amid a round: weights that are set then are found, and what was trained is exchanged if training ends there."""
    run = Run(wire, SPARSE, 10)
    share = DeltaSync(SPARSE, every=4).start(SGD(run.module.parameters(), lr=0.1), run.named, wire)
    share.load_state_dict({kind: dict(parts) for kind, parts in run.share.state_dict().items() if "apart" not in kind})
    saved = {kind: dict(parts) for kind, parts in share.state_dict().items()}
    resumed = Run(wire, SPARSE)
    resumed.module.load_state_dict(run.module.state_dict())
    resumed.share.load_state_dict(saved)
    assert resumed.share.due(Turn("end", 10))
    assert len(resumed.share.shared_weights()) == 2


def test_an_exchange_in_flight_needs_the_mix_that_it_had(wire: Wire) -> None:
    flying = Run(wire, SPARSE, 8, mix=0.5).share.state_dict()
    with pytest.raises(ValueError, match=r"mix must be a number .*; got 'keep'\. Resume with the mix that it had"):
        Run(wire, SPARSE).share.load_state_dict({kind: dict(parts) for kind, parts in flying.items()})
    Run(wire, SPARSE, mix=0.2).share.load_state_dict({kind: dict(parts) for kind, parts in flying.items()})


def test_only_a_run_with_a_delay_resumes_with_an_exchange_in_flight(wire: Wire) -> None:
    """Without one, what was sent would be sent again: it is in no residual any more, and not in the anchor yet."""
    flying, landed = Run(wire, SPARSE, 8), Run(wire, SPARSE, 10)
    share = DeltaSync(SPARSE, every=4).start(SGD(landed.module.parameters(), lr=0.1), landed.named, wire)
    with pytest.raises(ValueError, match=r"delay must be at least 1 .*; got delay=0\. Resume with the delay"):
        share.load_state_dict(flying.share.state_dict())
    share.load_state_dict(landed.share.state_dict())


def test_measuring_the_model_in_flight_sees_the_anchor(wire: Wire) -> None:
    run = Run(wire, steps=5)
    pairs = run.share.shared_weights()
    assert torch.equal(torch.cat([anchor.flatten() for _, anchor in pairs]), run.anchor)
    assert not torch.equal(run.weights, run.anchor)


@pytest.mark.parametrize("when", [3, 5, 7])
def test_weights_that_the_user_sets_arrive_whole(wire: Wire, when: int) -> None:
    """Before the start, in flight, or after it: they are no change of training, which a sparse exchange would halve."""
    run = Run(wire, SPARSE)
    run.step(when)
    with torch.no_grad():
        run.module.bias.fill_(100.0)
    with pytest.warns(UserWarning, match="other code than the optimizer has changed 1 parameter"):
        run.step(13 - when)
    run.turn("end")
    # And what was trained before it was set does not come on top of it; what was trained since is not all sent.
    assert 100.0 <= run.module.bias.item() <= 100.0 + 4 * (13 - when)


@pytest.mark.filterwarnings("ignore:other code than the optimizer")
@pytest.mark.parametrize("mix", ["keep", 0.5])
@pytest.mark.parametrize("more", [0, 2])
def test_weights_that_are_set_in_flight_stay_what_they_were_set_to(wire: Wire, mix: Mix, more: int) -> None:
    """Whether or not a step follows, and though the outer optimizer moves the anchors away from the weights."""
    run = Run(wire, SPARSE, 5, mix=mix, outer=partial(SGD, lr=0.5))
    with torch.no_grad():
        run.module.weight.fill_(10.0)
    run.step(more, by=0.0)
    run.turn("end")
    assert run.module.weight.tolist() == [[10.0] * 3]


def _clamped(rank: int, when: int, delay: int) -> float:
    """Ranks train differently, and all clamp a weight after a step, which leaves it different."""
    run = Run(Wire(), every=4, delay=delay)
    for made in range(12):
        run.step(by=rank + 1)
        if made + 1 == when:
            with torch.no_grad():
                run.module.weight.clamp_(-1e4, 2.0 * when)
    run.turn("end")
    return run.weights.sum().item()


@pytest.mark.filterwarnings("ignore:other code than the optimizer")
@pytest.mark.parametrize("when", [4, 8])
def test_ranks_may_set_weights_that_differ_while_an_exchange_is_in_flight(tmp_path: Path, when: int) -> None:
    first, second = run_ranks(tmp_path, 2, _clamped, when, 2)
    assert first == second


def test_parameters_may_be_added_in_flight(wire: Wire) -> None:
    run = Run(wire, SPARSE)
    run.share.extend(run.named[1:])
    run.named = run.named[1:]
    run.step(5)
    run.named = list(run.module.named_parameters())
    run.share.extend(run.named)
    start = run.module.weight.detach().clone()
    run.step(20)
    run.turn("end")
    assert run.share.anchors.keys() == {"weight", "bias"}
    assert not torch.equal(run.module.weight, start)


def test_an_error_that_joining_parameters_meet_is_raised_where_the_exchange_lands(wire: Wire) -> None:
    """Not before: ranks of a node that exchange other parts meet none, and all must go on together."""
    exchange = Held()
    exchange.may_go.set()
    run = Run(wire, Channel(exchange, [ErrorFeedback()]))
    run.share.extend(run.named[1:])
    run.named = run.named[1:]
    run.step(3)
    exchange.error = PayloadError("altered")
    run.step(1)
    run.named = list(run.module.named_parameters())
    run.share.extend(run.named)
    exchange.error = None
    with pytest.raises(PayloadError, match="altered"):
        run.step(2)
    run.share.abort()
    run.step(20)
    run.turn("end")
    assert run.share.shared_weights() == []


def test_a_checkpoint_after_an_error_in_flight_says_when_the_exchange_would_have_landed(wire: Wire) -> None:
    """Other ranks of a node have saved what arrived, and land it: this rank takes part, with nothing."""
    exchange = Held()
    exchange.may_go.set()
    run = Run(wire, Channel(exchange, [ErrorFeedback()]), steps=3)
    exchange.error = PayloadError("altered")
    run.step(1)
    state = run.share.state_dict()
    resumed = Run(wire, Channel(Held(), [ErrorFeedback()]))
    resumed.module.load_state_dict(run.module.state_dict())
    resumed.share.load_state_dict({kind: dict(parts) for kind, parts in state.items()})
    landing = Turn("weights", step=resumed.share._arrives)
    assert resumed.share.due(landing)
    before = resumed.weights
    resumed.share.prepare(landing)
    resumed.share.exchange()
    resumed.share.commit()
    assert torch.equal(resumed.weights, before)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"delay": -1}, "delay must be a whole number, 0 or more: .* got -1. Use 0 to wait"),
        ({"delay": 1.5}, "delay must be a whole number, 0 or more: .* got 1.5. Use 0 to wait"),
        ({"delay": 4, "every": 4}, "delay must be below every, 4 steps.* got 4. Use a larger every, or delay=3"),
        ({"delay": 4, "every": Stages([1, 4], steps=[0, 9])}, "delay must be below every, 4 steps.* Use a larger"),
        ({"mix": 1}, "mix must be 'keep', or a share of the local weights from 0 to below 1; got 1"),
        ({"mix": "drop"}, "mix must be 'keep', .* got 'drop'"),
    ],
)
def test_refuses(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DeltaSync(DENSE, **options)


def test_without_delay_nothing_is_new(wire: Wire) -> None:
    module = nn.Linear(3, 1)
    share = DeltaSync(DENSE, every=4).start(SGD(module.parameters(), lr=0.1), list(module.named_parameters()), wire)
    assert not isinstance(share, StreamedShare)
    assert "delay" not in repr(DeltaSync(DENSE))
    assert repr(DeltaSync(DENSE, every=4, delay=2, mix=0.5)).endswith("every=4, delay=2, mix=0.5)")
