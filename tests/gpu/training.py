"""One training under a Trainer, for the laws on GPUs; the same code runs on CPUs, in a slow test.

Processes of their own, since one that has used a GPU must not fork. Where there are fewer GPUs than ranks, ranks share
one: each calls itself a machine, so NCCL does not refuse it, and they talk over the loopback.
"""

import argparse
import inspect
import logging
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsecomm import methods
from lightning_sparsecomm.codecs import payload
from lightning_sparsecomm.kernels import checksum_kernels_for
from lightning_sparsecomm.run.choice import method_for
from lightning_sparsecomm.sharing import Method
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy

ROOT = Path(__file__).parents[2]
FEATURES, CLASSES, BATCH, BATCHES = 64, 8, 16, 12

# For short trainings.
SMALL: dict[str, Any] = {
    "every": 4,
    "fragments": 1,
    "delay": 0,
    "density": 0.05,
    "block_density": 0.5,
    "block_size": 8,
    "warmup_steps": 4,
    "dense_steps": 4,
    "columns": 100,
}


def _recipe(name: str) -> Method:
    known = inspect.signature(methods.RECIPES[name]).parameters
    return methods.RECIPES[name](**{option: value for option, value in SMALL.items() if option in known})


METHODS: dict[str, Callable[[], Method]] = {name: partial(_recipe, name) for name in methods.RECIPES}
METHODS |= {
    "default": methods.default,
    "default with local steps": lambda: methods.default(every=2),
    "full density": lambda: methods.gradient_dropping(density=1.0),
    "full density with local steps": lambda: methods.dgc(density=1.0, warmup_steps=0, every=2),
    "dgc a step late": lambda: methods.dgc(density=0.05, warmup_steps=4, delay=1),
    "local_adam a step late": lambda: methods.local_adam(density=0.05, delay=1),
    "dgc with local steps": lambda: methods.dgc(density=0.05, warmup_steps=4, every=3),
    "local_adam with local steps": lambda: methods.local_adam(density=0.05, every=2),
    "dgc with its residual in weights": lambda: methods.dgc(0.05, warmup_steps=4, residual_in_weights=True),
    "streaming_diloco two steps late": lambda: methods.streaming_diloco(every=4, fragments=2, delay=2),
    "sparse_loco two steps late": lambda: methods.sparse_loco(every=4, fragments=2, delay=2),
}


# Each with what it needs to train here.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": partial(torch.optim.AdamW, lr=0.002),
}


def suits(method: str, optimizer: str) -> bool:
    """Whether a method is defined for this optimizer."""
    weight, chain = nn.Parameter(torch.zeros(2, 2)), [METHODS[method]()]
    while chain[-1].fallback is not None:
        chain.append(chain[-1].fallback)
    try:
        method_for(OPTIMIZERS[optimizer]([weight]), chain, [("weight", weight)])
    except TypeError:
        return False
    return True


class Network(pl.LightningModule):
    def __init__(self, compiled: bool, optimizer: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, CLASSES))
        self.called = torch.compile(self.layers) if compiled else self.layers
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return cross_entropy(self.called(x), y)

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.layers.parameters())


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


class Dies(pl.Callback):
    """Ends its process, as a machine that fails does, in a later step."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def started(
    folder: Path, method: str, accelerator: str, ranks: int, *more: str
) -> list[subprocess.CompletedProcess[str]]:
    """The processes of a training, ended. Ranks that are more than the GPUs share the first one.

    So they do where one of them dies: then each is a process that is started here.
    """
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "tests.gpu.training", str(folder), method, accelerator]
    if accelerator == "cpu" or (torch.cuda.device_count() >= ranks and "--dies" not in more):
        places: list[dict[str, str]] = [{}]
        command.append(f"--devices={ranks}")
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": "0", "NCCL_SOCKET_IFNAME": "lo"}
        places = [{**shared, "NODE_RANK": str(rank), "NCCL_HOSTID": f"machine {rank}"} for rank in range(ranks)]
        command.append(f"--machines={ranks}")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = [subprocess.Popen([*command, *more], cwd=ROOT, env={**os.environ, **place}, **pipes) for place in places]
    with ThreadPoolExecutor(ranks) as pool:
        outputs = list(pool.map(lambda process: process.communicate(timeout=550)[0], running))
    return [
        subprocess.CompletedProcess(process.args, process.returncode, output)
        for process, output in zip(running, outputs)
    ]


def trained(folder: Path, method: str, accelerator: str, ranks: int, *more: str) -> list[dict[str, Tensor]]:
    """The weights of each rank after a training in processes of their own."""
    for done in started(folder, method, accelerator, ranks, *more):
        assert done.returncode == 0, done.stdout
    return weights_in(folder, ranks)


def weights_in(folder: Path, ranks: int) -> list[dict[str, Tensor]]:
    """What each rank of a training has ended with."""
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("method", choices=["ddp", *METHODS])
    parser.add_argument("accelerator", choices=["cpu", "gpu"])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--machines", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--resume", action="store_true", help="then train again from the checkpoint halfway")
    parser.add_argument("--dies", action="store_true", help="the last rank dies")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # Rounding alike: no tf32, and one order of operations.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(1)
    if options.accelerator == "gpu":
        # Those of a network as small as this would be read on the CPU.
        payload._SHORT = 0
        checksum_kernels_for(torch.device("cuda")).least = 4  # type: ignore[attr-defined]
    fit(options, options.folder, None)
    if options.resume:
        resumed = options.folder / "resumed"
        resumed.mkdir(exist_ok=True)
        fit(options, resumed, str(options.folder / "epoch=0.ckpt"))


def fit(options: argparse.Namespace, folder: Path, checkpoint: str | None) -> None:
    """One training, from its beginning or from a checkpoint."""
    pl.seed_everything(0, verbose=False)
    ranks = options.devices * options.machines
    x = torch.randn(BATCH * BATCHES * ranks, FEATURES)
    y = (x @ torch.randn(FEATURES, CLASSES)).argmax(1)
    timeout = timedelta(seconds=30) if options.dies else timedelta(minutes=5)
    callbacks: list[pl.Callback] = [Weights(folder)]
    if options.resume and checkpoint is None:
        callbacks.append(ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1))
    if options.dies and os.environ.get("NODE_RANK") == str(options.machines - 1):
        callbacks.append(Dies())
    trainer = pl.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.machines,
        strategy=DDPStrategy(timeout=timeout)
        if options.method == "ddp"
        else SparseCommStrategy(method=METHODS[options.method](), timeout=timeout),
        precision=options.precision,
        max_epochs=2,
        logger=False,
        enable_checkpointing=options.resume and checkpoint is None,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(
        Network(options.compile, options.optimizer), DataLoader(TensorDataset(x, y), BATCH), ckpt_path=checkpoint
    )


if __name__ == "__main__":
    main()
