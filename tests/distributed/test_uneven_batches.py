"""Ranks with different numbers of batches: an error says where each rank is, or all train on if the user asks."""

import itertools
import os
import queue
import re
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric import Fabric
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from pytorch_lightning.strategies import DDPStrategy
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsecomm.methods import (
    dense,
    dgc,
    federated_averaging,
    gradient_dropping,
    local_adam,
    sketched_sgd,
)
from lightning_sparsecomm.sharing import Method
from lightning_sparsecomm.strategies.lightning_fabric import SparseCommStrategy as FabricStrategy
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.distributed.launch import QUIET, run_ranks
from tests.distributed.scenarios import CLASSES, FEATURES, Classifier

# One case of each test is quick; `pytest -m slow` has the others.
SLOW = pytest.mark.slow

PATIENCE = timedelta(seconds=2)
METHODS: dict[str, Callable[[], Method]] = {
    "dgc": lambda: dgc(0.1),
    "dense": dense,
    "federated_averaging": lambda: federated_averaging(every=2),
    "local mode": lambda: gradient_dropping(0.1, local="partial", average_every=2),
}


class Validates(Classifier):
    """Logs a mean over ranks. `make` makes the optimizer."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.make = make if make is not None else partial(torch.optim.SGD, lr=0.05, momentum=0.9)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters())

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("loss", cross_entropy(self(batch[0]), batch[1]), sync_dist=True)


def batches(count: int) -> DataLoader[Any]:
    x = torch.randn(8 * count, FEATURES, generator=torch.Generator().manual_seed(count))
    return DataLoader(TensorDataset(x, torch.arange(len(x)) % CLASSES), batch_size=8)


class Unsized:
    """A loader whose length nobody knows."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def join(rank: int, world_size: int) -> None:
    """As under torchrun: each rank's own error can be seen."""
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "LOCAL_WORLD_SIZE": str(world_size)})


def outcome_of(tmp_path: Path, name: str, validates: bool, more: int) -> str:
    """What one batch more on rank `more` leads to, in a training with `METHODS[name]`, or with ddp."""
    counts, method = [5 + (rank == more) for rank in range(2)], None if name == "ddp" else METHODS[name]()
    try:
        found = fit(tmp_path, counts, method, PATIENCE, validates=validates)
    except queue.Empty:
        return "hung or aborted"
    if all("Rank" in message and "waited for its" in message for message in found):
        return "all ranks say where each was"
    return " / ".join(message.partition(":")[0] if isinstance(message, str) else "trained" for message in found)


def _fit(rank: int, world_size: int, counts: list[int], model: Validates, options: dict[str, Any]) -> Any:
    """Trains with as many batches as `counts` says for this rank. Returns the error, or the bits of the weights."""
    join(rank, world_size)
    validates, folder, sized = (options.pop(name) for name in ("validates", "folder", "sized"))
    method, uneven, steps, two = (options.pop(name) for name in ("method", "uneven", "steps", "two"))
    trainer = pl.Trainer(
        strategy=SparseCommStrategy(method, uneven_inputs=uneven) if method is not None else DDPStrategy(),
        devices=world_size,
        max_epochs=2,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        callbacks=[ModelCheckpoint(folder)],
        plugins=[TorchElasticEnvironment()],
        **QUIET,
        **options,
    )
    warnings.simplefilter("ignore")
    loader: Any = batches(counts[rank])
    loader = loader if sized else Unsized(loader)
    try:
        trainer.fit(model, [loader, loader] if two else loader, batches(2) if validates else None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    assert trainer.global_step == (steps or 2 * max(counts))
    return {name: weight.detach().numpy().tobytes() for name, weight in model.named_parameters()}


def fit(
    tmp_path: Path, counts: list[int], method: Method | None, patience: timedelta | None = None, **options: Any
) -> Any:
    options = {"validates": False, "folder": tmp_path, "sized": True, "uneven": False, "method": method} | options
    options = {"steps": None, "two": False} | options
    model = options.pop("model", Validates())
    return run_ranks(tmp_path, len(counts), _fit, len(counts), counts, model, options, timeout=40, patience=patience)


CASES = [
    pytest.param(*case, marks=() if case in (("dgc", True, 1), ("dense", False, 0)) else SLOW)
    for case in itertools.product(METHODS, (True, False), (0, 1))
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "validates", "more"), CASES)
def test_one_batch_more_on_one_rank(tmp_path: Path, name: str, validates: bool, more: int) -> None:
    """Both ranks say where each is, after the timeout."""
    counts, model = [5 + (rank == more) for rank in range(2)], Validates(batch_norm=name == "dense")
    found = fit(tmp_path, counts, METHODS[name](), PATIENCE, validates=validates, model=model)
    call = r"(all_reduce|broadcast) of [\d,]+ bytes \([\w ,]+\)"
    trains = r"broadcast of 8 bytes \(Lightning, metrics\) in optimizer step 5"
    if name == "federated_averaging" or not hasattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor"):
        # Where steps do not wait for each other, nobody asks before each batch whether to stop; nor does Lightning
        # before 2.5.3.
        trains = r"(all_gather|all_reduce|broadcast) of [\d,]+ bytes \([\w ,]+\) in optimizer step 5"
    elsewhere = rf"{call} in {'validation' if validates else 'the end of an epoch'}, after 5 optimizer steps"
    places = [trains if rank == more else elsewhere for rank in range(2)]
    for rank, message in enumerate(found):
        words = (
            rf"PeerError: rank {rank} waited \d+\.\d s in vain for its {places[rank]}\."
            rf" Rank {1 - rank} waited for its {places[1 - rank]}\. So ranks took different ways: .*uneven_inputs=.*"
        )
        assert re.fullmatch(words, message), message


UNEVEN = {**METHODS, "local_adam": lambda: local_adam(0.3), "sketched_sgd": lambda: sketched_sgd(0.1)}


@pytest.mark.parametrize(
    ("name", "sized"),
    [
        pytest.param(*case, marks=() if case in (("dgc", True), ("local mode", False)) else SLOW)
        for case in itertools.product(UNEVEN, (True, False))
    ],
)
def test_uneven_inputs(tmp_path: Path, name: str, sized: bool) -> None:
    """All ranks make as many steps as the one with most batches, with validation in between, and end alike."""
    make = partial(torch.optim.Adam, lr=0.01) if name == "local_adam" else None
    model = Validates(make, batch_norm=name == "dense")
    found = fit(tmp_path, [5, 7, 3], UNEVEN[name](), uneven=True, validates=True, sized=sized, model=model)
    assert isinstance(found[0], dict), found[0]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=SLOW), 3])
def test_a_rank_that_has_run_out_counts_as_zero(tmp_path: Path, accumulate: int) -> None:
    """As with torch's Join: sums of gradients are divided by the number of ranks, also of those that have run out."""
    counts, epochs = [5, 7], 2
    options = {"uneven": True, "accumulate_grad_batches": accumulate, "steps": epochs * -(-7 // accumulate)}
    found = fit(tmp_path, counts, gradient_dropping(1.0), model=Validates(partial(torch.optim.SGD, lr=0.05)), **options)
    model = Validates()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(epochs):
        loaders = [list(batches(count)) for count in counts]
        for number in range(7):
            for loader in loaders:
                if number < len(loader):
                    x, y = loader[number]
                    (cross_entropy(model(x), y) / len(counts) / accumulate).backward()
            if (number + 1) % accumulate == 0 or number == 6:
                optimizer.step()
                optimizer.zero_grad()
    for name, weight in model.named_parameters():
        ours = torch.frombuffer(bytearray(found[0][name]), dtype=torch.float32).view(weight.shape)
        torch.testing.assert_close(ours, weight.detach(), rtol=1e-4, atol=1e-6)


def test_uneven_inputs_that_cannot_be(tmp_path: Path) -> None:
    for sized in (True, False):
        for message in fit(tmp_path, [2, 0], dgc(0.1), uneven=True, sized=sized):
            assert message.startswith("ValueError: each rank must have at least one batch"), message
            assert "rank 1 has none" in message


def _in_fabric(rank: int, counts: list[int], sized: bool) -> tuple[int, float, Any]:
    join(rank, len(counts))
    fabric = Fabric(accelerator="cpu", devices=len(counts), strategy=FabricStrategy(dgc(0.1, warmup_steps=0)))
    fabric.launch()
    torch.manual_seed(1)
    network = torch.nn.Linear(FEATURES, CLASSES)
    module, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=0.05))
    loader = batches(counts[rank])
    uneven, steps = fabric.strategy.uneven(loader if sized else Unsized(loader)), 0
    for _ in range(2):
        for x, y in uneven:
            optimizer.zero_grad()
            fabric.backward(cross_entropy(module(x), y))
            optimizer.step()
            steps += 1
    optimizer.zero_grad()
    fabric.backward(cross_entropy(module(x), y))
    gradient = float(network.weight.grad.abs().sum())
    optimizer.step()
    fabric.strategy.settle()
    return steps, gradient, network.weight.detach().numpy().tobytes()


@pytest.mark.parametrize("sized", [pytest.param(True, marks=SLOW), False])
def test_uneven_inputs_in_fabric(tmp_path: Path, sized: bool) -> None:
    found = run_ranks(tmp_path, 2, _in_fabric, [3, 5], sized)
    assert [steps for steps, _, _ in found] == [10, 10]
    assert found[0][2] == found[1][2]
    # Outside the loop, losses count.
    assert all(gradient > 0 for _, gradient, _ in found)


def test_fabric_refuses_a_trainers_option() -> None:
    with pytest.raises(TypeError, match=r"iterate over fabric\.strategy\.uneven\(loader\)"):
        FabricStrategy(uneven_inputs=True)


def test_two_dataloaders_are_refused(tmp_path: Path) -> None:
    for message in fit(tmp_path, [2, 3], dgc(0.1), uneven=True, two=True):
        assert message.startswith("TypeError: uneven_inputs=True needs one training dataloader"), message
