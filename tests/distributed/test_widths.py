"""Models wider and narrower than float32: nothing is rounded away, and what is clamped is said."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.channel import Channel, ErrorFeedback
from lightning_sparsecomm.exchange import DenseAllReduce, QuantizedAllReduce
from lightning_sparsecomm.methods import dgc, gradient_dropping, sketched_sgd
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import GradientSync, Method
from tests.distributed.launch import run_ranks


def _step(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    with engine.stepping(optimizer):
        engine.synchronize(optimizer)
        optimizer.step()


def _float64(rank: int, method: Method) -> float:
    """The largest difference to the mean of all ranks' gradients, after one step of rate 1."""
    module = nn.Linear(30, 20).double()
    start = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    engine = Engine(method, Wire())
    engine.registry.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9)
    every = [torch.randn(620, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    for parameter, part in zip(module.parameters(), every[rank].split([600, 20])):
        parameter.grad = part.view_as(parameter).clone()
    _step(engine, optimizer)
    engine.close()
    moved = start - nn.utils.parameters_to_vector(module.parameters()).detach()
    return float((moved - (every[0] + every[1]) / 2).abs().max())


@pytest.mark.parametrize("method", [dgc(1.0), gradient_dropping(1.0), sketched_sgd(1.0)])
def test_a_float64_model_is_exchanged_in_float64(tmp_path: Path, method: Method) -> None:
    assert max(run_ranks(tmp_path, 2, _float64, method)) < 1e-14


def _decay(rank: int, method: Method | None, dtype: torch.dtype) -> float:
    """What is left of the weights after 400 steps of noise, by weight decay alone: their norm by that of the first."""
    torch.manual_seed(0)
    module = nn.Linear(200, 50, bias=False).to(dtype)
    nn.init.constant_(module.weight, 1.0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, weight_decay=0.01)
    engine = Engine(method, Wire()) if method is not None else None
    if engine is not None:
        engine.registry.add_module(module)
    generator = torch.Generator().manual_seed(1)
    for _ in range(400):
        noise = torch.randn(50, 200, generator=generator) * 0.01
        module.weight.grad = noise.to(dtype)
        if engine is None:
            optimizer.step()
        else:
            _step(engine, optimizer)
    return float(module.weight.detach().double().mean())


@pytest.mark.few(1)
@pytest.mark.parametrize("method", [dgc(1.0), dgc(0.05), sketched_sgd(0.05, columns=500)])
@pytest.mark.filterwarnings("ignore:one process")
def test_decay_is_not_rounded_away(tmp_path: Path, method: Method) -> None:
    (exact,) = run_ranks(tmp_path, 1, _decay, None, torch.float64)
    (narrow,) = run_ranks(tmp_path, 1, _decay, method, torch.bfloat16)
    assert exact < 0.7
    assert narrow == pytest.approx(exact, abs=0.02)


def _large(rank: int, method: Method) -> tuple[int, int]:
    module = nn.Linear(10, 1, bias=False)
    engine = Engine(method, Wire())
    engine.registry.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            module.weight.grad = torch.tensor([[1e5, -1e6, *[1.0] * 8]])
            _step(engine, optimizer)
    engine.close()
    words = [each for each in caught if "beyond ±" in str(each.message) and "were clamped" in str(each.message)]
    return len(words), engine.wire.ledger.clamped_elements


@pytest.mark.parametrize(
    "method",
    [
        gradient_dropping(1.0, values="float16", follow_rate=False),
        Method([GradientSync(Channel(DenseAllReduce("float16")))]),
    ],
)
def test_what_float16_clamps_is_said_once_and_counted(tmp_path: Path, method: Method) -> None:
    assert run_ranks(tmp_path, 2, _large, method) == [(1, 6)] * 2


def test_what_float16_clamps_in_flight_is_said_once(tmp_path: Path) -> None:
    """The third of three exchanges has not landed when the ledger is read."""
    method = Method([GradientSync(Channel(DenseAllReduce("float16"), [ErrorFeedback()]), delay=1)])
    assert run_ranks(tmp_path, 2, _large, method) == [(1, 4)] * 2


@pytest.mark.parametrize(
    "method",
    [
        gradient_dropping(1.0, values="two_bit", follow_rate=False),
        Method([GradientSync(Channel(QuantizedAllReduce(2), [ErrorFeedback()]))]),
    ],
)
def test_what_two_bits_clamp_is_said_once_and_counted(tmp_path: Path, method: Method) -> None:
    """The larger of two magnitudes is a mean, of one value or of more."""
    for words, count in run_ranks(tmp_path, 2, _large, method):
        assert words == 1
        assert 3 <= count <= 6
