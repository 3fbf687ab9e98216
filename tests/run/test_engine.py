"""Whose gradients are shared, and when: in one process, with an exchange that counts its rounds."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_sparsecomm.basis.layout import Vector
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.channel import Channel, Contribution, ErrorFeedback
from lightning_sparsecomm.codecs import SparseCodec, TopK
from lightning_sparsecomm.codecs.selectors.candidates import Hints
from lightning_sparsecomm.exchange import DenseAllReduce, Exchanged, Gather
from lightning_sparsecomm.methods import gradient_dropping
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import GradientSync, Method
from tests.distributed.launch import run_ranks
from tests.run.training import Halving, backward, chain, equal, gradients, ready


def test_gradients_are_shared_once_per_step(engine: Engine) -> None:
    module, optimizer, shared = ready(engine)
    for _ in range(3):
        engine.synchronize(optimizer)
        assert equal(gradients(module), shared)
    with engine.stepping(optimizer):
        engine.synchronize(optimizer)
        optimizer.step()
    assert equal(gradients(module), shared)
    # After the step they count as used: whoever asks again has new ones.
    optimizer.zero_grad()
    backward(engine, module)
    engine.synchronize(optimizer)
    assert Halving.rounds == [(["0.weight", "1.weight"], 0), (["0.weight", "1.weight"], 1)]
    assert engine.wire.ledger.steps == 2


def test_a_failed_step_leaves_nothing_shared(engine: Engine) -> None:
    _, optimizer, _ = ready(engine)
    with pytest.raises(KeyError), engine.stepping(optimizer):  # noqa: PT012
        engine.synchronize(optimizer)
        raise KeyError
    with pytest.raises(RuntimeError, match="past the strategy"):
        optimizer.step()
    engine.synchronize(optimizer)
    assert len(Halving.rounds) == 2


def test_closure_that_computes_gradients_shares_them_each_time(engine: Engine) -> None:
    module, optimizer, _ = ready(engine)

    def closure() -> str:
        optimizer.zero_grad()
        backward(engine, module)
        return "loss"

    shared_closure = engine.closure(optimizer, closure)
    with engine.stepping(optimizer):
        for evaluations in (1, 2, 3):
            assert shared_closure() == "loss"
            assert len(Halving.rounds) == evaluations


def test_closure_that_computes_none_keeps_what_clipping_shared(engine: Engine) -> None:
    module, optimizer, shared = ready(engine)
    engine.synchronize(optimizer)
    torch.nn.utils.clip_grad_value_(module.parameters(), 1e-3)
    clipped = gradients(module)
    assert not equal(clipped, shared)
    with engine.stepping(optimizer):
        engine.closure(optimizer, lambda: None)()
        assert equal(gradients(module), clipped)
        optimizer.step()
    assert len(Halving.rounds) == 1


def test_overlapping_exchanges_start_first_and_end_last(wire: Wire) -> None:
    events: list[str] = []

    def note(event: str, context: Round) -> None:
        events.append(f"{event} {context.layout.segments[0].name}")

    class Noted(DenseAllReduce):
        def prepare(self, x: Vector, context: Round, wire: Wire) -> None:
            note("start", context)
            super().prepare(x, context, wire)
            started = self._started
            assert started is not None

            def noted() -> None:
                note("end", context)
                started.wait()

            self._started = started._replace(wait=noted)

    class TakesIn(ErrorFeedback):
        def prepare(self, contribution: Contribution, context: Round) -> Contribution:
            note("take in", context)
            return super().prepare(contribution, context)

    class Selects(TopK):
        def select_hinted(self, x: Tensor, context: Round, hints: Hints) -> Tensor:
            note("select", context)
            return super().select_hinted(x, context, hints)

    sparse = GradientSync(Channel(Gather(SparseCodec(Selects(0.5))), [TakesIn()]), parameters=["0.*"])
    engine = Engine(Method([sparse, GradientSync(Channel(Noted()), rest=True)]), wire)
    module, optimizer, _ = ready(engine)
    own = gradients(module)
    engine.synchronize(optimizer)
    assert events == ["start 1.weight", "take in 0.weight", "select 0.weight", "end 1.weight"]
    assert torch.equal(gradients(module)[1], own[1])
    assert engine.wire.ledger.exchange_seconds > 0
    engine.close()


def test_a_subclass_that_overrides_a_dense_exchange_is_heard(wire: Wire) -> None:
    class Halves(DenseAllReduce):
        def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
            return super().exchange(x._replace(values=x.values / 2), context, wire)

    engine = Engine(Method([GradientSync(Channel(Halves()))]), wire)
    module, optimizer, halved = ready(engine)
    engine.synchronize(optimizer)
    assert equal(gradients(module), halved)
    assert sum(traffic.calls for traffic in wire.ledger.rows["gradients"].values()) == 1
    engine.close()


def test_the_residual_survives_growth(wire: Wire) -> None:
    class NothingSent(DenseAllReduce):
        def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
            exchanged = super().exchange(x, context, wire)
            return exchanged._replace(sent=torch.zeros_like(x.values))

    engine = Engine(Method([GradientSync(Channel(NothingSent(), [ErrorFeedback(follow_rate=False)]))]), wire)
    module = chain()
    module[0].requires_grad_(False)
    engine.registry.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    total = 0.0
    for step in range(4):
        if step == 2:
            module[0].requires_grad_(True)
        optimizer.zero_grad()
        backward(engine, module)
        if step < 2:
            total = total + gradients_of(module[1])
            expected = total.norm()
        else:
            total = total + gradients_of(module[1])
            first = gradients_of(module[0]) * (step - 1)
            expected = torch.cat([total.flatten(), first.flatten()]).norm()
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            optimizer.step()
        assert engine.residual_norm() == pytest.approx(float(expected), rel=1e-6)
    engine.close()


def gradients_of(module: nn.Module) -> Tensor:
    assert module.weight.grad is not None
    return module.weight.grad.clone()


def test_two_optimizers_share_their_own_parameters_only(engine: Engine) -> None:
    module = chain()
    engine.registry.add_module(module)
    first = torch.optim.SGD(module[0].parameters(), lr=0.1)
    second = torch.optim.SGD(module[1].parameters(), lr=0.1)
    for optimizer in (first, second):
        engine.register(optimizer)
    backward(engine, module)
    others = gradients(module[1])
    engine.synchronize(first)
    assert equal(gradients(module[1]), others)
    engine.synchronize(second)
    engine.synchronize(second)
    assert Halving.rounds == [(["0.weight"], 0), (["1.weight"], 0)]


def test_a_parameter_of_two_optimizers_is_shared_with_each(engine: Engine) -> None:
    """A tied weight that two optimizers step: each step shares what its own backward pass gave, once."""
    module = chain()
    engine.registry.add_module(module)
    both = torch.optim.SGD(module.parameters(), lr=0.1)
    one = torch.optim.SGD(module[1].parameters(), lr=0.1)
    # As front ends do at set-up: one that comes when the other has made steps takes its place.
    for optimizer in (both, one):
        engine.register(optimizer)
    for optimizer in (both, one):
        optimizer.zero_grad()
        backward(engine, module)
        before = gradients(module)
        with engine.stepping(optimizer):
            engine.closure(optimizer, lambda: None)()
            assert torch.equal(gradients(module)[1], before[1] / 2)
            optimizer.step()
    assert Halving.rounds == [(["0.weight", "1.weight"], 0), (["1.weight"], 0)]


def _two_optimizers_of_one_parameter(rank: int) -> list[list[float]]:
    module = nn.Linear(1, 3, bias=False)
    engine = Engine(gradient_dropping(1.0), Wire())
    engine.registry.add_module(module)
    module.weight.grad = torch.tensor([[1.0], [2.0], [3.0]]) * (rank + 1)
    found = []
    for optimizer in (torch.optim.SGD(module.parameters(), lr=0.0), torch.optim.Adam(module.parameters(), lr=0.0)):
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            optimizer.step()
        found.append(gradients_of(module).flatten().tolist())
    engine.close()
    return found


def test_two_optimizers_can_step_on_one_backward_pass(tmp_path: Path) -> None:
    """As under ddp both find the mean: that of gradients which are equal already is the same again."""
    for found in run_ranks(tmp_path, 2, _two_optimizers_of_one_parameter):
        assert found == [[1.5, 3.0, 4.5]] * 2


def test_the_method_can_serve_again(wire: Wire) -> None:
    method = gradient_dropping(0.25)
    norms = []
    for _ in range(2):
        torch.manual_seed(0)
        engine = Engine(method, wire)
        _, optimizer, _ = ready(engine)
        assert engine.residual_norm() == 0
        engine.synchronize(optimizer)
        norms.append(engine.residual_norm())
        engine.close()
    assert norms[0] == norms[1] > 0


def test_a_step_is_in_progress_from_its_exchange_to_its_end(engine: Engine) -> None:
    module, optimizer, _ = ready(engine)
    assert not engine.guards.in_step
    engine.synchronize(optimizer)
    assert engine.guards.in_step
    # What was exchanged is saved, unless it has been changed since.
    state = engine.state.state_dict()
    assert not state["torn"]
    assert state["streams"][0]["shared"] is not None
    next(p.grad for p in module.parameters()).mul_(2)
    state = engine.state.state_dict()
    assert state["torn"]
    assert state["streams"][0]["shared"] is None
    with engine.stepping(optimizer):
        assert engine.guards.in_step
        optimizer.step()
    assert not engine.guards.in_step
    assert not engine.state.state_dict()["torn"]
    backward(engine, module)
    engine.synchronize(optimizer)
    with pytest.raises(ZeroDivisionError), engine.stepping(optimizer):
        1 / 0  # noqa: B018
    assert not engine.guards.in_step
    assert engine.state.state_dict()["torn"]
    optimizer.zero_grad()
    backward(engine, module)
    with engine.stepping(optimizer):
        engine.synchronize(optimizer)
        optimizer.step()
    assert not engine.state.state_dict()["torn"]
