"""What a rank's processor does in a step of training.py, by function, with its own time and that of what it calls.

Measured by Python's profiler in the first rank's main thread: what Gloo's threads do is not in it, and functions that
are called often are shown longer than they are. Needs Linux and root, as training.py does.
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
from models import EXCERPT, MODELS, Loaded
from network import FORK, Lab, LabError, patience_seconds
from training import KEEPS, MALLOC_HELP, STRATEGIES, WARM_UP_STEPS, Barrier, Measured, Setting, train


class Share(NamedTuple):
    """A function's part of a step.

    Attributes:
        function: Where it is defined, and its name.
        calls: Per step.
        own_ms: Of the processor, per step, without what it calls.
        all_ms: With what it calls.
    """

    function: str
    calls: float
    own_ms: float
    all_ms: float


class Profiler(pl.Callback):
    """Notes what this process does in the steps after the warm-up."""

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
    """A function's name after its line and the last two parts of its file's name; built-in ones have none."""
    return name.strip("<>") if path == "~" else f"{'/'.join(Path(path).parts[-2:])}:{line} {name}"


def profiled(
    rank: int, setting: Setting, row: str, loaded: Loaded, steps: int, batch_size: int, malloc: str, barrier: Barrier
) -> tuple[Measured, list[Share]]:
    """`train`, and what this rank's processor did."""
    profiler = Profiler(steps)
    measured = train(rank, setting, row, loaded, steps, batch_size, malloc, barrier, [profiler])
    return measured, profiler.shares()


def table(shares: list[Share], rows: int) -> str:
    """Those with most time of their own, as Markdown."""
    lines = ["| function | calls per step | ms of its own | with what it calls |", "|---|---:|---:|---:|"]
    for share in sorted(shares, key=lambda share: -share.own_ms)[:rows]:
        lines.append(f"| `{share.function}` | {share.calls:,.1f} | {share.own_ms:.2f} | {share.all_ms:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", choices=list(MODELS), default="perceptron", help="what is trained")
    add("--ranks", type=int, default=2, metavar="N", help="processes, one thread each")
    add("--rate", default="unlimited", metavar="RATE", help="of each rank's cable, both ways")
    add("--row", choices=list(STRATEGIES), default="dgc(0.001)", metavar="NAME", help="of training.py's table")
    add("--malloc", choices=[KEEPS, "default"], default=KEEPS, help=MALLOC_HELP)
    add("--steps", type=int, default=20, metavar="N", help=f"that are profiled, after {WARM_UP_STEPS} others")
    add("--functions", type=int, default=15, metavar="N", help="that are printed")
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="of Fashion-MNIST, downloaded if missing")
    add("--text", type=Path, default=EXCERPT, metavar="FILE", help="that the language models read, in UTF-8")
    options = parser.parse_args()
    if min(options.steps, options.functions) < 1:
        parser.error("--steps and --functions are at least 1")
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
        floats = sum(parameter.numel() for parameter in model.network(loaded.classes).parameters())
        timeout = patience_seconds(WARM_UP_STEPS + options.steps, floats, options.rate, 3.0 * options.ranks)
        arguments = (setting, options.row, loaded, options.steps, model.batch_size, options.malloc)
        with lab:
            measured, shares = lab.run(profiled, *arguments, FORK.Barrier(options.ranks), timeout=timeout)[0]
    except (LabError, OSError, ValueError) as error:
        sys.exit(str(error))
    mean_ms = 1000 * sum(measured.seconds) / options.steps
    cpu_ms = 1000 * measured.cpu_seconds / options.steps
    print(
        f"{options.row}, {options.model}, {options.ranks} ranks, {options.rate}: {mean_ms:.1f} ms per step as profiled,"
    )
    print(f"{cpu_ms:.1f} ms of the first rank's processor, all threads together\n")
    print(table(shares, options.functions))


if __name__ == "__main__":
    main()
