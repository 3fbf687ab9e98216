"""Small trainings that differ in how they use DDP. Each runs under plain ddp and under any method."""

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments import TorchElasticEnvironment
from pytorch_lightning.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsecomm.run.registry import Registry
from lightning_sparsecomm.sharing import Method
from lightning_sparsecomm.sharing.delta_share import DeltaShare
from lightning_sparsecomm.sharing.gradient_share import GradientShare
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.distributed.launch import QUIET, run_ranks

FEATURES, CLASSES, BATCH = 12, 5, 8


class RecordingSGD(torch.optim.SGD):
    """SGD that also sums, without looking at `.grad`, the gradients that its steps consume on this rank."""

    def __init__(self, named: list[tuple[str, nn.Parameter]], **options: Any) -> None:
        super().__init__([parameter for _, parameter in named], **options)
        self.own: dict[str, Tensor] = {}
        self.consumed: dict[str, Tensor] = {}
        for name, parameter in named:
            parameter.register_hook(lambda gradient, name=name: self._take(name, gradient))

    def _take(self, name: str, gradient: Tensor) -> None:
        self.own[name] = self.own.get(name, 0) + gradient.detach().clone().contiguous()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.own.clear()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        def evaluate() -> Any:
            loss = closure() if closure is not None else None
            for name, gradient in self.own.items():
                self.consumed[name] = self.consumed.get(name, 0) + gradient
            return loss

        return super().step(evaluate)


class Classifier(pl.LightningModule):
    """Automatic optimization. `unused(step, rank)` says when the side branch is left out of the loss."""

    def __init__(
        self,
        unused: Callable[[int, int], bool] | None = None,
        checkpointing: bool = False,
        batch_norm: bool = False,
        momentum: float = 0.9,
    ) -> None:
        super().__init__()
        torch.manual_seed(7)
        norm = nn.BatchNorm1d(24) if batch_norm else nn.Identity()
        self.body = nn.Sequential(nn.Linear(FEATURES, 24), norm, nn.Tanh(), nn.Linear(24, 16), nn.Tanh())
        self.side = nn.Linear(FEATURES, 16)
        self.head = nn.Linear(16, CLASSES)
        self.unused, self.checkpointing, self.momentum = unused, checkpointing, momentum

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.body, x, use_reentrant=False) if self.checkpointing else self.body(x)
        if self.unused is None or not self.unused(self.global_step, self.global_rank):
            hidden = hidden + self.side(x)
        return self.head(hidden)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return RecordingSGD(list(self.named_parameters()), lr=0.1, momentum=self.momentum)


class SeveralBackwards(Classifier):
    """Manual optimization: two backward passes, clipping by hand, one step."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        half = len(batch[0]) // 2
        for part in (slice(0, half), slice(half, None)):
            self.manual_backward(cross_entropy(self(batch[0][part]), batch[1][part]))
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()


class Adversarial(pl.LightningModule):
    """Manual optimization with two optimizers. The generator's loss also gives the discriminator gradients, which are
    thrown away."""

    automatic_optimization = False

    def __init__(self, toggle: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.generator = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, FEATURES))
        self.discriminator = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))
        self.toggle = toggle

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        of_generator, of_discriminator = self.optimizers()
        x = batch[0]
        for optimizer, loss_of in ((of_generator, self._generator_loss), (of_discriminator, self._discriminator_loss)):
            if self.toggle:
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss_of(x))
            optimizer.step()
            if self.toggle:
                self.untoggle_optimizer(optimizer)

    def _generator_loss(self, x: Tensor) -> Tensor:
        return -self.discriminator(self.generator(x.roll(1, 0))).mean()

    def _discriminator_loss(self, x: Tensor) -> Tensor:
        return (self.discriminator(self.generator(x.roll(1, 0)).detach()) - self.discriminator(x)).mean().tanh()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        parts = {"generator": 0.1, "discriminator": 0.05}
        return [
            RecordingSGD([(n, p) for n, p in self.named_parameters() if n.startswith(part)], lr=lr, momentum=0.5)
            for part, lr in parts.items()
        ]


@dataclass(frozen=True)
class Scenario:
    """How a training is set up. `tolerance` bounds the round-off of weights after 20 steps."""

    model: Callable[[], pl.LightningModule]
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 2e-6
    steps: int = 20


def _on_rank_one(step: int, rank: int) -> bool:
    return rank == 1 and step % 2 == 0


def _by_turns(step: int, rank: int) -> bool:
    """Two steps on one rank, two on none, two on the next rank."""
    return (step // 2 + rank) % 3 != 0


def _everywhere(step: int, rank: int) -> bool:
    return step % 3 != 0


SCENARIOS = {
    "plain": Scenario(Classifier),
    "accumulation": Scenario(Classifier, {"accumulate_grad_batches": 3}),
    "clip_norm": Scenario(Classifier, {"gradient_clip_val": 0.3}),
    "clip_value": Scenario(Classifier, {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
    "batch_norm": Scenario(lambda: Classifier(batch_norm=True), tolerance=1e-5),
    "batch_norm_accumulation": Scenario(
        lambda: Classifier(batch_norm=True), {"accumulate_grad_batches": 3}, tolerance=1e-5
    ),
    "adversarial": Scenario(lambda: Adversarial(toggle=False), strategy={"find_unused_parameters": True}),
    "adversarial_toggled": Scenario(lambda: Adversarial(toggle=True), strategy={"find_unused_parameters": True}),
    "several_backwards": Scenario(SeveralBackwards),
    "unused_on_one_rank": Scenario(lambda: Classifier(unused=_on_rank_one), strategy={"find_unused_parameters": True}),
    "unused_by_turns": Scenario(lambda: Classifier(unused=_by_turns), strategy={"find_unused_parameters": True}),
    "unused_everywhere": Scenario(lambda: Classifier(unused=_everywhere), strategy={"find_unused_parameters": True}),
    "gradient_as_bucket_view": Scenario(Classifier, strategy={"gradient_as_bucket_view": True}),
    "static_graph": Scenario(Classifier, strategy={"static_graph": True}),
    "bf16_mixed": Scenario(Classifier, {"precision": "bf16-mixed"}, tolerance=2e-3),
    "activation_checkpointing": Scenario(lambda: Classifier(checkpointing=True)),
    "several_buckets": Scenario(Classifier, strategy={"bucket_cap_mb": 0.0005}),
}


def without_momentum(scenario: Scenario) -> pl.LightningModule:
    """The scenario's model, with the momentum of its optimizers set to 0."""
    model = scenario.model()
    make = model.configure_optimizers

    def configure_optimizers() -> Any:
        optimizers = make()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            for group in optimizer.param_groups:
                group["momentum"] = 0.0
        return optimizers

    model.configure_optimizers = configure_optimizers
    return model


class Harvest(pl.Callback):
    """Writes what a rank ends with to a file: each rank is a separate process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # As our strategy does in forks: under ddp, two threads of Gloo's that sum sparse tensors may do it at once.
        torch.set_num_threads(1)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        consumed: dict[str, Tensor] = {}
        for optimizer in trainer.optimizers:
            consumed.update(getattr(optimizer, "consumed", {}))
        strategy = trainer.strategy
        ours = isinstance(strategy, SparseCommStrategy)
        torch.save(
            {
                "weights": {name: tensor.clone() for name, tensor in pl_module.state_dict().items()},
                "consumed": consumed,
                "syncs": _plain(strategy.engine.registry) if ours else [],
                "ledger": strategy.ledger if ours else None,
            },
            self.folder / f"{trainer.global_rank}.pt",
        )


def _plain(registry: Registry) -> list[dict[int, dict[str, Any]]]:
    """For each sync, by optimizer number: what its memories hold, and what was recorded."""
    found: list[dict[int, dict[str, Any]]] = [{} for _ in registry.methods[0].syncs]
    for tracked in registry.optimizers:
        # An optimizer's method may replace a sync by a copy that also clips, but in the same place.
        for here, sync in zip(found, tracked.method.syncs if tracked.method is not None else ()):
            share = tracked.shares.get(sync)
            if isinstance(share, (GradientShare, DeltaShare)):
                here[tracked.number] = {
                    "layout": share.layout,
                    "state": [memory.state_dict() for memory in share.channel.memories],
                    "sent": getattr(share.channel.exchange, "sent", []),
                    "shared": getattr(share.channel.exchange, "shared", []),
                }
    return found


class Shown(pl.Callback):
    """Prints warnings, which `fit` suppresses and pytest collects."""

    def setup(self, *_: Any, **__: Any) -> None:
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *_, **__: print(message, file=sys.stderr)


def fit(
    folder: Path,
    scenario: Scenario,
    world_size: int,
    method: Method | None = None,
    callbacks: tuple[pl.Callback, ...] = (),
    model: pl.LightningModule | None = None,
    **trainer_options: Any,
) -> list[dict[str, Any]]:
    """Trains in `world_size` processes and returns what each rank ends with. None for `method` is plain ddp."""
    _train(folder, scenario, world_size, method, callbacks, model, trainer_options, {"start_method": "fork"})
    return _endings(folder, world_size)


@dataclass(frozen=True)
class Training:
    """One of several trainings that run in the same processes. Each process makes its own callbacks."""

    scenario: Scenario
    method: Method | None = None
    callbacks: Callable[[Path], tuple[pl.Callback, ...]] = lambda folder: ()
    options: dict[str, Any] = field(default_factory=dict)


def fit_several(folder: Path, world_size: int, trainings: dict[str, Training]) -> dict[str, list[dict[str, Any]]]:
    """Runs trainings one after another in processes that start once. Returns what each rank ends with, by name."""
    run_ranks(folder, world_size, _train_several, folder, world_size, trainings)
    return {name: _endings(folder / name, world_size) for name in trainings}


def _train_several(rank: int, folder: Path, world_size: int, trainings: dict[str, Training]) -> None:
    size = str(world_size)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    for name, training in trainings.items():
        plugins = [*training.options.get("plugins", []), TorchElasticEnvironment()]
        options = {**training.options, "plugins": plugins}
        callbacks = training.callbacks(folder / name)
        _train(folder / name, training.scenario, world_size, training.method, callbacks, None, options, {})


def _endings(folder: Path, world_size: int) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _train(
    folder: Path,
    scenario: Scenario,
    world_size: int,
    method: Method | None,
    callbacks: tuple[pl.Callback, ...],
    model: pl.LightningModule | None,
    trainer_options: dict[str, Any],
    strategy_options: dict[str, Any],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    options = {**strategy_options, **scenario.strategy}
    strategy: Strategy = DDPStrategy(**options) if method is None else SparseCommStrategy(method=method, **options)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(BATCH * world_size * 10, FEATURES, generator=generator)
    data = TensorDataset(x, torch.randint(CLASSES, (len(x),), generator=generator))
    with warnings.catch_warnings():
        # Lightning's advice on workers, devices and loggers is not what is tested here.
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            **{
                **QUIET,
                "strategy": strategy,
                "devices": world_size,
                "max_steps": scenario.steps,
                "enable_checkpointing": False,
                "callbacks": [Harvest(folder), *callbacks],
                **scenario.trainer,
                **trainer_options,
            }
        )
        trainer.fit(model or scenario.model(), DataLoader(data, batch_size=BATCH))
