"""DDP with its reducer idle, and what it still sends; here of one rank."""

import inspect

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparsecomm.basis import DDP_BUFFERS, DDP_SETUP, Wire
from lightning_sparsecomm.frontends.data_parallel import CountedDataParallel, LocalDataParallel

OPTIONS = inspect.signature(DistributedDataParallel).parameters

# A weight and a bias of a linear layer; weight, bias, two running statistics and a count of a normalization.
PARAMETERS, BUFFERS = 4 * (6 + 2 + 2 + 2), 4 * (2 + 2) + 8


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def handed(wire: Wire, row: str) -> tuple[int, int]:
    traffic = wire.ledger.rows.get(row, {}).get("broadcast")
    return (traffic.calls, traffic.handed_bytes) if traffic is not None else (0, 0)


def forward(model: nn.Module, grad: bool = True) -> torch.Tensor:
    with torch.set_grad_enabled(grad):
        return model(torch.randn(4, 3)).square().sum()


@pytest.mark.filterwarnings("ignore:.broadcast_buffers. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("options", "setup"),
    [
        ({}, PARAMETERS + BUFFERS),
        ({"broadcast_buffers": False}, PARAMETERS),
        # Options since torch 2.7 and 2.13.
        *[({name: False}, 0) for name in OPTIONS if name == "init_sync"],
        *[({name: False}, PARAMETERS + BUFFERS) for name in OPTIONS if name == "forward_sync_buffers"],
    ],
)
def test_the_set_up_is_entered(wire: Wire, options: dict[str, bool], setup: int) -> None:
    CountedDataParallel(network(), wire, **options)
    assert handed(wire, DDP_SETUP) == ((1, setup) if setup else (0, 0))


def test_ignored_parameters_are_not_in_it(wire: Wire) -> None:
    module = network()
    module._ddp_params_and_buffers_to_ignore = ["0.weight"]  # type: ignore[assignment]
    CountedDataParallel(module, wire)
    assert handed(wire, DDP_SETUP) == (1, PARAMETERS + BUFFERS - 4 * 6)


def test_gradients_stay_local_and_buffers_are_broadcast_before_forward_passes(wire: Wire) -> None:
    module = network()
    model = LocalDataParallel(
        module, wire, find_unused_parameters=True, static_graph=True, gradient_as_bucket_view=True
    )
    assert not model.find_unused_parameters
    assert not model.static_graph
    for count in (1, 2):
        forward(model).backward()
        assert handed(wire, DDP_BUFFERS) == (count, count * BUFFERS)
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert wire.ledger.rows.keys() == {DDP_SETUP, DDP_BUFFERS}
    assert not model.require_backward_grad_sync


def test_buffers_are_broadcast_when_ddp_does_it(wire: Wire) -> None:
    """As under DDP, they follow the pass before: not while gradients accumulate, nor after a pass without gradients."""

    def broadcasts(model: CountedDataParallel, own: Wire) -> list[int]:
        found = []
        for kind in ("accumulates", "accumulates", "steps", "evaluates", "steps", "steps"):
            if kind == "accumulates":
                with model.no_sync():
                    forward(model).backward()
            elif kind == "evaluates":
                forward(model, grad=False)
            else:
                forward(model).backward()
            found.append(handed(own, DDP_BUFFERS)[0])
        return found

    other = Wire()
    theirs = broadcasts(CountedDataParallel(network(), other), other)
    assert broadcasts(LocalDataParallel(network(), wire), wire) == theirs
    assert 0 < theirs[-1] < 6


def test_lightnings_switch_works_like_no_sync(wire: Wire) -> None:
    model = LocalDataParallel(network(), wire)
    model.require_backward_grad_sync = False
    assert not model.require_backward_grad_sync
    forward(model).backward()
    before = handed(wire, DDP_BUFFERS)[0]
    forward(model).backward()
    assert handed(wire, DDP_BUFFERS)[0] == before
    model.require_backward_grad_sync = True
    forward(model).backward()
    forward(model).backward()
    assert handed(wire, DDP_BUFFERS)[0] > before


def test_a_method_may_keep_buffers_to_each_rank(wire: Wire) -> None:
    model = LocalDataParallel(network(), wire, broadcasts=False)
    for _ in range(3):
        forward(model).backward()
    assert handed(wire, DDP_BUFFERS) == (0, 0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_compiled_model_is_traced_without_a_warning(wire: Wire) -> None:
    """Warnings are errors: Dynamo would warn of the clock in what counts buffers."""
    module = network()
    compiled = torch.compile(LocalDataParallel(module, wire), backend="eager")
    for _ in range(2):
        compiled(torch.randn(4, 3)).square().sum().backward()
    assert handed(wire, DDP_BUFFERS) == (2, 2 * BUFFERS)
