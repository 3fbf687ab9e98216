"""Does methods.auto choose well? Its step beside those of the methods that it chooses among, at several networks.

Each rank runs on its own host in the lab of network.py (Linux, root). In each cell ddp, ddp with torch's bfloat16 hook,
"sparsecomm", and auto train the same model; a step is the median of those after auto has chosen. Each run is told that
it will have 1,000 steps, and stops earlier. Prints a Markdown table: each step's time, auto's by the faster of ddp and
its bfloat16, auto's by the best row, its prediction by its measurement, and what measuring and trying would cost a run
of 1,000 steps. --resume goes on with the file of runs.
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
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

# torch warns that the lab's hosts have no names.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import pytorch_lightning as pl
import torch
from cable import Cable
from models import EXCERPT, MODELS, Loaded, Trained
from network import FORK, UNLIMITED, Lab, LabError
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from runs import load, save, versions
from torch.utils.data import DataLoader
from training import STRATEGIES, keep_freed_memory

AUTO = "auto()"
ROWS = ["ddp", "ddp, bf16 hook", "sparsecomm", AUTO]
LENGTH = 1000

# Steps that count for a row, and a bound on what they may take on a slow network; but at least three.
STEPS, WARM_UP, SECONDS, LEAST = 12, 3, 25.0, 3


class Run(NamedTuple):
    """One row in one cell.

    Attributes:
        model, ranks, cable, row: What was run.
        seconds: Of the steps that count.
        before: Seconds of all steps before them, measuring the network included.
        record: Of auto: what it knew, measured and chose; None for other rows.
        skipped: Steps before those that count.
    """

    model: str
    ranks: int
    cable: str
    row: str
    seconds: list[float]
    before: float
    record: dict[str, Any] | None
    skipped: int

    @property
    def step(self) -> float:
        return statistics.median(self.seconds)

    @property
    def key(self) -> tuple[str, int, str, str]:
        return self.model, self.ranks, self.cable, self.row


class Meter(pl.Callback):
    """Times steps, and ends the run when there are enough."""

    def __init__(self, barrier: Barrier) -> None:
        self.barrier = barrier
        self.ends: list[float] = []
        self.settled = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A strategy's own hook has measured the network before this.
        self.barrier.wait(600)
        self.ends = [time.perf_counter()]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.ends.append(time.perf_counter())
        chooser = getattr(trainer.strategy, "chooser", None)
        if chooser is None or chooser.record.settled:
            self.settled = self.settled or len(self.ends) - 1 + WARM_UP
        counted = len(self.ends) - 1 - self.settled
        enough = counted >= STEPS or (counted >= LEAST and self.ends[-1] - self.ends[self.settled] > SECONDS)
        # Ranks count alike, but time a little differently.
        stop = torch.tensor(float(self.settled > 0 and enough))
        trainer.should_stop = bool(trainer.strategy.reduce(stop, reduce_op="mean") > 0.4)


def train(rank: int, model: str, ranks: int, row: str, loaded: Loaded, barrier: Barrier) -> Any:
    """What each rank does, on its host."""
    keep_freed_memory()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    meter = Meter(barrier)
    begin = time.perf_counter()
    trainer = pl.Trainer(
        strategy=STRATEGIES[row](),
        accelerator="cpu",
        devices=1,
        num_nodes=ranks,
        plugins=[TorchElasticEnvironment()],
        max_steps=LENGTH,
        callbacks=[meter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    kind = MODELS[model]
    module = Trained(kind.network(loaded.classes), kind.learning_rate)
    trainer.fit(module, DataLoader(loaded.data, kind.batch_size, shuffle=True, drop_last=True))
    times = [after - before for before, after in itertools.pairwise(meter.ends)]
    chooser: Any = getattr(trainer.strategy, "chooser", None)
    record = None if chooser is None else chooser.state_dict() | {"measuring": chooser.measuring_seconds}
    assert begin < meter.ends[0]
    return times[meter.settled :], sum(times[: meter.settled]), record, meter.settled


def measure(model: str, ranks: int, cable: str, row: str, loaded: Loaded) -> Run:
    """One row in one cell; rank 0's times."""
    barrier = FORK.Barrier(ranks)
    with Lab(ranks, cable) as lab:
        seconds, before, record, skipped = lab.run(train, model, ranks, row, loaded, barrier, timeout=1500)[0]
    return Run(model, ranks, cable, row, seconds, before, record, skipped)


def table(runs: list[Run]) -> str:
    """The cells whose rows are all there."""
    by = {run.key: run for run in runs}
    header = ["model", "ranks", "cable", *(f"{row}, ms" for row in ROWS), "chosen"]
    header += ["by the faster ddp", "by the best", "predicted by measured", "cost in 1,000 steps"]
    lines = [f"| {' | '.join(header)} |", f"|---|---:|---|{'---:|' * len(ROWS)}---|---:|---:|---:|---:|"]
    for cell in dict.fromkeys(run.key[:3] for run in runs):
        rows = [by.get((*cell, row)) for row in ROWS]
        if not all(rows):
            continue
        steps = [run.step for run in rows if run is not None]
        auto = by[(*cell, AUTO)]
        record = auto.record or {}
        chosen = record["current"]
        ratios = [
            record["predicted"][name] / measured
            for name, measured in record["measured"].items()
            if name in record["predicted"]
        ]
        spent = record["measuring"] + auto.before - auto.skipped * auto.step
        cells = [cell[0], str(cell[1]), cell[2], *(f"{1000 * step:,.0f}" for step in steps), chosen]
        cells += [f"{steps[-1] / min(steps[:2]):.2f}", f"{steps[-1] / min(steps[:-1]):.2f}"]
        cells += [", ".join(f"{ratio:.2f}" for ratio in ratios), f"{max(0.0, spent) / (LENGTH * auto.step):.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="networks to train")
    add("--ranks", nargs="+", type=int, default=[2, 4], metavar="N", help="numbers of processes, one thread each")
    rates = ["10mbit", "100mbit", "1gbit", UNLIMITED]
    add("--rates", nargs="+", default=rates, metavar="RATE", help="rates of each rank's cable")
    add("--rtts", nargs="+", default=["0ms", "20ms", "100ms"], metavar="TIME", help="round-trip times")
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="folder of Fashion-MNIST")
    add("--text", type=Path, default=EXCERPT, metavar="FILE", help="text for the language models, in UTF-8")
    add("--output", type=Path, default=Path("auto.json"), metavar="FILE", help="JSON file of all runs")
    add("--resume", action="store_true", help="skip runs that the file already has")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    settings = {"rows": ROWS, "length": LENGTH, "steps": STEPS}
    try:
        pairs = itertools.product(options.rates, options.rtts)
        # The lab's switch, which makes length, cannot carry more than 1 Gbit.
        cables = [str(Cable(rate, rtt=rtt)) for rate, rtt in pairs if rate != UNLIMITED or rtt in ("0", "0ms")]
        runs = [Run(**stored) for stored in load(options.output, settings, options.resume)]
        loaded = {name: MODELS[name].load(options.data_dir, options.text) for name in options.models}
        for model, ranks, cable, row in itertools.product(options.models, options.ranks, cables, ROWS):
            if any(run.key == (model, ranks, cable, row) for run in runs):
                continue
            runs.append(measure(model, ranks, cable, row, loaded[model]))
            save([run._asdict() for run in runs], options.output, settings)
            print(f"{model}, {ranks}, {cable}, {row}: {runs[-1].step:.3f} s", file=sys.stderr, flush=True)
    except (LabError, OSError, ValueError) as error:
        sys.exit(str(error))
    print(table(runs))
    print(f"\n{json.dumps(versions())}")


if __name__ == "__main__":
    main()
