"""Seconds per training step and memory of each method beside stock ddp, and beside no communication, on loopback.

All run by turns in one call, each repetition in the reverse order of the one before, so that a machine that slows down
slows all of them. Prints a Markdown table; `--output` writes every step's seconds as JSON.
"""

import argparse
import json
import logging
import multiprocessing
import os
import platform
import resource
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import lightning_sparsecomm
from lightning_sparsecomm import methods
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy

FEATURES, CLASSES = 256, 10

# Buckets are rebuilt after the first step, and buffers are touched for the first time.
WARM_UP_STEPS = 5


class Apart(DDPStrategy):
    """The same processes and the same model in DDP, which never reduces a gradient: each trains alone."""

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        wrapped = super()._setup_model(model)
        wrapped.require_backward_grad_sync = False
        return wrapped


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "no communication": lambda: Apart(start_method="fork"),
    "ddp": lambda: DDPStrategy(start_method="fork"),
    "dense()": lambda: SparseCommStrategy(method=methods.dense(), start_method="fork"),
    "gradient_dropping(0.01)": lambda: SparseCommStrategy(method=methods.gradient_dropping(0.01), start_method="fork"),
    "gradient_dropping(0.001)": lambda: SparseCommStrategy(
        method=methods.gradient_dropping(0.001), start_method="fork"
    ),
    "dgc(0.001)": lambda: SparseCommStrategy(method=methods.dgc(0.001, warmup_steps=0), start_method="fork"),
    "dgc(0.001, clip=1)": lambda: SparseCommStrategy(
        method=methods.dgc(0.001, warmup_steps=0, clip=1.0), start_method="fork"
    ),
}


class Perceptron(pl.LightningModule):
    """Three layers with about `parameters` parameters, most of them in the middle.

    Args:
        parameters: How many to aim for.
    """

    def __init__(self, parameters: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        # width² + (FEATURES + CLASSES + 2)·width = parameters
        half = (FEATURES + CLASSES + 2) / 2
        width = max(1, round((half**2 + parameters) ** 0.5 - half))
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001, momentum=0.9)


class Timer(pl.Callback):
    """Measures each step on rank 0, from the end of one batch to the end of the next, and sends the seconds home; and
    the most memory that the process has had."""

    def __init__(self) -> None:
        self.seconds = multiprocessing.get_context("fork").SimpleQueue()
        self.ends: list[float] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        torch.set_num_threads(1)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        self.ends.append(time.perf_counter())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            ends = self.ends[WARM_UP_STEPS - 1 :]
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            self.seconds.put((most, [after - before for before, after in pairwise(ends)]))


class Run(NamedTuple):
    """What one training run of rank 0 took: the most bytes of memory, and the seconds of each step."""

    memory: int
    seconds: list[float]


class Row(NamedTuple):
    """One strategy's result.

    Attributes:
        strategy: Its name in STRATEGIES.
        median, lower, upper: Median and quartiles of the seconds per step, over all steps.
        ratio, least, most: Median, minimum and maximum over repetitions of the median step by the median step without
            communication of the same repetition.
        by_ddp: Median over repetitions of the median step by ddp's of the same repetition.
        memory: The most bytes that a process had, above ddp's, in units of the gradient's bytes; median of repetitions.
    """

    strategy: str
    median: float
    lower: float
    upper: float
    ratio: float
    least: float
    most: float
    by_ddp: float
    memory: float

    @classmethod
    def of(cls, strategy: str, runs: dict[str, list["Run"]], gradient_bytes: int) -> "Row":
        all_steps = [step for run in runs[strategy] for step in run.seconds]
        lower, median, upper = statistics.quantiles(all_steps, method="inclusive")

        def by(other: str) -> list[float]:
            return [
                statistics.median(ours.seconds) / statistics.median(theirs.seconds)
                for ours, theirs in zip(runs[strategy], runs[other])
            ]

        ratios = by("no communication")
        above = [ours.memory - ddp.memory for ours, ddp in zip(runs[strategy], runs["ddp"])]
        return cls(
            strategy,
            median,
            lower,
            upper,
            statistics.median(ratios),
            min(ratios),
            max(ratios),
            statistics.median(by("ddp")),
            statistics.median(above) / gradient_bytes,
        )

    def markdown(self) -> str:
        median, lower, upper = (1000 * seconds for seconds in (self.median, self.lower, self.upper))
        return (
            f"| `{self.strategy}` | {median:.1f} | {lower:.1f} – {upper:.1f} |"
            f" {self.ratio:.2f} | {self.least:.2f} – {self.most:.2f} | {self.by_ddp:.2f} | {self.memory:+.2f} |"
        )


def measure(strategy: str, options: argparse.Namespace) -> Run:
    """`options.steps` steps of a new training run."""
    count = options.processes * options.batch_size * 8
    data = TensorDataset(torch.randn(count, FEATURES), torch.arange(count) % CLASSES)
    timer = Timer()
    trainer = pl.Trainer(
        strategy=STRATEGIES[strategy](),
        accelerator="cpu",
        devices=options.processes,
        max_steps=WARM_UP_STEPS + options.steps,
        callbacks=[timer],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Perceptron(options.parameters), DataLoader(data, batch_size=options.batch_size))
    return Run(*timer.seconds.get())


def versions() -> dict[str, str]:
    """What the numbers depend on."""
    return {
        "lightning_sparsecomm": lightning_sparsecomm.__version__,
        "torch": torch.__version__,
        "pytorch_lightning": version("pytorch-lightning"),
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="processes that train together, one thread each")
    parser.add_argument("--parameters", type=int, default=10_000_000, help="about how many the model has")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per process and step")
    parser.add_argument("--steps", type=int, default=30, help="steps that are timed in each training run")
    parser.add_argument("--repetitions", type=int, default=6, help="training runs with each strategy")
    parser.add_argument("--output", type=Path, default=None, help="JSON file for all that was measured")
    options = parser.parse_args()
    if min(options.processes, options.parameters, options.batch_size, options.steps, options.repetitions) < 1:
        parser.error("each number must be at least 1")
    if options.steps < 2:
        parser.error("steps must be at least 2, for quartiles")

    torch.set_num_threads(1)
    # Lightning's advice on devices, workers and loggers.
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")

    runs: dict[str, list[Run]] = {strategy: [] for strategy in STRATEGIES}
    for repetition in range(options.repetitions):
        for strategy in list(STRATEGIES)[:: -1 if repetition % 2 else 1]:
            runs[strategy].append(measure(strategy, options))

    parameters = sum(parameter.numel() for parameter in Perceptron(options.parameters).parameters())
    print(
        f"{options.processes} processes, {parameters:,} parameters, batches of {options.batch_size},"
        f" {options.repetitions} runs of {options.steps} steps each;"
        f" {', '.join(f'{name} {number}' for name, number in versions().items())}\n"
    )
    rows = [Row.of(strategy, runs, 4 * parameters) for strategy in STRATEGIES]
    print(
        "| strategy | ms per step, median | quartiles | by no communication, median of runs | least – most | by ddp"
        " | memory above ddp's, in gradients |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        print(row.markdown())
    if options.output is not None:
        result = {
            "command": shlex.join(["python", *sys.argv]),
            "versions": versions(),
            "machine": {"system": platform.system(), "architecture": platform.machine(), "cores": os.cpu_count()},
            "parameters": parameters,
            "rows": [row._asdict() for row in rows],
            "runs": {strategy: [run._asdict() for run in several] for strategy, several in runs.items()},
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
