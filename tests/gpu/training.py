"""One training under a Trainer, for the laws on GPUs; the same code runs on CPUs, in a slow test.

A process of its own, since one that has used a GPU must not fork, and the Trainer starts the other ranks itself.
"""

import argparse
import logging
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsecomm import methods
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy

ROOT = Path(__file__).parents[2]
FEATURES, CLASSES, BATCH, BATCHES = 64, 8, 16, 12

METHODS = {
    "dense": lambda: methods.dense(),
    "full density": lambda: methods.gradient_dropping(density=1.0),
    "gradient_dropping": lambda: methods.gradient_dropping(density=0.05),
    "dgc": lambda: methods.dgc(density=0.05, warmup_steps=4),
    "sbc": lambda: methods.sbc(density=0.05, every=4),
    "sketched_sgd": lambda: methods.sketched_sgd(0.05, columns=100, candidates=4),
    "s2_reducer": lambda: methods.s2_reducer(block_size=8),
    "diloco": lambda: methods.diloco(every=4),
}


class Network(pl.LightningModule):
    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, CLASSES))
        self.called = torch.compile(self.layers) if compiled else self.layers

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return cross_entropy(self.called(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layers.parameters(), lr=0.05, momentum=0.9)


class Weights(pl.Callback):
    """Writes what each rank ends with; fails if that is where it began."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.start = {name: tensor.detach().cpu().clone() for name, tensor in pl_module.state_dict().items()}

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        weights = {name: tensor.detach().cpu() for name, tensor in pl_module.state_dict().items()}
        for name, tensor in weights.items():
            assert not torch.equal(tensor, self.start[name]), f"{name} was not trained"
        torch.save(weights, self.folder / f"{trainer.global_rank}.pt")


def trained(folder: Path, method: str, accelerator: str, devices: int, *more: str) -> list[dict[str, Tensor]]:
    """The weights of each rank after a training in processes of their own."""
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "tests.gpu.training", str(folder), method, accelerator, str(devices), *more]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=550)
    assert done.returncode == 0, done.stdout
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(devices)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("method", choices=["ddp", *METHODS])
    parser.add_argument("accelerator", choices=["cpu", "gpu"])
    parser.add_argument("devices", type=int)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # Rounding alike: no tf32, and one order of operations.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    x = torch.randn(BATCH * BATCHES * options.devices, FEATURES)
    y = (x @ torch.randn(FEATURES, CLASSES)).argmax(1)
    trainer = pl.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        strategy="ddp" if options.method == "ddp" else SparseCommStrategy(method=METHODS[options.method]()),
        precision=options.precision,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Weights(options.folder)],
    )
    trainer.fit(Network(options.compile), DataLoader(TensorDataset(x, y), BATCH))


if __name__ == "__main__":
    main()
