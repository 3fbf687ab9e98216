"""The model that all ranks share, while each trains its own; here of one rank, whose means are halved."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from lightning_sparsecomm.basis import PARAMETERS, Wire
from lightning_sparsecomm.methods import federated_averaging, gradient_dropping
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import Averaging, Method
from tests.run.training import backward, step

Make = Callable[[Method], tuple[Engine, nn.Module, torch.optim.Optimizer]]


class Normed(nn.Module):
    """A weight that is trained, one that is frozen, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Linear(2, 2, bias=False)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.mean += 1
        self.count += 1
        return self.trained(x)


@pytest.fixture
def make(wire: Wire) -> Iterator[Make]:
    engines = []

    def made(method: Method) -> tuple[Engine, nn.Module, torch.optim.Optimizer]:
        module = Normed()
        engine = Engine(method, wire)
        engines.append(engine)
        engine.registry.add_module(module)
        engine.begin()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        engine.register(optimizer)
        return engine, module, optimizer

    yield made
    for engine in engines:
        engine.close()


def train(engine: Engine, module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        backward(engine, module)
        step(engine, optimizer)


def weights(module: nn.Module) -> Tensor:
    return module.trained.weight.detach().clone()


def averaged(engine: Engine) -> int:
    return engine.wire.ledger.handed_bytes(PARAMETERS)


def test_equal_replicas_need_no_view(make: Make) -> None:
    engine, module, optimizer = make(gradient_dropping())
    train(engine, module, optimizer)
    assert not engine.replicas.view_shared()
    assert averaged(engine) == 0


def test_the_anchor_is_viewed_without_a_collective_and_own_weights_come_back(make: Make) -> None:
    engine, module, optimizer = make(federated_averaging(every=3))
    start = weights(module)
    train(engine, module, optimizer)
    own, mean = weights(module), module.mean.clone()
    handed = averaged(engine)
    assert engine.replicas.view_shared()
    assert torch.equal(weights(module), start)
    assert module.mean.tolist() == [0, 0]
    # Once.
    assert not engine.replicas.view_shared()
    engine.replicas.view_own()
    assert torch.equal(weights(module), own)
    assert torch.equal(module.mean, mean)
    engine.replicas.view_own()
    assert averaged(engine) == handed
    train(engine, module, optimizer, 2)
    assert not engine.replicas.view_shared()


def test_a_buffer_that_is_a_part_of_a_weight_is_not_taken_for_it(make: Make) -> None:
    engine, module, optimizer = make(federated_averaging(every=3))
    module.register_buffer("row", module.trained.weight.detach()[0])
    module.register_buffer("flat", module.trained.weight.detach().view(-1))
    train(engine, module, optimizer)
    own = weights(module)
    engine.replicas.view_shared()
    engine.replicas.view_own()
    assert torch.equal(weights(module), own)


@pytest.mark.parametrize("method", [federated_averaging(every=3), gradient_dropping(local="partial")])
def test_what_is_set_while_the_shared_model_is_viewed_stays(make: Make, method: Method) -> None:
    """As by a hook that sets weights, or a buffer, while Lightning validates. All other elements come back."""
    engine, module, optimizer = make(method)
    train(engine, module, optimizer)
    own = weights(module)
    # As on another rank: the average is another model.
    engine.wire.world_size = 2
    assert engine.replicas.view_shared()
    with torch.no_grad():
        module.trained.weight[0, 1] = 3.0
        module.mean.fill_(3.0)
    expected = own.clone()
    expected[0, 1] = 3.0
    assert torch.equal(engine.replicas.state_dict(buffers=False)["0.trained.weight"], expected)
    engine.replicas.view_own()
    assert torch.equal(weights(module), expected)
    assert module.mean.tolist() == [3.0, 3.0]


def test_what_local_gradients_let_drift_is_averaged_to_be_viewed(make: Make) -> None:
    engine, module, optimizer = make(gradient_dropping(local="partial"))
    assert not engine.replicas.view_shared()
    train(engine, module, optimizer)
    own = weights(module)
    assert not engine.replicas.view_shared(collective=False)
    assert averaged(engine) == 0
    engine.wire.world_size = 2
    assert engine.replicas.view_shared()
    assert torch.equal(weights(module), own / 2)
    engine.replicas.view_own()
    assert torch.equal(weights(module), own)
    engine.replicas.settle()
    assert torch.equal(weights(module), own / 2)


@pytest.mark.parametrize(("buffers", "optimizer_state"), [(False, False), (True, False), (False, True)])
def test_averages_are_taken_when_due(make: Make, buffers: bool, optimizer_state: bool) -> None:
    engine, module, optimizer = make(gradient_dropping(local="partial", average_every=7))
    # From outside, in the place of the method's own.
    engine.replicas.averaging = Averaging(2, buffers, optimizer_state)
    train(engine, module, optimizer)
    assert averaged(engine) == 0
    train(engine, module, optimizer)
    # With state, 8 bytes say which of it all ranks hold.
    assert averaged(engine) == 4 * (4 + 2 * buffers + 4 * optimizer_state) + 8 * optimizer_state


def test_what_ranks_have_in_common_is_compared_when_due(make: Make) -> None:
    engine, module, optimizer = make(federated_averaging(every=2))
    train(engine, module, optimizer)
    tracked = engine.register(optimizer)
    (common,) = engine.replicas.in_common(tracked, every=1).values()
    assert not torch.equal(common, weights(module))
    assert engine.replicas.in_common(tracked, every=2) == {}
    train(engine, module, optimizer)
    assert list(engine.replicas.in_common(tracked, every=2)) == [id(module.trained.weight)]

    engine, module, optimizer = make(gradient_dropping(local="sum", average_every=3))
    tracked = engine.register(optimizer)
    found = []
    for _ in range(6):
        train(engine, module, optimizer)
        found.append(bool(engine.replicas.in_common(tracked, every=2)))
    # After each average, if a comparison was due since the one before.
    assert found == [False, False, True, False, False, True]


def test_own_weights_are_saved_and_loaded_by_name(make: Make) -> None:
    engine, module, optimizer = make(federated_averaging(every=3))
    train(engine, module, optimizer)
    assert engine.replicas.state_dict(buffers=False).keys() == {"0.trained.weight", "0.mean"}
    state = engine.replicas.state_dict(buffers=True)
    assert state.keys() == {"0.trained.weight", "0.mean", "0.frozen"}
    own = weights(module)
    # Also while the shared model is in place.
    assert engine.replicas.view_shared()
    assert torch.equal(engine.replicas.state_dict(buffers=False)["0.trained.weight"], own)
    engine.replicas.view_own()
    copied = {name: tensor.clone() for name, tensor in state.items()}
    with torch.no_grad():
        module.trained.weight.zero_()
    engine.replicas.load_state_dict(copied)
    assert torch.equal(weights(module), own)


def test_what_callbacks_change_after_the_end_is_averaged(make: Make) -> None:
    engine, module, optimizer = make(federated_averaging(every=1))
    train(engine, module, optimizer)
    engine.settle()
    before = averaged(engine)
    engine.reunite()
    # A flag for each tensor, and nothing else.
    assert averaged(engine) - before == 4 * 3
    with torch.no_grad():
        module.trained.weight.fill_(4.0)
    engine.wire.world_size = 2
    engine.reunite()
    assert (weights(module) == 2).all()
    assert (module.frozen == 1).all()
