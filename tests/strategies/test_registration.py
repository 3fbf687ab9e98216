"""Which SparseCommStrategy the top level gives, and that the objects can be copied, sent and used again."""

import copy
import importlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from torch.utils.data import DataLoader

from lightning_sparsecomm.methods import dense, gradient_dropping
from tests.distributed.launch import QUIET, run_ranks

PACKAGES = ["pytorch_lightning", "lightning.pytorch", "lightning_fabric", "lightning.fabric"]

NAME = "print(lightning_sparsecomm.SparseCommStrategy.__module__)"
SNIPPETS = {
    "pytorch_lightning first": f"import pytorch_lightning, lightning_sparsecomm; {NAME}",
    "lightning first": f"import lightning.pytorch, lightning_sparsecomm; {NAME}",
    "both first": f"import lightning.pytorch, pytorch_lightning, lightning_sparsecomm; {NAME}",
    "neither first": f"import lightning_sparsecomm, pytorch_lightning; {NAME}",
    "from import": """
import pytorch_lightning
from lightning_sparsecomm import SparseCommStrategy
print(SparseCommStrategy.__module__)
""",
    "one CLI": f"import lightning_sparsecomm, pytorch_lightning, lightning.pytorch.cli; {NAME}",
    "the other CLI": f"import lightning_sparsecomm, lightning.pytorch, pytorch_lightning.cli; {NAME}",
    "both CLIs": f"import lightning_sparsecomm, lightning.pytorch.cli, pytorch_lightning.cli; {NAME}",
    "one installed": f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "lightning":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "lightning" else found(name, package)
import lightning_sparsecomm
{NAME}
from pytorch_lightning.strategies import StrategyRegistry
print("sparsecomm_dense_fork" in StrategyRegistry)
from pytorch_lightning import Callback
print(isinstance(lightning_sparsecomm.CompressionMonitor(), Callback), "lightning" in sys.modules)
""",
}

# Each snippet runs in a process in which torch is imported, and of Lightning nothing.
RUNNER = """
import json, os, sys, traceback
import torch, torchmetrics, numba
assert not {"lightning", "pytorch_lightning", "lightning_fabric"} & {name.split(".")[0] for name in sys.modules}
folder, snippets = sys.argv[1], json.loads(sys.argv[2])
children = []
for index, snippet in enumerate(snippets):
    child = os.fork()
    if child == 0:
        sys.stdout = open(f"{folder}/{index}", "w")
        try:
            exec(snippet, {})
        except BaseException as error:
            print(f"{type(error).__name__}: {error}")
        sys.stdout.flush()
        os._exit(0)
    children.append(child)
    if len(children) == 2:
        os.waitpid(children.pop(0), 0)
for child in children:
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each snippet prints, or its error."""
    folder = tmp_path_factory.mktemp("snippets")
    arguments = [sys.executable, "-c", RUNNER, str(folder), json.dumps(list(SNIPPETS.values()))]
    root = str(Path(__file__).parents[2])
    subprocess.run(arguments, env={**os.environ, "PYTHONPATH": root}, check=True, timeout=110)
    return {name: (folder / str(index)).read_text().strip() for index, name in enumerate(SNIPPETS)}


HERE = "lightning_sparsecomm.strategies"


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["pytorch_lightning first", "lightning first", "both first", "neither first", "from import", "both CLIs"]
)
def test_the_order_of_imports_does_not_matter(printed: dict[str, str], case: str) -> None:
    assert printed[case] == f"{HERE}.either"


@pytest.mark.slow
def test_a_cli_needs_a_class_of_its_own_package(printed: dict[str, str]) -> None:
    assert printed["one CLI"] == f"{HERE}.lightning.pytorch"
    assert printed["the other CLI"] == f"{HERE}.pytorch_lightning"


@pytest.mark.slow
def test_one_installed_package_is_meant_whether_imported_or_not(printed: dict[str, str]) -> None:
    assert printed["one installed"].splitlines() == [
        "lightning_sparsecomm.strategies.pytorch_lightning",
        "True",
        "True False",
    ]


def strategy_of(package: str) -> Any:
    return importlib.import_module(f"lightning_sparsecomm.strategies.{package}").SparseCommStrategy


def front_end(package: str, strategy: Any) -> Any:
    module = importlib.import_module(package)
    make = module.Fabric if package in PACKAGES[2:] else module.Trainer
    return make(accelerator="cpu", devices=2, strategy=strategy)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("other", PACKAGES)
def test_a_strategy_of_another_package_is_named(package: str, other: str) -> None:
    strategy = strategy_of(other)(gradient_dropping(0.25), start_method="fork")
    if package == other:
        assert front_end(package, strategy).strategy is strategy
        return
    named = rf"SparseCommStrategy of {other}, for no other package's .*gradient_dropping\(density=0.25\)"
    with pytest.raises(ValueError, match=named):
        front_end(package, strategy)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda strategy: pickle.loads(pickle.dumps(strategy))])
def test_copies(package: str, duplicate: Any) -> None:
    strategy = strategy_of(package)(gradient_dropping(0.25, exclude=["*.bias"]), seed=3, find_unused_parameters=True)
    twin = duplicate(strategy)
    assert type(twin) is type(strategy)
    assert twin.method is not strategy.method
    assert repr(twin) == repr(strategy)
    assert twin.seed == 3
    assert twin._ddp_kwargs == strategy._ddp_kwargs == {"find_unused_parameters": True}
    assert duplicate(strategy_of(package)(dense("bfloat16"))).method.syncs[0].wire_dtype == "bfloat16"


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.network = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.network(batch) - batch[:, :3].sin()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit_again_and_again(rank: int) -> list[tuple[bytes, int, int]]:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})

    strategy = strategy_of("pytorch_lightning")(gradient_dropping(0.1))
    trainer = pl.Trainer(
        strategy=strategy,
        devices=2,
        max_epochs=1,
        enable_checkpointing=False,
        plugins=[TorchElasticEnvironment()],
        **QUIET,
    )
    found = []
    for _ in range(2):
        model = Regression()
        trainer.fit(model, DataLoader(torch.randn(32, 6, generator=torch.Generator().manual_seed(3)), batch_size=4))
        weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
        found.append((weights, strategy.ledger.steps, strategy.ledger.handed_bytes()))
        # Else the Trainer finds that it has reached its last epoch.
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit_loop.epoch_loop.batch_progress.reset()
    return found


def test_one_object_serves_several_fits(tmp_path: Path) -> None:
    """Each fit begins anew: no residual, no count of steps, no ledger is left from the one before."""
    first, second = run_ranks(tmp_path, 2, _fit_again_and_again)
    assert first == second
    assert first[0] == first[1]
    assert first[0][1] == 4
    assert first[0][2] > 0


def test_the_ledger_of_a_fit_can_be_copied_and_sent(tmp_path: Path) -> None:
    (found,) = run_ranks(tmp_path, 1, _copy_after_fit)
    assert found == (4, 4)


def _copy_after_fit(rank: int) -> tuple[int, int]:
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    strategy = strategy_of("pytorch_lightning")(gradient_dropping(0.1))
    trainer = pl.Trainer(
        strategy=strategy,
        devices=1,
        max_steps=4,
        enable_checkpointing=False,
        plugins=[TorchElasticEnvironment()],
        **QUIET,
    )
    trainer.fit(Regression(), DataLoader(torch.randn(32, 6), batch_size=4))
    return copy.deepcopy(strategy.ledger).steps, pickle.loads(pickle.dumps(strategy.ledger)).steps
