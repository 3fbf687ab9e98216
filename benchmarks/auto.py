"""Does methods.auto choose well? Its step beside those of the methods that it chooses among, at several networks.

Each rank runs on its own host in the lab of network.py (Linux, root). In each cell ddp, ddp with torch's bfloat16 hook,
"sparsecomm", and auto train the same model. A step is the median of those after auto has chosen, of means of two at a
time, as "sparsecomm" may exchange in every second step. Each run is told that
it will have 1,000 steps, and stops earlier. Prints a Markdown table: each step's time, auto's by the faster of ddp and
its bfloat16, auto's by the best row, each prediction by its measurement and that of the chosen method by its later
steps, and what measuring and trying would cost a run of 1,000 steps. --resume goes on with the file of runs.

`--scenarios` are networks that are not equal or do not stay as they are: one slow rank of four, two nodes of two ranks,
and cables that fall from 1 Gbit to 50 Mbit in mid-run. There, the table says after how many steps auto had chosen.
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
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any, NamedTuple

# torch warns that the lab's hosts have no names.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import pytorch_lightning as pl
import torch
from cable import Cable
from models import EXCERPT, MODELS, Loaded
from network import FORK, UNLIMITED, Lab, LabError
from runs import load, save, versions
from training import STRATEGIES, fit, keep_freed_memory

from lightning_sparsecomm.planning.chooser import AutoChooser

AUTO = "auto()"
ROWS = ["ddp", "ddp, bf16 hook", "sparsecomm", AUTO]
LENGTH = 1000

SCENARIOS: dict[str, tuple[int, Callable[[], Lab]]] = {
    "one slow rank": (4, lambda: Lab(4, "1gbit", {3: Cable("20mbit")})),
    "two nodes of two": (4, lambda: Lab(4, "100mbit", ranks_per_node=2)),
    "falls to 50mbit": (2, lambda: Lab(2, "50mbit")),
}
"""Their ranks and networks. The last one begins with `FAST` for auto; other rows have it as it is in the end."""

FALLS, FAST = "falls to 50mbit", "1gbit"
STEPS_BEFORE_IT_FALLS = 15
"""After the first choice."""

# Steps that count for a row, and a bound on what they may take on a slow network; but at least three.
STEPS, WARM_UP, SECONDS, LEAST = 12, 3, 25.0, 3


class Run(NamedTuple):
    """One row in one cell.

    Attributes:
        model, ranks, network, row: What was run; the network is a cable or a scenario.
        seconds: Of the steps that count.
        before: Seconds of all steps before them, measuring the network included.
        record: Of auto: what it knew, measured and chose; None for other rows.
        skipped: Steps before those that count.
        choosing: Of auto: steps from the begin, or since the network has changed, to the choice.
    """

    model: str
    ranks: int
    network: str
    row: str
    seconds: list[float]
    before: float
    record: dict[str, Any] | None
    skipped: int
    choosing: int | None = None

    @property
    def step(self) -> float:
        # Of two steps that follow each other, as some rows exchange in every second one.
        pairs = zip(self.seconds[::2], self.seconds[1::2])
        return statistics.median((first + second) / 2 for first, second in pairs)

    @property
    def key(self) -> tuple[str, int, str, str]:
        return self.model, self.ranks, self.network, self.row


class Meter(pl.Callback):
    """Times steps, and ends the run when there are enough.

    Args:
        barrier: Where ranks wait for each other before the first step.
        fall: Set when the network is to change; None where it stays.
    """

    def __init__(self, barrier: Barrier, fall: Event | None) -> None:
        self.barrier = barrier
        self.fall = fall
        self.ends: list[float] = []
        self.settled = self.changed = self.chosen = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A strategy's own hook comes after this: measuring the network and loading kernels count.
        self.barrier.wait(600)
        self.ends = [time.perf_counter()]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.ends.append(time.perf_counter())
        steps = len(self.ends) - 1
        chooser: AutoChooser | None = getattr(trainer.strategy, "chooser", None)
        choices = 0 if chooser is None else sum("chose" in str(entry["why"]) for entry in chooser.record.history)
        falls = self.fall is not None
        if self.fall is not None and choices == 1 and not self.changed:
            self.chosen = self.chosen or steps
            if steps == self.chosen + STEPS_BEFORE_IT_FALLS:
                self.changed = steps
                self.fall.set()
        if not self.settled and (chooser is None or choices > falls):
            self.chosen, self.settled = steps, steps + WARM_UP
        counted = steps - self.settled
        enough = counted >= STEPS or (counted >= LEAST and self.ends[-1] - self.ends[self.settled] > SECONDS)
        # Ranks count alike, but time a little differently.
        stop = torch.tensor(float(self.settled > 0 and enough))
        trainer.should_stop = bool(trainer.strategy.reduce(stop, reduce_op="mean") > 0.4)


def train(rank: int, model: str, lab: Lab, row: str, loaded: Loaded, barrier: Barrier, fall: Event | None) -> Any:
    """What each rank does, on its host."""
    keep_freed_memory()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    meter = Meter(barrier, fall)
    trainer = fit(STRATEGIES[row](), lab.hosts, lab.ranks_per_node, model, loaded, LENGTH, meter)
    times = [after - before for before, after in itertools.pairwise(meter.ends)]
    chooser: AutoChooser | None = getattr(trainer.strategy, "chooser", None)
    if chooser is None:
        return times[meter.settled :], sum(times[: meter.settled]), None, meter.settled, None
    record = chooser.state_dict() | {"measuring": chooser.measuring_seconds}
    return times[meter.settled :], sum(times[: meter.settled]), record, meter.settled, meter.chosen - meter.changed


def measure(model: str, network: str, ranks: int, row: str, loaded: Loaded) -> Run:
    """One row in one cell; rank 0's times.

    Args:
        model: Its name.
        network: A cable, or one of `SCENARIOS`.
        ranks: Number of ranks.
        row: One of `ROWS`.
        loaded: The model's data.
    """
    barrier = FORK.Barrier(ranks)
    falls = FORK.Event() if network == FALLS and row == AUTO else None
    lab = SCENARIOS[network][1]() if network in SCENARIOS else Lab(ranks, network)
    if falls is not None:
        slow, lab = lab, Lab(ranks, FAST)
    with lab:
        if falls is not None:
            lab.change_rate(str(slow.cables[0]), falls.wait)
        found = lab.run(train, model, lab, row, loaded, barrier, falls, timeout=1500)
        if falls is not None and not lab.has_changed:
            raise LabError("the network has not changed while auto trained.")
    return Run(model, ranks, network, row, *found[0])


def table(runs: list[Run]) -> str:
    """The cells whose rows are all there."""
    by = {run.key: run for run in runs}
    header = ["model", "ranks", "network", *(f"{row}, ms" for row in ROWS), "chosen"]
    header += ["by the faster ddp", "by the best", "predicted by measured", "predicted by its later steps"]
    header += ["cost in 1,000 steps", "chosen after"]
    lines = [f"| {' | '.join(header)} |", f"|---|---:|---|{'---:|' * len(ROWS)}---|---:|---:|---:|---:|---:|---:|"]
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
        spent = auto.before - auto.skipped * auto.step
        cells = [cell[0], str(cell[1]), cell[2], *(f"{1000 * step:,.0f}" for step in steps), chosen]
        cells += [f"{steps[-1] / min(steps[:2]):.2f}", f"{steps[-1] / min(steps[:-1]):.2f}"]
        later = record["predicted"][chosen] / auto.step if chosen in record["predicted"] else None
        cells += [", ".join(f"{ratio:.2f}" for ratio in ratios), "" if later is None else f"{later:.2f}"]
        cells += [f"{max(0.0, spent) / (LENGTH * auto.step):.1%}"]
        lines.append(f"| {' | '.join([*cells, f'{auto.choosing} steps'])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="networks to train")
    add("--ranks", nargs="+", type=int, default=[2, 4], metavar="N", help="numbers of processes, one thread each")
    rates = ["10mbit", "100mbit", "1gbit", UNLIMITED]
    add("--rates", nargs="+", default=rates, metavar="RATE", help="rates of each rank's cable")
    add("--rtts", nargs="+", default=["0ms", "20ms", "100ms"], metavar="TIME", help="round-trip times")
    add("--scenarios", nargs="*", choices=list(SCENARIOS), help="these networks instead; all if none is named")
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
        # The lab's switch, which makes length, cannot carry more than 1 Gbit.
        pairs = [
            each for each in itertools.product(options.rates, options.rtts) if each[0] != UNLIMITED or each[1] == "0ms"
        ]
        networks = [(str(Cable(rate, rtt=rtt)), ranks) for ranks in options.ranks for rate, rtt in pairs]
        if options.scenarios is not None:
            networks = [(name, SCENARIOS[name][0]) for name in options.scenarios or SCENARIOS]
        runs = [Run(**stored) for stored in load(options.output, settings, options.resume)]
        loaded = {name: MODELS[name].load(options.data_dir, options.text) for name in options.models}
        for model, (network, ranks), row in itertools.product(options.models, networks, ROWS):
            if any(run.key == (model, ranks, network, row) for run in runs):
                continue
            runs.append(measure(model, network, ranks, row, loaded[model]))
            save([run._asdict() for run in runs], options.output, settings)
            print(f"{model}, {ranks}, {network}, {row}: {runs[-1].step:.3f} s", file=sys.stderr, flush=True)
    except (LabError, OSError, ValueError) as error:
        sys.exit(str(error))
    print(table(runs))
    print(f"\n{json.dumps(versions())}")


if __name__ == "__main__":
    main()
