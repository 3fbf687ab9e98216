"""Profiles one step of training.py by function: time of its own, and with what it calls.

Python's profiler runs in the first rank's main thread. It does not see Gloo's threads, and overstates functions that
are called often. Needs Linux, as training.py does.
"""

import argparse
import cProfile
import logging
import pstats
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from models import EXCERPT, MODELS
from network import FORK, Lab, LabError
from runs import Package
from training import CHECKOUT, KEEPS, MALLOC_HELP, STRATEGIES, WARM_UP_STEPS, Barrier, Job, Measured, Setting, train


class Share(NamedTuple):
    """A function's part of a step.

    Attributes:
        function: Where it is defined, and its name.
        calls: Per step.
        own_ms: Processor time per step, without what it calls.
        all_ms: Processor time per step, with what it calls.
    """

    function: str
    calls: float
    own_ms: float
    all_ms: float


class Profiler(pl.Callback):
    """Profiles this process in the steps after the warm-up."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.profile = cProfile.Profile(time.thread_time)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == WARM_UP_STEPS:
            self.profile.enable()
        if trainer.global_step == WARM_UP_STEPS + self.steps:
            self.profile.disable()

    def shares(self) -> list[Share]:
        stats: dict[tuple[str, int, str], tuple[int, int, float, float, Any]] = pstats.Stats(self.profile).stats  # type: ignore[attr-defined]
        return [
            Share(named(*function), calls / self.steps, 1000 * own / self.steps, 1000 * whole / self.steps)
            for function, (_, calls, own, whole, _) in stats.items()
        ]


def named(path: str, line: int, name: str) -> str:
    """A function as `folder/file:line name`; built-in functions have their name alone."""
    return name.strip("<>") if path == "~" else f"{'/'.join(Path(path).parts[-2:])}:{line} {name}"


def profiled(rank: int, job: Job, barrier: Barrier) -> tuple[Measured, list[Share]]:
    """`train`, and this rank's profile."""
    profiler = Profiler(job.steps)
    measured = train(rank, job, barrier, [profiler])
    return measured, profiler.shares()


def table(shares: list[Share], rows: int) -> str:
    """The functions with most time of their own, as Markdown."""
    lines = ["| function | calls per step | ms of its own | with what it calls |", "|---|---:|---:|---:|"]
    for share in sorted(shares, key=lambda share: -share.own_ms)[:rows]:
        lines.append(f"| `{share.function}` | {share.calls:,.1f} | {share.own_ms:.2f} | {share.all_ms:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", choices=list(MODELS), default="perceptron", help="network to train")
    add("--ranks", type=int, default=2, metavar="N", help="number of processes, one thread each")
    add("--rate", default="unlimited", metavar="RATE", help="rate of each rank's cable, in both directions")
    add("--row", choices=list(STRATEGIES), default="dgc(0.001)", metavar="NAME", help="row of training.py's table")
    add("--malloc", choices=[KEEPS, "default"], default=KEEPS, help=MALLOC_HELP)
    add("--steps", type=int, default=20, metavar="N", help=f"profiled steps, after {WARM_UP_STEPS} warm-up steps")
    add("--functions", type=int, default=15, metavar="N", help="lines of the table")
    add(
        "--data-dir",
        type=Path,
        default=Path("data"),
        metavar="DIR",
        help="folder of Fashion-MNIST, downloaded if missing",
    )
    add("--text", type=Path, default=EXCERPT, metavar="FILE", help="text for the language models, in UTF-8")
    options = parser.parse_args()
    if min(options.steps, options.functions) < 1:
        parser.error("--steps and --functions must be at least 1")
    try:
        lab = Lab(options.ranks, options.rate)
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    model = MODELS[options.model]
    setting = Setting(options.model, options.ranks, options.rate)
    try:
        loaded = model.load(options.data_dir, options.text)
        package = Package.at(CHECKOUT)
        job = Job(setting, options.row, package, loaded, options.steps, model.batch_size, options.malloc)
        with lab:
            measured, shares = lab.run(profiled, job, FORK.Barrier(options.ranks), timeout=job.timeout)[0]
    except (LabError, OSError, ValueError) as error:
        sys.exit(str(error))
    mean_ms = 1000 * sum(measured.seconds) / options.steps
    cpu_ms = 1000 * measured.cpu_seconds / options.steps
    setting_in_words = f"{options.row}, {options.model}, {options.ranks} ranks, {options.rate}"
    print(f"{setting_in_words}: {mean_ms:.1f} ms per step with the profiler,")
    print(f"{cpu_ms:.1f} ms of the first rank's processor, all threads together\n")
    print(table(shares, options.functions))


if __name__ == "__main__":
    main()
