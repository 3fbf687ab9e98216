"""Whose gradients are shared, and when: in one process, with an exchange that counts its rounds."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.codecs import SparseCodec, TopK
from lightning_sparsecomm.compensation import Contribution
from lightning_sparsecomm.exchange import DenseAllReduce, Exchanged, Gather, Outgoing
from lightning_sparsecomm.memory import ErrorFeedback
from lightning_sparsecomm.method import Method
from lightning_sparsecomm.methods import dense, gradient_dropping
from lightning_sparsecomm.rounds import Round
from lightning_sparsecomm.sync import GradientSync
from lightning_sparsecomm.synchronizer import Synchronizer
from lightning_sparsecomm.wire import Wire
from tests.distributed.launch import run_ranks


class Halving(DenseAllReduce):
    """Shares half of what it is given, so that a gradient which is shared twice shows it; notes names and steps."""

    rounds: list[tuple[list[str], int]] = []  # noqa: RUF012

    def run(self, outgoing: Outgoing, round: Round, wire: Wire) -> Exchanged:
        self.rounds.append(([segment.name for segment in round.layout.segments], round.step))
        exchanged = super().run(outgoing, round, wire)
        return exchanged._replace(shared=exchanged.shared / 2, sent=exchanged.sent / 2)


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield Wire()
    dist.destroy_process_group()


@pytest.fixture
def synchronizer(wire: Wire) -> Iterator[Synchronizer]:
    Halving.rounds.clear()
    made = Synchronizer(Method([GradientSync(Channel(Halving()))]), wire)
    yield made
    made.close()


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))


def backward(synchronizer: Synchronizer, module: nn.Module) -> None:
    with synchronizer.backward():
        module(torch.ones(1, 2)).sum().backward()


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in module.parameters()]


def ready(synchronizer: Synchronizer) -> tuple[nn.Sequential, torch.optim.SGD, list[Tensor]]:
    """A module whose gradients are there, not yet shared; the optimizer; the gradients once shared."""
    module = chain()
    synchronizer.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    synchronizer.register(optimizer)
    backward(synchronizer, module)
    return module, optimizer, [gradient / 2 for gradient in gradients(module)]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_gradients_are_shared_once_per_step(synchronizer: Synchronizer) -> None:
    module, optimizer, shared = ready(synchronizer)
    for _ in range(3):
        synchronizer.synchronize(optimizer)
        assert equal(gradients(module), shared)
    with synchronizer.stepping(optimizer):
        synchronizer.synchronize(optimizer)
        optimizer.step()
    assert equal(gradients(module), shared)
    # After the step they count as used: whoever asks again has new ones.
    optimizer.zero_grad()
    backward(synchronizer, module)
    synchronizer.synchronize(optimizer)
    assert Halving.rounds == [(["0.weight", "1.weight"], 0), (["0.weight", "1.weight"], 1)]
    assert synchronizer.wire.ledger.steps == 2


def test_a_failed_step_leaves_nothing_shared(synchronizer: Synchronizer) -> None:
    _, optimizer, _ = ready(synchronizer)
    with pytest.raises(KeyError), synchronizer.stepping(optimizer):  # noqa: PT012
        synchronizer.synchronize(optimizer)
        raise KeyError
    with pytest.raises(RuntimeError, match="past the strategy"):
        optimizer.step()
    synchronizer.synchronize(optimizer)
    assert len(Halving.rounds) == 2


def test_closure_that_computes_gradients_shares_them_each_time(synchronizer: Synchronizer) -> None:
    module, optimizer, _ = ready(synchronizer)

    def closure() -> str:
        optimizer.zero_grad()
        backward(synchronizer, module)
        return "loss"

    shared_closure = synchronizer.closure(optimizer, closure)
    with synchronizer.stepping(optimizer):
        for evaluations in (1, 2, 3):
            assert shared_closure() == "loss"
            assert len(Halving.rounds) == evaluations


def test_closure_that_computes_none_keeps_what_clipping_shared(synchronizer: Synchronizer) -> None:
    module, optimizer, shared = ready(synchronizer)
    synchronizer.synchronize(optimizer)
    torch.nn.utils.clip_grad_value_(module.parameters(), 1e-3)
    clipped = gradients(module)
    assert not equal(clipped, shared)
    with synchronizer.stepping(optimizer):
        synchronizer.closure(optimizer, lambda: None)()
        assert equal(gradients(module), clipped)
        optimizer.step()
    assert len(Halving.rounds) == 1


def test_unfrozen_parameters_join_in_the_modules_order(synchronizer: Synchronizer) -> None:
    module = chain()
    module[0].requires_grad_(False)
    synchronizer.add_module(module)
    # In an order of its own, as add_param_group gives it.
    optimizer = torch.optim.SGD(module[1].parameters(), lr=0.1)
    synchronizer.register(optimizer)
    for step in range(3):
        if step == 1:
            module[0].requires_grad_(True)
            optimizer.add_param_group({"params": module[0].parameters()})
        if step == 2:
            module[0].requires_grad_(False)
        optimizer.zero_grad()
        backward(synchronizer, module)
        with synchronizer.stepping(optimizer):
            synchronizer.synchronize(optimizer)
            optimizer.step()
    # What is frozen again stays in the layout, so that its residual has a place.
    assert Halving.rounds == [(["1.weight"], 0), (["0.weight", "1.weight"], 1), (["0.weight", "1.weight"], 2)]


def test_a_module_that_grows_is_looked_at_again(synchronizer: Synchronizer) -> None:
    module, optimizer, _ = ready(synchronizer)
    module.append(nn.Linear(1, 1, bias=False))
    optimizer.add_param_group({"params": module[2].parameters()})
    optimizer.zero_grad()
    backward(synchronizer, module)
    synchronizer.synchronize(optimizer)
    assert Halving.rounds == [(["0.weight", "1.weight", "2.weight"], 0)]


def test_what_goes_on_by_itself_is_on_the_wire_while_the_rest_is_selected(wire: Wire) -> None:
    events: list[str] = []

    class Noted(DenseAllReduce):
        def begin(self, outgoing: Outgoing, round: Round, wire: Wire) -> Outgoing:
            events.append(f"begin {round.layout.segments[0].name}")
            begun = super().begin(outgoing, round, wire)
            end = begun.begun
            assert end is not None

            def noted() -> Exchanged:
                events.append(f"end {round.layout.segments[0].name}")
                return end()

            return begun._replace(begun=noted)

    class Compensates(ErrorFeedback):
        def compensate(self, contribution: Contribution, round: Round) -> Contribution:
            events.append(f"compensate {round.layout.segments[0].name}")
            return super().compensate(contribution, round)

    class Selects(TopK):
        def select(self, x: torch.Tensor, round: Round, candidates: Sequence[Tensor | None] = ()) -> Tensor:
            events.append(f"select {round.layout.segments[0].name}")
            return super().select(x, round, candidates)

    sparse = GradientSync(Channel(Gather(SparseCodec(Selects(0.5))), [Compensates()]), parameters=["0.*"])
    synchronizer = Synchronizer(Method([sparse, GradientSync(Channel(Noted()), rest=True)]), wire)
    module, optimizer, _ = ready(synchronizer)
    own = gradients(module)
    synchronizer.synchronize(optimizer)
    assert events == ["begin 1.weight", "compensate 0.weight", "select 0.weight", "end 1.weight"]
    assert torch.equal(gradients(module)[1], own[1])
    assert synchronizer.wire.ledger.exchange_seconds > 0
    synchronizer.close()


def test_who_overrides_the_exchange_of_what_goes_dense_is_heard(wire: Wire) -> None:
    class Halves(DenseAllReduce):
        def run(self, outgoing: Outgoing, round: Round, wire: Wire) -> Exchanged:
            assert isinstance(outgoing.x, Tensor)
            return super().run(outgoing._replace(x=outgoing.x / 2), round, wire)

    synchronizer = Synchronizer(Method([GradientSync(Channel(Halves()))]), wire)
    module, optimizer, halved = ready(synchronizer)
    synchronizer.synchronize(optimizer)
    assert equal(gradients(module), halved)
    assert sum(traffic.calls for traffic in wire.ledger.rows["gradients"].values()) == 1
    synchronizer.close()


def test_the_residual_survives_growth(wire: Wire) -> None:
    class NothingSent(DenseAllReduce):
        def run(self, outgoing: Outgoing, round: Round, wire: Wire) -> Exchanged:
            exchanged = super().run(outgoing, round, wire)
            return exchanged._replace(sent=torch.zeros_like(outgoing.x))

    synchronizer = Synchronizer(Method([GradientSync(Channel(NothingSent(), [ErrorFeedback()]))]), wire)
    module = chain()
    module[0].requires_grad_(False)
    synchronizer.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    total = 0.0
    for step in range(4):
        if step == 2:
            module[0].requires_grad_(True)
        optimizer.zero_grad()
        backward(synchronizer, module)
        if step < 2:
            total = total + gradients_of(module[1])
            expected = total.norm()
        else:
            total = total + gradients_of(module[1])
            first = gradients_of(module[0]) * (step - 1)
            expected = torch.cat([total.flatten(), first.flatten()]).norm()
        with synchronizer.stepping(optimizer):
            synchronizer.synchronize(optimizer)
            optimizer.step()
        assert synchronizer.residual_norm() == pytest.approx(float(expected), rel=1e-6)
    synchronizer.close()


def gradients_of(module: nn.Module) -> Tensor:
    assert module.weight.grad is not None
    return module.weight.grad.clone()


def test_two_optimizers_share_their_own_parameters_only(synchronizer: Synchronizer) -> None:
    module = chain()
    synchronizer.add_module(module)
    first = torch.optim.SGD(module[0].parameters(), lr=0.1)
    second = torch.optim.SGD(module[1].parameters(), lr=0.1)
    for optimizer in (first, second):
        synchronizer.register(optimizer)
    backward(synchronizer, module)
    others = gradients(module[1])
    synchronizer.synchronize(first)
    assert equal(gradients(module[1]), others)
    synchronizer.synchronize(second)
    synchronizer.synchronize(second)
    assert Halving.rounds == [(["0.weight"], 0), (["1.weight"], 0)]


def test_a_parameter_of_two_optimizers_is_shared_with_each(synchronizer: Synchronizer) -> None:
    """A tied weight that two optimizers step: each step shares what its own backward pass gave, once."""
    module = chain()
    synchronizer.add_module(module)
    both = torch.optim.SGD(module.parameters(), lr=0.1)
    one = torch.optim.SGD(module[1].parameters(), lr=0.1)
    for optimizer in (both, one):
        optimizer.zero_grad()
        backward(synchronizer, module)
        before = gradients(module)
        with synchronizer.stepping(optimizer):
            synchronizer.closure(optimizer, lambda: None)()
            assert torch.equal(gradients(module)[1], before[1] / 2)
            optimizer.step()
    assert Halving.rounds == [(["0.weight", "1.weight"], 0), (["1.weight"], 0)]


def _two_optimizers_of_one_parameter(rank: int) -> list[list[float]]:
    module = nn.Linear(1, 3, bias=False)
    synchronizer = Synchronizer(gradient_dropping(1.0), Wire())
    synchronizer.add_module(module)
    module.weight.grad = torch.tensor([[1.0], [2.0], [3.0]]) * (rank + 1)
    found = []
    for optimizer in (torch.optim.SGD(module.parameters(), lr=0.0), torch.optim.Adam(module.parameters(), lr=0.0)):
        with synchronizer.stepping(optimizer):
            synchronizer.synchronize(optimizer)
            optimizer.step()
        found.append(gradients_of(module).flatten().tolist())
    synchronizer.close()
    return found


def test_two_optimizers_can_step_on_one_backward_pass(tmp_path: Path) -> None:
    """As under ddp both find the mean: that of gradients which are equal already is the same again."""
    for found in run_ranks(tmp_path, 2, _two_optimizers_of_one_parameter):
        assert found == [[1.5, 3.0, 4.5]] * 2


def test_a_tied_parameter_has_one_place(synchronizer: Synchronizer) -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight
    synchronizer.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    backward(synchronizer, module)
    before = gradients(module)
    synchronizer.synchronize(optimizer)
    assert Halving.rounds == [(["0.weight"], 0)]
    assert torch.equal(gradients(module)[0], before[0] / 2)


def test_names_of_a_second_module_differ(synchronizer: Synchronizer) -> None:
    first, second = chain(), chain()
    for module in (first, second):
        synchronizer.add_module(module)
        backward(synchronizer, module)
    synchronizer.synchronize(torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1))
    names = ["0.weight", "1.weight", "module_1.0.weight", "module_1.1.weight"]
    assert Halving.rounds == [(names, 0)]


def test_backward_after_sharing(synchronizer: Synchronizer) -> None:
    module, optimizer, shared = ready(synchronizer)
    synchronizer.synchronize(optimizer)
    with pytest.raises(RuntimeError, match=r"clipping had already\s+shared.*zero_grad\(\) first"):
        backward(synchronizer, module)
    for set_to_none in (True, False):
        optimizer.zero_grad(set_to_none)
        backward(synchronizer, module)
        synchronizer.synchronize(optimizer)
        assert equal(gradients(module), shared)
    assert len(Halving.rounds) == 3


def test_a_backward_pass_elsewhere_does_not_matter(synchronizer: Synchronizer) -> None:
    module, optimizer, shared = ready(synchronizer)
    other = chain()
    synchronizer.add_module(other)
    synchronizer.synchronize(optimizer)
    backward(synchronizer, other)
    synchronizer.synchronize(optimizer)
    assert equal(gradients(module), shared)
    assert len(Halving.rounds) == 1


def test_the_guard_watches_until_close(wire: Wire) -> None:
    synchronizer = Synchronizer(gradient_dropping(1.0), wire)
    module, optimizer, _ = ready(synchronizer)
    other = chain()
    other(torch.ones(1, 2)).sum().backward()
    weights = [p.clone() for p in module.parameters()]
    with pytest.raises(RuntimeError, match=r"SGD.step\(\) was called past the strategy"):
        optimizer.step()
    assert equal([p.detach() for p in module.parameters()], [w.detach() for w in weights])
    # Optimizers of other models are none of our business.
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    synchronizer.close()
    optimizer.step()
    synchronizer.close()


def test_a_method_in_buckets_needs_no_guard(wire: Wire) -> None:
    synchronizer = Synchronizer(dense(), wire)
    _, optimizer, _ = ready(synchronizer)
    optimizer.step()
    synchronizer.close()


def test_the_method_can_serve_again(wire: Wire) -> None:
    method = gradient_dropping(0.25)
    norms = []
    for _ in range(2):
        torch.manual_seed(0)
        synchronizer = Synchronizer(method, wire)
        _, optimizer, _ = ready(synchronizer)
        assert synchronizer.residual_norm() == 0
        synchronizer.synchronize(optimizer)
        norms.append(synchronizer.residual_norm())
        synchronizer.close()
    assert norms[0] == norms[1] > 0
