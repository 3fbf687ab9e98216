"""What nodes="auto" saves: steps and bytes of nodes with several ranks each, at one level and at two.

Each node is a host in the lab of network.py (Linux, root): its ranks talk over its loopback, and share its cable. Rows
train the same model, one after another: ddp, and each method at one level (all ranks alike) and at two (`nodes`).
Prints a Markdown table: the median step with its quartiles, the node's bytes on its cable as its device counts them,
two levels' step by one level's, and the last losses' mean.

    python benchmarks/two_levels.py --nodes 2x2 2x4 --data-dir DIR
"""

import argparse
import itertools
import json
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

# torch warns that the lab's hosts have no names.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import pytorch_lightning as pl
import torch
from models import EXCERPT, MODELS, Loaded
from network import DEVICE, FORK, HEADER_BYTES, Counters, Lab, LabError
from pytorch_lightning.strategies import DDPStrategy, Strategy
from runs import load, save, versions
from training import OPTIONS, fit, keep_freed_memory

from lightning_sparsecomm import methods
from lightning_sparsecomm.sharing import Method
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy

DDP = "ddp"
METHODS: dict[str, Callable[[], Method]] = {
    "dgc(0.001)": lambda: methods.dgc(0.001, warmup_steps=0),
    "dgc(0.01)": lambda: methods.dgc(0.01, warmup_steps=0),
    "gradient_dropping(0.01)": lambda: methods.gradient_dropping(0.01),
    "sparsecomm": lambda: methods.default(),
}
LEVELS = 1, 2
LENGTH = 1000
"""Steps that a run is told it will make; it stops earlier."""

WARM_UP = 4


class Run(NamedTuple):
    """One row in one cell.

    Attributes:
        model, nodes, rate, row, levels: What was run; nodes are N hosts with M ranks, as NxM.
        seconds: Of each step on rank 0.
        node_bytes: What a node's device has sent in a step, without headers; the mean over nodes.
        loss: Mean over the measured steps, on rank 0.
    """

    model: str
    nodes: str
    rate: str
    row: str
    levels: int
    seconds: list[float]
    node_bytes: float
    loss: float

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        return self.model, self.nodes, self.rate, self.row, self.levels

    @property
    def step(self) -> float:
        return statistics.median(self.seconds)


class Meter(pl.Callback):
    """Times steps after a warm-up, and counts what this rank's host has sent meanwhile."""

    def __init__(self, barrier: Barrier, steps: int) -> None:
        self.barrier, self.steps = barrier, steps
        self.ends: list[float] = []
        self.losses: list[float] = []
        self.counters: list[Counters] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        done = batch_idx + 1
        if done in (WARM_UP, WARM_UP + self.steps):
            # No rank sends meanwhile.
            self.barrier.wait(600)
            self.counters.append(Counters.read(DEVICE))
            self.barrier.wait(600)
        if done >= WARM_UP:
            self.ends.append(time.perf_counter())
            self.losses.append(float(outputs["loss"]))
        trainer.should_stop = done == WARM_UP + self.steps


def strategy_of(row: str, levels: int) -> Strategy:
    if row == DDP:
        return DDPStrategy(**OPTIONS)
    return SparseCommStrategy(METHODS[row](), nodes="auto" if levels == 2 else None, **OPTIONS)


def train(
    rank: int, model: str, lab: Lab, row: str, levels: int, steps: int, loaded: Loaded, barrier: Barrier
) -> tuple[list[float], float, float]:
    """What each rank does, on its host: its steps' seconds, its host's bytes in a step, and its mean loss."""
    keep_freed_memory()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    meter = Meter(barrier, steps)
    fit(strategy_of(row, levels), lab.hosts, lab.ranks_per_node, model, loaded, LENGTH, meter)
    counted = meter.counters[1].since(meter.counters[0])
    seconds = [after - before for before, after in itertools.pairwise(meter.ends)]
    sent = (counted.sent_bytes - HEADER_BYTES * counted.packets) / steps
    return seconds, sent, statistics.mean(meter.losses)


def measure(model: str, nodes: str, rate: str, row: str, levels: int, steps: int, loaded: Loaded) -> Run:
    """One row in one cell."""
    hosts, per_node = map(int, nodes.split("x"))
    ranks = hosts * per_node
    with Lab(ranks, rate, ranks_per_node=per_node) as lab:
        found = lab.run(train, model, lab, row, levels, steps, loaded, FORK.Barrier(ranks), timeout=1500)
    sent = statistics.mean(found[host * per_node][1] for host in range(hosts))
    return Run(model, nodes, rate, row, levels, found[0][0], sent, found[0][2])


def table(runs: list[Run]) -> str:
    by = {run.key: run for run in runs}
    header = ["model", "nodes", "rate", "row", "levels", "step, ms", "quartiles", "node's kB", "by one level", "loss"]
    lines = [f"| {' | '.join(header)} |", "|---|---|---|---|---:|---:|---:|---:|---:|---:|"]
    for run in runs:
        low, _, high = statistics.quantiles(run.seconds, n=4)
        one = by.get((*run.key[:-1], 1))
        ratio = f"{run.step / one.step:.2f}" if run.levels == 2 and one is not None else ""
        cells = [run.model, run.nodes, run.rate, run.row, str(run.levels) if run.row != DDP else ""]
        cells += [f"{1000 * run.step:,.0f}", f"{1000 * low:,.0f}–{1000 * high:,.0f}", f"{run.node_bytes / 1000:,.0f}"]
        lines.append(f"| {' | '.join([*cells, ratio, f'{run.loss:.2f}'])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", choices=list(MODELS), default=["resnet"], help="networks to train (default: resnet)")
    add("--nodes", nargs="+", default=["2x2", "2x4"], metavar="NxM", help="N hosts of M ranks (default: 2x2 2x4)")
    add("--rates", nargs="+", default=["100mbit"], metavar="RATE", help="rates of each host's cable (default: 100mbit)")
    add("--rows", nargs="+", choices=[DDP, *METHODS], default=[DDP, *METHODS], help="rows (default: all)")
    add("--steps", type=int, default=12, metavar="N", help="measured steps (default: 12)")
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="folder of Fashion-MNIST (default: data)")
    add("--text", type=Path, default=EXCERPT, metavar="FILE", help="text for the language models, in UTF-8")
    add("--output", type=Path, default=Path("two_levels.json"), metavar="FILE", help="JSON file of all runs")
    add("--resume", action="store_true", help="skip runs that the file already has")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    settings = {"steps": options.steps, "length": LENGTH}
    try:
        runs = [Run(**stored) for stored in load(options.output, settings, options.resume)]
        loaded = {name: MODELS[name].load(options.data_dir, options.text) for name in options.models}
        cells = itertools.product(options.models, options.nodes, options.rates, options.rows, LEVELS)
        for model, nodes, rate, row, levels in cells:
            if any(run.key == (model, nodes, rate, row, levels) for run in runs) or (row == DDP and levels == 2):
                continue
            runs.append(measure(model, nodes, rate, row, levels, options.steps, loaded[model]))
            save([run._asdict() for run in runs], options.output, settings)
            print(f"{nodes}, {rate}, {row}, {levels}: {runs[-1].step:.3f} s", file=sys.stderr, flush=True)
    except (LabError, OSError, ValueError) as error:
        sys.exit(str(error))
    print(table(runs))
    print(f"\n{json.dumps(versions())}")


if __name__ == "__main__":
    main()
