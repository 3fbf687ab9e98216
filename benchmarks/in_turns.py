"""Compares steps of two or more trainings that take turns, step by step, so that a machine's noise hits all alike.

All train the same model on the same hosts of the lab (network.py; Linux). While one makes a step, the others wait.
Times are means of ten steps in a row of turns; a ratio is that of two such means of the same turns, so a machine that
slows down for seconds slows both. Prints the median ratio to the first one, and the 95% confidence interval of the
median by order statistics. That interval knows nothing of what differs from run to run (docs/results/steps.md): with
--runs, each run is one measurement.

    --package ../before --package ../after --rows "dgc(0.001)"      one row, with two copies of the package
    --rows ddp "dense()" "auto()"                                   rows, with the first one as 1
"""

import argparse
import json
import logging
import math
import os
import statistics
import sys
import time
import traceback
import warnings
from multiprocessing.synchronize import Barrier, Semaphore
from pathlib import Path
from typing import Any, NamedTuple

# torch warns that the lab's hosts have no names.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import pytorch_lightning as pl
import torch
from models import EXCERPT, MODELS, Loaded
from network import FORK, UNLIMITED, Lab, LabError
from runs import Package, versions
from training import STRATEGIES, fit, keep_freed_memory

# Some methods exchange in one step of ten.
ROUND_STEPS = 10


class Contestant(NamedTuple):
    """One training: a row of training.py, and the copy of the package that it imports."""

    row: str
    package: Package


class Turns(pl.Callback):
    """Makes a step when it is this training's turn, and hands over to the next one.

    Args:
        mine: Released when it is this rank's turn.
        next: What it releases after its step.
        together: Where the training's ranks meet before each step.
        skipped: Steps that are not timed.
    """

    def __init__(self, mine: Semaphore, next: Semaphore, together: Barrier, skipped: int) -> None:
        self.mine, self.next, self.together, self.skipped = mine, next, together, skipped
        self.seconds: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if not self.mine.acquire(timeout=900):
            raise TimeoutError("the other trainings have not handed over for 15 minutes; their error is above.")
        self.together.wait(900)
        self.begin = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step > self.skipped:
            self.seconds.append(time.perf_counter() - self.begin)
        self.next.release()


def train(
    rank: int, model: str, contestants: list[Contestant], ranks: int, loaded: Loaded, sync: "Sync", steps: "Steps"
) -> list[list[float]]:
    """On each host: a process for each training. Returns what each step took, by contestant."""
    results = FORK.SimpleQueue()
    for number, contestant in enumerate(contestants):
        arguments = (results, rank, number, model, contestant, ranks, loaded, sync, steps)
        FORK.Process(target=_train, args=arguments, daemon=True).start()
    found: dict[int, list[float]] = {}
    while len(found) < len(contestants):
        number, seconds, failure = results.get()
        if failure is not None:
            raise RuntimeError(f"{contestants[number].row} failed:\n{failure}")
        found[number] = seconds
    return [found[number] for number in range(len(contestants))]


def _train(results: Any, rank: int, number: int, *arguments: Any) -> None:
    try:
        results.put((number, _seconds(rank, number, *arguments), None))
    except BaseException:
        results.put((number, [], traceback.format_exc()))


def _seconds(
    rank: int,
    number: int,
    model: str,
    contestant: Contestant,
    ranks: int,
    loaded: Loaded,
    sync: "Sync",
    steps: "Steps",
) -> list[float]:
    # Each has a store and connections of its own.
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + number)
    contestant.package.use()
    keep_freed_memory()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    following = (number + 1) % len(sync.turns[rank])
    turns = Turns(sync.turns[rank][number], sync.turns[rank][following], sync.together[number], steps.skipped)
    # One more than is timed: the last step also exchanges what residuals still hold.
    fit(STRATEGIES[contestant.row](), ranks, 1, model, loaded, steps.skipped + steps.timed + 1, turns)
    return turns.seconds[: steps.timed]


class Sync(NamedTuple):
    """By rank and contestant, whose turn it is; by contestant, where its ranks meet."""

    turns: list[list[Semaphore]]
    together: list[Barrier]

    @classmethod
    def of(cls, ranks: int, contestants: int) -> "Sync":
        turns = [[FORK.Semaphore(int(number == 0)) for number in range(contestants)] for _ in range(ranks)]
        return cls(turns, [FORK.Barrier(ranks) for _ in range(contestants)])


class Steps(NamedTuple):
    """How many steps are not timed, and how many are."""

    skipped: int
    timed: int


def rounds(seconds: list[float]) -> list[float]:
    """Means of ten steps each."""
    return [statistics.fmean(seconds[i : i + ROUND_STEPS]) for i in range(0, len(seconds), ROUND_STEPS)]


def interval(values: list[float]) -> tuple[float, float]:
    """The 95% confidence interval of the median, by order statistics (normal approximation of the binomial)."""
    ordered, n = sorted(values), len(values)
    low = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
    return ordered[low], ordered[n - 1 - low]


def lines(model: str, contestants: list[Contestant], runs: list[list[list[float]]]) -> list[str]:
    """A row of the table for each contestant after the first, from its seconds in each run.

    With several runs, each counts as one measurement.
    """
    made = []
    first = [rounds(found[0]) for found in runs]
    for number, contestant in enumerate(contestants[1:], 1):
        other = [rounds(found[number]) for found in runs]
        ratios = [[b / a for a, b in zip(*each, strict=True)] for each in zip(first, other, strict=True)]
        measured = ratios[0] if len(runs) == 1 else [statistics.median(each) for each in ratios]
        low, high = interval(measured)
        names = [f"`{each.row}` {each.package.commit or ''}".strip() for each in (contestants[0], contestant)]
        times = [f"{1000 * statistics.median(mean for run in each for mean in run):.1f}" for each in (first, other)]
        cells = [model, names[0], times[0], names[1], times[1], f"{statistics.median(measured):.3f}"]
        made.append(f"| {' | '.join([*cells, f'{low:.3f} – {high:.3f}'])} |")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rows", nargs="+", choices=list(STRATEGIES), required=True, metavar="ROW", help="rows of training.py")
    add("--package", type=Path, action="append", default=[], metavar="PATH", help="two copies of the package")
    add("--models", nargs="+", choices=list(MODELS), default=["perceptron"], help="networks (default: perceptron)")
    add("--ranks", type=int, default=2, metavar="N", help="processes of each training (default: 2)")
    add("--rate", default=UNLIMITED, metavar="RATE", help=f"of each rank's cable (default: {UNLIMITED})")
    add("--steps", type=int, default=200, metavar="N", help="timed steps of each training (default: 200)")
    add("--runs", type=int, default=1, metavar="N", help="new processes, in the other order each time (default: 1)")
    add("--skipped", type=int, default=20, metavar="N", help="steps before them (default: 20)")
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="folder of Fashion-MNIST (default: data)")
    add("--text", type=Path, default=EXCERPT, metavar="FILE", help="text for the language models, in UTF-8")
    options = parser.parse_args()
    if len(options.package) not in (0, 2) or (not options.package and len(options.rows) < 2):
        parser.error("give two --package, or at least two --rows and no --package")
    if options.steps < 2 * ROUND_STEPS or options.steps % ROUND_STEPS:
        parser.error(f"--steps must be a multiple of {ROUND_STEPS}, at least {2 * ROUND_STEPS}; got {options.steps}")
    if options.runs < 1:
        parser.error(f"--runs must be 1 or more; got {options.runs}")
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    here = Package.at(Path(__file__).resolve().parent.parent)
    steps = Steps(options.skipped, options.steps)
    print("| model | first | ms | second | ms | second by first | 95% |\n|---|---|---:|---|---:|---:|---:|", flush=True)
    try:
        packages = [Package.at(folder) for folder in options.package]
        together = [[Contestant(row, here) for row in options.rows]]
        if packages:
            together = [[Contestant(row, package) for package in packages] for row in options.rows]
        for model in options.models:
            loaded = MODELS[model].load(options.data_dir, options.text)
            for contestants in together:
                runs = []
                for run in range(options.runs):
                    direction = -1 if run % 2 else 1
                    order = contestants[::direction]
                    sync = Sync.of(options.ranks, len(order))
                    with Lab(options.ranks, options.rate) as lab:
                        arguments = (model, order, options.ranks, loaded, sync, steps)
                        runs.append(lab.run(train, *arguments, timeout=3600)[0][::direction])
                print("\n".join(lines(model, contestants, runs)), flush=True)
    except (LabError, OSError, ValueError) as error:
        sys.exit(str(error))
    print(f"\n{json.dumps(versions())}")


if __name__ == "__main__":
    main()
