"""The strategy in a Fabric loop: what cannot work is refused."""

import copy
import logging
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from lightning_sparsecomm import Channel, DeltaSync, GradientSync, Method
from lightning_sparsecomm.exchange import DenseAllReduce
from lightning_sparsecomm.methods import dgc, gradient_dropping
from lightning_sparsecomm.strategies.lightning_fabric import SparseCommStrategy as FabricStrategy
from tests.distributed.launch import run_ranks


class Scaler:
    """Has nothing that a torch.amp.GradScaler has."""


def _train_by_hand(rank: int, case: str) -> str:
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    method: Method = gradient_dropping(exclude=["2.bais"] if case == "exclude matches nothing" else ["2.bias"])
    if case == "clipping over unshared gradients":
        exchange = Channel(DenseAllReduce())
        method = Method([GradientSync(exchange, ["0.*"]), DeltaSync(exchange, parameters=["2.*"])])
    plugins: list[Any] = [TorchElasticEnvironment()]
    if "loss scaler" in case:
        scaler: Any = Scaler() if "of another kind" in case else torch.amp.GradScaler("cpu")
        plugins.append(FabricMixedPrecision("16-mixed", "cpu", scaler))
    fabric = Fabric(accelerator="cpu", devices=1, strategy=FabricStrategy(method), plugins=plugins)
    fabric.launch()
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    if case == "sparse embedding":
        network.append(nn.Embedding(4, 3, sparse=True))
    try:
        strange = [nn.Parameter(torch.zeros(5, 2))] if case == "parameter that the model lacks" else []
        make = torch.optim.LBFGS if case == "LBFGS" else torch.optim.SGD
        module, optimizer = fabric.setup(network, make([*network.parameters(), *strange], lr=0.1))
        fabric.backward(module(torch.ones(2, 6)).sum())
        if "clipping" in case:
            fabric.clip_gradients(module, optimizer, max_norm=0.1)
            fabric.backward(module(torch.ones(2, 6)).sum())
        (optimizer.optimizer if case == "step past the strategy" else optimizer).step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("nothing wrong", ""),
        ("exclude matches nothing", "ValueError: exclude: the pattern '2.bais' matches no parameter"),
        ("loss scaler", ""),
        ("loss scaler of another kind", "TypeError: the precision plugin's scaler must be a torch.amp.GradScaler"),
        ("sparse embedding", "TypeError: the gradient of '3.weight' is sparse (sparse=True)"),
        ("LBFGS", "TypeError: the method is not defined for LBFGS: "),
        ("parameter that the model lacks", "ValueError: the optimizer holds 1 parameter(s) that the model lacks"),
        ("backward after clipping", "RuntimeError: a backward pass added to gradients of SGD"),
        ("clipping over unshared gradients", "ValueError: gradients cannot be clipped by norm where a method shares"),
        ("step past the strategy", "RuntimeError: SGD.step() was called past the strategy"),
    ],
)
@pytest.mark.filterwarnings("ignore:one process")
def test_fabric(case: str, text: str, tmp_path: Path) -> None:
    (found,) = run_ranks(tmp_path, 1, _train_by_hand, case)
    assert found.startswith(text) if text else not found


def test_fabric_counts_no_epochs(tmp_path: Path) -> None:
    def setup(rank: int) -> str:
        strategy = FabricStrategy(method=dgc(warmup_epochs=2))
        strategy._begin(torch.device("cpu"), None)
        with pytest.raises(ValueError, match=r"warmup_epochs=2 needs a Trainer.*warmup_steps"):
            strategy._refuse_epochs()
        strategy._end()
        return "refused"

    assert run_ranks(tmp_path, 1, setup) == ["refused"]


def _said(rank: int, early: bool) -> list[str]:
    lines: list[str] = []
    logger = logging.getLogger("lightning_fabric")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    strategy = FabricStrategy(dgc(0.1, warmup_steps=0))
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    network = nn.Linear(200, 100)
    made = torch.optim.SGD(network.parameters(), lr=0.1)
    if early:
        optimizer: Any = fabric.setup_optimizers(made)
        module = fabric.setup_module(network)
    else:
        module, optimizer = fabric.setup(network, made)
    for _ in range(2):
        optimizer.zero_grad()
        fabric.backward(module(torch.ones(1, 200)).sum())
        optimizer.step()
    return [line for line in lines if line.startswith("sparsecomm")]


@pytest.mark.parametrize("early", [False, True], ids=["together", "optimizer before module"])
def test_it_says_which_method_an_optimizer_has(tmp_path: Path, early: bool) -> None:
    first, second = run_ranks(tmp_path, 2, _said, early)
    (line,) = (line for line in first if "compiling" not in line)
    assert re.fullmatch(r"sparsecomm: 2 ranks, SGD by dgc\(.*\); about [\d.]+ times fewer bytes than ddp", line), line
    assert second == []


def _copied(rank: int) -> list[bool]:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    strategy = FabricStrategy(dgc(0.1, warmup_steps=0))
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    network = nn.Sequential(nn.Linear(20, 10), nn.BatchNorm1d(10))
    module, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=0.1))
    average, inputs, alike = AveragedModel(module), torch.ones(3, 20), []
    for _ in range(2):
        optimizer.zero_grad()
        fabric.backward(module(torch.rand(3, 20)).square().sum())
        optimizer.step()
        average.update_parameters(module)
        # One rank alone copies.
        if rank == 1:
            wholes = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
            copies = [*(each._forward_module for each in wholes), copy.deepcopy(module._forward_module)]
            assert all(type(each) is DistributedDataParallel for each in copies)
            # Without DDP, which broadcasts buffers first.
            expected = network.eval()(inputs)
            alike += [bool((each.module.eval()(inputs) == expected).all()) for each in copies]
            network.train()
    # A copy can be trained: it averages as ddp does.
    own = copy.deepcopy(module._forward_module)
    own(torch.full((3, 20), float(rank))).square().sum().backward()
    gradient = own.module[0].bias.grad.clone()
    return [*alike, bool((gradient == fabric.all_reduce(own.module[0].bias.grad)).all()), not hasattr(own, "wire")]


def test_what_fabric_sets_up_can_be_copied_averaged_and_pickled(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, 2, _copied)
    assert (first, second) == ([True] * 2, [True] * 8)


def _loaded(rank: int, path: str, saves: bool, early: bool) -> list[float]:
    """The weights after four steps, the last two after the first two were saved, or loaded."""
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    strategy = FabricStrategy(dgc(0.1, warmup_steps=3))
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    torch.manual_seed(1)
    network = nn.Linear(20, 10)
    made = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    if early:
        optimizer: Any = fabric.setup_optimizers(made)
        module = fabric.setup_module(network)
    else:
        module, optimizer = fabric.setup(network, made)
    state = {"model": module, "optimizer": optimizer}
    if not saves:
        fabric.load(path, state)
    for step in range(0 if saves else 2, 4):
        optimizer.zero_grad()
        inputs = torch.randn(3, 20, generator=torch.Generator().manual_seed(10 * step + rank))
        fabric.backward(module(inputs).square().sum())
        optimizer.step()
        if saves and step == 1:
            fabric.save(path, state)
    return [float(each) for each in network.weight.detach().flatten()]


@pytest.mark.parametrize(
    "early", [pytest.param(False, marks=pytest.mark.slow), True], ids=["together", "optimizer first"]
)
def test_a_run_resumes_in_either_order_of_set_up(tmp_path: Path, early: bool) -> None:
    path = str(tmp_path / "last.ckpt")
    ends = [run_ranks(tmp_path, 2, _loaded, path, saves, early) for saves in (True, False)]
    assert ends[0] == ends[1]
