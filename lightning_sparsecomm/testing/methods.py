"""The laws of whole methods, checked in training on several ranks."""

import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.sharing import Method
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from lightning_sparsecomm.testing.laws import check_factory, equal_bits, law, load_kernels
from lightning_sparsecomm.testing.ranks import run_ranks

FEATURES, CLASSES, BATCH, BATCHES, EPOCHS = 12, 5, 8, 12, 4

State = dict[str, Tensor]


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """SGD with momentum: what every method is defined for."""
    return SGD(parameters, lr=0.05, momentum=0.5)


def check_method(
    method_factory: Callable[[], Method],
    world_size: int = 2,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = sgd,
    timeout: float = 120,
) -> None:
    """Checks the laws of a method, in a small training by a Trainer on several ranks.

    After training, the weights are equal on all ranks, to the bit, and the loss has gone down. A training that is
    resumed from a checkpoint in its middle, on ranks that begin anew, ends as the one that was never stopped, to the
    bit: weights, optimizer, and what the method holds.

    >>> check_method(lambda: dgc(density=0.1, warmup_steps=0))

    Args:
        method_factory: Makes the method; called several times on each rank.
        world_size: Number of ranks.
        optimizer: Makes the optimizer for some parameters.
        timeout: Seconds until the ranks must have finished.

    Raises:
        AssertionError: A law is violated.
        TypeError: `method_factory` makes no method.
    """
    check_factory("method_factory", method_factory, Method, "fallback")
    load_kernels()
    with tempfile.TemporaryDirectory(prefix="training-") as folder:
        ranks = run_ranks(world_size, _on_rank, world_size, method_factory, optimizer, Path(folder), timeout=timeout)
    for rank, weights in enumerate(ranks):
        for name, tensor in weights.items():
            law(
                equal_bits(tensor, ranks[0][name]),
                f"weights must be equal on all ranks after training, to the bit; {name} differs on ranks 0 and {rank}",
            )


class _Network(pl.LightningModule):
    def __init__(self, optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.make_optimizer = optimizer

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.body(x), y)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(*batch)

    def configure_optimizers(self) -> Optimizer:
        return self.make_optimizer(self.parameters())


class _Watch(pl.Callback):
    """Takes what a rank has when the last epoch ends: the end of training may change it."""

    def __init__(self) -> None:
        self.state: State = {}

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, SparseCommStrategy)
        held = {
            "weights": pl_module.state_dict(),
            "a rank's own weights": strategy.engine.replicas.state_dict(buffers=False),
            "optimizer": trainer.optimizers[0].state_dict()["state"],
            "what the method holds": strategy.engine.state.state_dict()["streams"],
        }
        self.state = {name: tensor.clone() for name, tensor in _tensors_in(held)}


def _tensors_in(value: object, name: str = "") -> Iterable[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors_in(item, f"{name}, {key}" if name else str(key))


def _on_rank(
    rank: int,
    world_size: int,
    factory: Callable[[], Method],
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    folder: Path,
) -> State:
    # Nothing else is done in this process.
    logging.disable(logging.WARNING)
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(CLASSES, (BATCH * world_size * BATCHES,), generator=generator)
    x = torch.randn(len(y), FEATURES, generator=generator) + 2 * nn.functional.one_hot(y, FEATURES)
    data = DataLoader(TensorDataset(x, y), BATCH, shuffle=True)

    model = _Network(optimizer)
    before = model.loss(x, y).item()
    whole = _fit(model, factory(), folder, data, None)
    after = model.loss(x, y).item()
    law(after < before, f"training must lower the loss; it was {before:.4f} before, and is {after:.4f} after it")
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    checkpoint = folder / f"epoch={EPOCHS // 2 - 1}.ckpt"
    rest = _fit(_Network(optimizer), factory(), folder / "resumed", data, checkpoint)
    for name in whole.keys() | rest.keys():
        one, other = whole.get(name), rest.get(name)
        law(
            one is not None and other is not None and equal_bits(one, other),
            f"a training that is resumed must end as one that was never stopped, to the bit; {name} differs on rank"
            f" {rank}",
        )
    return weights


def _fit(model: pl.LightningModule, method: Method, folder: Path, data: DataLoader[Any], resume: Path | None) -> State:
    """Trains; what this rank has when the last epoch ends."""
    watch, wire = _Watch(), Wire()
    # Lightning takes these ranks for processes that a cluster has started. It deletes some of this when it has trained.
    ranks = {"LOCAL_RANK": wire.rank, "WORLD_SIZE": wire.world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    with warnings.catch_warnings():
        # Lightning has advice on workers, devices and folders.
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=wire.world_size,
            strategy=SparseCommStrategy(method),
            max_epochs=EPOCHS,
            default_root_dir=folder,
            callbacks=[watch, ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, data, ckpt_path=resume)
    return watch.state
