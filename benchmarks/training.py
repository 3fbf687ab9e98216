"""Seconds per step of ddp, of ddp with torch's own compression, and of each method, on networks of several rates.

Each rank runs on a host of its own in the lab of network.py, which needs Linux and root. All rows train the same model
on the same batches for as many steps, through Lightning's Trainer. Each run is written to a JSON file as it ends:
`--resume` goes on after the last one. Prints a Markdown table of them, and draws it.
"""

import argparse
import ctypes
import itertools
import json
import logging
import math
import os
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

# torch looks up the names of hosts, which have none here, and says so.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import pytorch_lightning as pl
import torch
from hooks import bf16_hook
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from models import EXCERPT, MODELS, Loaded, Trained
from network import (
    DEVICE,
    FORK,
    HEADER_BYTES,
    MESSAGE_BYTES,
    UNLIMITED,
    Counters,
    Lab,
    LabError,
    bits_per_second,
    machine,
    messages_of,
    patience_seconds,
)
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from pytorch_lightning.strategies import DDPStrategy, Strategy
from runs import COMMIT, forget_most_memory, load, made_with, most_memory_bytes, save, versions
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_sparsecomm import Method, methods
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from lightning_sparsecomm.wire import Ledger

# DDP's buckets are rebuilt after the first step, PowerSGD begins with the third, and methods that exchange every 10
# steps touch their memory for the first time in the tenth.
WARM_UP_STEPS = 10

ALONE, BASELINE = "no communication", "ddp"
EMPHASIZED = "dgc(0.001)"  # stands out in the plot

KEEPS = "keeps"
MALLOC_HELP = "whether it keeps what is freed, or may give gradients' memory back to the system in each step"
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3

# Of DDP, in all rows: weights are equal by their seed, and are not sent before the first step.
OPTIONS: dict[str, Any] = {"init_sync": False}


class Apart(DDPStrategy):
    """The same processes and the same model in DDP, which never reduces a gradient: each trains alone."""

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        wrapped = super()._setup_model(model)
        wrapped.require_backward_grad_sync = False
        return wrapped


class Hooked(DDPStrategy):
    """ddp with one of torch's communication hooks, which Lightning registers on GPUs only.

    Args:
        hook: The hook.
        state: Makes what it is given.
        options: Of DDP.
    """

    def __init__(self, hook: Callable[..., Any], state: Callable[[], object] = lambda: None, **options: float) -> None:
        super().__init__(**options)
        self._hook, self._state = hook, state

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(self._state(), self._hook)


def power_sgd() -> Strategy:
    """As torch has it, but from the third step on. All gradients are in one bucket: with several it hangs on Gloo."""
    return Hooked(powerSGD_hook, lambda: PowerSGDState(None, start_powerSGD_iter=2), bucket_cap_mb=10_000, **OPTIONS)


def ours(method: Callable[[], Method]) -> Callable[[], Strategy]:
    return lambda: SparseCommStrategy(method=method(), **OPTIONS)


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    ALONE: lambda: Apart(**OPTIONS),
    BASELINE: lambda: DDPStrategy(**OPTIONS),
    "ddp, bf16 hook": lambda: Hooked(bf16_hook, **OPTIONS),
    "ddp, PowerSGD hook, rank 1": power_sgd,
    "dense()": ours(methods.dense),
    "dense('bfloat16')": ours(lambda: methods.dense("bfloat16")),
    "dgc(0.001)": ours(lambda: methods.dgc(0.001, warmup_steps=0)),
    "dgc(0.001, clip=1)": ours(lambda: methods.dgc(0.001, warmup_steps=0, clip=1.0)),
    "gradient_dropping(0.01)": ours(lambda: methods.gradient_dropping(0.01)),
    "gradient_dropping(0.001)": ours(lambda: methods.gradient_dropping(0.001)),
    "sketched_sgd(0.001)": ours(lambda: methods.sketched_sgd(0.001)),
    "s2_reducer()": ours(methods.s2_reducer),
    "sbc1()": ours(methods.sbc1),
    "sbc2()": ours(methods.sbc2),
    "federated_averaging(every=10)": ours(lambda: methods.federated_averaging(every=10)),
    "diloco(every=10)": ours(lambda: methods.diloco(every=10)),
    "sparse_loco(every=10)": ours(lambda: methods.sparse_loco(every=10)),
}
"""Rows. Those that exchange every 30 to 500 steps by default do it every 10 here, so that it is measured."""


ROUND_STEPS = 10
EVERY_TEN = [row for row in STRATEGIES if "every=10" in row or row == "sbc2()"]
"""Rows of which only whole rounds can be compared."""


class Setting(NamedTuple):
    """Where rows are compared with each other."""

    model: str
    ranks: int
    rate: str


class Marks(NamedTuple):
    """What one rank has sent until some moment.

    Attributes:
        counters: Of its network device.
        link_bytes: By the ledger, for whatever purpose; None of ddp, which has no ledger.
        framing_bytes: What Gloo says besides, on average over ranks.
        exchange_seconds: Spent in exchanges, waiting included, by the ledger.
        cpu_seconds: Of the whole process.
    """

    counters: Counters
    link_bytes: float | None
    framing_bytes: float
    exchange_seconds: float
    cpu_seconds: float

    @classmethod
    def read(cls, strategy: Strategy) -> "Marks":
        ledger = strategy.ledger if isinstance(strategy, SparseCommStrategy) else None
        return cls(
            Counters.read(DEVICE),
            None if ledger is None else sum(ledger.link_bytes(row) for row in ledger.rows),
            0.0 if ledger is None else framing_bytes(ledger),
            0.0 if ledger is None else ledger.exchange_seconds,
            time.process_time(),
        )


def framing_bytes(ledger: Ledger) -> float:
    """What Gloo sends besides the messages of the ledger's calls, on average over ranks."""
    calls = [(kind, traffic.calls) for kinds in ledger.rows.values() for kind, traffic in kinds.items()]
    return MESSAGE_BYTES * sum(count * messages_of(kind, ledger.world_size) for kind, count in calls)


class Measured(NamedTuple):
    """One rank's part of a run, between two moments in which all ranks were silent.

    Attributes:
        seconds: Of each step.
        counted_bytes: What its network device sent, without headers.
        repeated: TCP segments sent again, which are counted twice.
        link_bytes, framing_bytes: What its ledger says was sent, and what Gloo adds; None of ddp.
        exchange_seconds, cpu_seconds: As in `Marks`.
        memory_bytes: The most that the process had.
        loss: Of the last step's batch.
    """

    seconds: list[float]
    counted_bytes: int
    repeated: int
    link_bytes: float | None
    framing_bytes: float
    exchange_seconds: float
    cpu_seconds: float
    memory_bytes: int
    loss: float


class Meter(pl.Callback):
    """Measures one rank's steps, from the end of the warm-up to the end of the run."""

    def __init__(self, barrier: Barrier, steps: int) -> None:
        self.barrier, self.steps = barrier, steps
        self.ends: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == WARM_UP_STEPS:
            self.begin = self.mark(trainer)
        if trainer.global_step >= WARM_UP_STEPS:
            self.ends.append(time.perf_counter())
        if trainer.global_step == WARM_UP_STEPS + self.steps:
            end = self.mark(trainer)
            counted = end.counters.since(self.begin.counters)
            known = end.link_bytes is not None and self.begin.link_bytes is not None
            self.measured = Measured(
                seconds=[after - before for before, after in pairwise(self.ends)],
                counted_bytes=counted.sent_bytes - HEADER_BYTES * counted.packets,
                repeated=counted.repeated,
                link_bytes=end.link_bytes - self.begin.link_bytes if known else None,
                framing_bytes=end.framing_bytes - self.begin.framing_bytes,
                exchange_seconds=end.exchange_seconds - self.begin.exchange_seconds,
                cpu_seconds=end.cpu_seconds - self.begin.cpu_seconds,
                memory_bytes=most_memory_bytes(),
                loss=float(outputs["loss"]),
            )

    def mark(self, trainer: pl.Trainer) -> Marks:
        """While no rank sends."""
        self.barrier.wait(600)
        marks = Marks.read(trainer.strategy)
        self.barrier.wait(600)
        return marks


def keep_freed_memory() -> None:
    """Has this process keep what it frees, as `MALLOC_TRIM_THRESHOLD_` and `MALLOC_MMAP_THRESHOLD_` do from its start.

    Otherwise glibc gives the memory of gradients back in each step, and takes it anew page by page, or it does not: by
    where they happen to lie, with ddp as with methods. Without effect where the C library is another.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        # Before glibc 2.35, 32 MiB was the most, and more was refused.
        library.mallopt(_MMAP_THRESHOLD, 2**31 - 1) or library.mallopt(_MMAP_THRESHOLD, 2**25)


def train(
    rank: int,
    setting: Setting,
    row: str,
    loaded: Loaded,
    steps: int,
    batch_size: int,
    malloc: str,
    barrier: Barrier,
    callbacks: Sequence[pl.Callback] = (),
) -> Measured:
    """What one rank does, on its host."""
    if malloc == KEEPS:
        keep_freed_memory()
    # What the process that forked has had is not counted.
    forget_most_memory()
    torch.manual_seed(0)
    model = MODELS[setting.model]
    meter = Meter(barrier, steps)
    trainer = pl.Trainer(
        strategy=STRATEGIES[row](),
        accelerator="cpu",
        devices=1,
        num_nodes=setting.ranks,
        plugins=[TorchElasticEnvironment()],
        max_steps=WARM_UP_STEPS + steps,
        callbacks=[meter, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Trained(model.network(loaded.classes), model.learning_rate)
    trainer.fit(module, DataLoader(loaded.data, batch_size, shuffle=True, drop_last=True))
    return meter.measured


class Run(NamedTuple):
    """One row's training run in one setting.

    Attributes:
        model, ranks, rate: The setting.
        row: Its name in STRATEGIES.
        repetition: Which of several.
        parameters: Of the model.
        batch_size: Samples per rank and step.
        measured: By rank.
        commit: With which it was made; None if that is not known.
    """

    model: str
    ranks: int
    rate: str
    row: str
    repetition: int
    parameters: int
    batch_size: int
    measured: list[Measured]
    commit: str | None = None

    @classmethod
    def of(cls, stored: dict[str, Any]) -> "Run":
        return cls(**stored | {"measured": [Measured(**each) for each in stored["measured"]]})

    def stored(self) -> dict[str, Any]:
        """What `of` takes."""
        return self._asdict() | {"measured": [each._asdict() for each in self.measured]}

    @property
    def setting(self) -> Setting:
        return Setting(self.model, self.ranks, self.rate)

    @property
    def key(self) -> "Key":
        return self.setting, self.row, self.repetition

    @property
    def seconds(self) -> list[float]:
        """Of each step, on rank 0: ranks wait for each other."""
        return self.measured[0].seconds

    def mean_of(self, name: str) -> float:
        """Of what ranks have measured, per step."""
        return statistics.mean(getattr(each, name) for each in self.measured) / len(self.seconds)

    @property
    def explained(self) -> float | None:
        """What the network devices counted, less what Gloo adds to messages, by what the ledgers say; None of ddp."""
        known = [each.link_bytes for each in self.measured if each.link_bytes is not None]
        if not sum(known):
            return None
        counted = sum(each.counted_bytes - each.framing_bytes for each in self.measured)
        return counted / sum(known)


class Options(NamedTuple):
    """What the command line asks for."""

    models: list[str]
    ranks: list[int]
    rates: list[str]
    rows: list[str]
    steps: int
    repetitions: int
    batch_size: int | None
    malloc: str
    data_dir: Path
    text: Path
    output: Path
    resume: bool
    only_print: bool

    def settings(self) -> dict[str, str | int | None]:
        """All that the result of a run depends on, besides its row and its setting."""
        return {
            "steps": self.steps,
            "batch_size": self.batch_size,
            "text": self.text.name,
            "malloc": self.malloc,
            **machine(),
            **versions(),
        }

    @property
    def path(self) -> Path:
        """The file of all runs."""
        return self.output / "training.json"


def measure(setting: Setting, row: str, repetition: int, loaded: Loaded, options: Options) -> Run:
    """One training run in a lab of its own."""
    model = MODELS[setting.model]
    batch_size = options.batch_size or model.batch_size
    parameters = sum(parameter.numel() for parameter in model.network(loaded.classes).parameters())
    barrier = FORK.Barrier(setting.ranks)
    # Batches of the default size take a rank less than half a second, and here ranks share cores.
    computing_seconds = 3.0 * setting.ranks * max(1, batch_size / model.batch_size)
    timeout = patience_seconds(WARM_UP_STEPS + options.steps, parameters, setting.rate, computing_seconds)
    with Lab(setting.ranks, setting.rate) as lab:
        arguments = (setting, row, loaded, options.steps, batch_size, options.malloc, barrier)
        measured = lab.run(train, *arguments, timeout=timeout)
    return Run(*setting, row, repetition, parameters, batch_size, measured, COMMIT)


def table(runs: list[Run]) -> str:
    """A line for each row in each setting, as Markdown."""
    header = ["model", "ranks", "rate", "strategy", "ms per step, mean", "median", "quartiles", "by no communication"]
    header += ["ddp by it", "a rank's processor ms", "ms in exchanges", "MB sent per rank and step", "by the ledger"]
    header += ["counted by ledger", "peak memory, MB", "above ddp", "loss"]
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * 4}{'---:|' * (len(header) - 4)}"]
    grouped: dict[Setting, dict[str, list[Run]]] = {}
    for run in runs:
        grouped.setdefault(run.setting, {}).setdefault(run.row, []).append(run)
    for setting, rows in grouped.items():
        for row in rows:
            lines.append(f"| {' | '.join([*map(str, setting), f'`{row}`', *cells(row, rows)])} |")
    return "\n".join(lines)


def cells(row: str, rows: dict[str, list[Run]]) -> list[str]:
    """Of one row's repetitions, beside the other rows of its setting."""
    several = rows[row]
    steps = [1000 * seconds for run in several for seconds in run.seconds]
    lower, median, upper = statistics.quantiles(steps, method="inclusive")
    # Of steps that exchange nothing, where most do.
    spread = ["—", "—"] if row in EVERY_TEN else [f"{median:,.1f}", f"{lower:,.1f} – {upper:,.1f}"]
    mean = statistics.mean(steps)

    def mean_seconds(of: str) -> float | None:
        return statistics.mean(seconds for run in rows[of] for seconds in run.seconds) if of in rows else None

    alone, ddp = mean_seconds(ALONE), mean_seconds(BASELINE)
    ledger = [run.mean_of("link_bytes") for run in several if run.measured[0].link_bytes is not None]
    explained = [run.explained for run in several if run.explained is not None]
    memory = statistics.mean(max(each.memory_bytes for each in run.measured) for run in several)
    above = None
    if BASELINE in rows:
        above = memory - statistics.mean(max(each.memory_bytes for each in run.measured) for run in rows[BASELINE])
    loss = statistics.mean(each.loss for run in several for each in run.measured)
    exchanging = f"{1000 * statistics.mean(run.mean_of('exchange_seconds') for run in several):,.1f}"
    return [
        f"{mean:,.1f}",
        *spread,
        "—" if alone is None else f"{mean / 1000 / alone:.2f}",
        "—" if ddp is None else f"{1000 * ddp / mean:.2f} x",
        f"{1000 * statistics.mean(run.mean_of('cpu_seconds') for run in several):,.1f}",
        exchanging if ledger else "—",
        f"{statistics.mean(run.mean_of('counted_bytes') for run in several) / 1e6:,.4f}",
        f"{statistics.mean(ledger) / 1e6:,.4f}" if ledger else "—",
        f"{statistics.mean(explained):.3f}" if explained else "—",
        f"{memory / 1e6:,.0f}",
        "—" if above is None else f"{above / 1e6:+,.0f}",
        f"{loss:.3f}",
    ]


def short_table(runs: list[Run]) -> str:
    """A line for each row, and a column for each setting, as Markdown."""
    means: dict[Setting, dict[str, float]] = {}
    for setting in dict.fromkeys(run.setting for run in runs):
        here = [run for run in runs if run.setting == setting]
        means[setting] = {
            row: statistics.mean(seconds for run in here if run.row == row for seconds in run.seconds)
            for row in dict.fromkeys(run.row for run in here)
        }
    lines = [f"| strategy | {' | '.join(', '.join(map(str, setting)) for setting in means)} |"]
    lines.append(f"|---|{'---:|' * len(means)}")
    for row in dict.fromkeys(run.row for run in runs):
        texts = []
        for rows in means.values():
            text = f"{1000 * rows[row]:,.0f}" if row in rows else "—"
            if row in rows and BASELINE in rows and row != BASELINE:
                text += f" ({rows[BASELINE] / rows[row]:.1f} x)"
            texts.append(text)
        lines.append(f"| `{row}` | {' | '.join(texts)} |")
    return "\n".join(lines)


def draw(runs: list[Run], path: Path) -> None:
    """Seconds per step of each row against the rate: a panel for each network, a line of panels for each number of
    ranks."""
    models = list(dict.fromkeys(run.model for run in runs))
    worlds = sorted({run.ranks for run in runs}, reverse=True)
    rates = sorted({run.rate for run in runs}, key=lambda rate: bits_per_second(rate) or math.inf)
    rows = list(dict.fromkeys(run.row for run in runs))
    figure = Figure(figsize=(max(8, 3 * len(models)), 3.2 * len(worlds) + 1.2), layout="constrained")
    panels = figure.subplots(len(worlds), len(models), sharex=True, sharey=True, squeeze=False)
    for (ranks, model), axes in zip(itertools.product(worlds, models), panels.flat):
        for number, row in enumerate(rows):
            here = [run for run in runs if (run.model, run.ranks, run.row) == (model, ranks, row)]
            means = {rate: [second for run in here if run.rate == rate for second in run.seconds] for rate in rates}
            measured = [(place, statistics.mean(means[rate])) for place, rate in enumerate(rates) if means[rate]]
            style: dict[str, Any] = {"color": colormaps["tab20"].colors[number % 20], "linewidth": 1.2}
            if row.startswith("dense"):
                # Under it lies ddp's line, or its bfloat16 hook's.
                style["linestyle"] = ":"
            if row == EMPHASIZED:
                style |= {"color": "red", "linewidth": 2.5, "zorder": 3}
            if row in (ALONE, BASELINE):
                style = {"color": "black", "linewidth": 2, "linestyle": "--" if row == ALONE else "-"}
            # A row that has not been run here is in the legend all the same.
            axes.plot(*(zip(*measured) if measured else ([], [])), marker="o", markersize=4, label=row, **style)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda seconds, _: f"{1000 * seconds:,.0f}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks(range(len(rates)), rates)
        axes.set_title(f"{model}, {ranks} ranks", fontsize="medium")
        axes.grid(alpha=0.3, which="both")
    for axes in panels[:, 0]:
        axes.set_ylabel("ms per step, mean")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize="small")
    figure.savefig(path, dpi=90)


def parse() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="what is trained")
    add("--ranks", nargs="+", type=int, default=[2, 4], metavar="N", help="processes, one thread each")
    rates = ["100mbit", "1gbit", "10gbit", UNLIMITED]
    add("--rates", nargs="+", default=rates, metavar="RATE", help="of each rank's cable, both ways")
    add("--rows", nargs="+", default=list(STRATEGIES), metavar="NAME", help="of the table")
    add("--steps", type=int, default=10, metavar="N", help=f"that are measured, after {WARM_UP_STEPS} others")
    add("--repetitions", type=int, default=1, metavar="N", help="runs of each row, by turns")
    sizes = ", ".join(f"{model.batch_size} of {name}" for name, model in MODELS.items())
    batch_size = f"samples per rank and step (default: {sizes})"
    add("--batch-size", type=int, default=argparse.SUPPRESS, metavar="N", help=batch_size)
    add("--malloc", choices=[KEEPS, "default"], default=KEEPS, help=MALLOC_HELP)
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="of Fashion-MNIST, downloaded if missing")
    add("--text", type=Path, default=EXCERPT, metavar="FILE", help="that the language models read, in UTF-8")
    add("--output", type=Path, default=Path("training"), metavar="DIR", help="for training.json and training.png")
    add("--resume", action="store_true", help="skip runs that are in training.json already")
    add("--only-print", action="store_true", help="run nothing: print and draw what training.json has")
    options = Options(**{"batch_size": None, **vars(parser.parse_args())})
    if min(options.repetitions, options.batch_size or 1) < 1 or options.steps < 2:
        parser.error("repetitions and the batch size are at least 1, steps at least 2")
    unknown = [row for row in options.rows if row not in STRATEGIES]
    if unknown:
        parser.error(f"--rows are {', '.join(map(repr, STRATEGIES))}; got {unknown[0]!r}")
    if options.steps % ROUND_STEPS and set(options.rows) & set(EVERY_TEN):
        parser.error(f"--steps must be a multiple of {ROUND_STEPS}, after which {', '.join(EVERY_TEN)} exchange")
    try:
        for ranks, rate in itertools.product(options.ranks, options.rates):
            Lab(ranks, rate)
    except ValueError as error:
        parser.error(str(error))
    return options


Key = tuple[Setting, str, int]
"""Of a run: its setting, row and repetition."""


def wanted(options: Options) -> list[Key]:
    """The runs that the command line asks for, in their order: rows by turns, in every second repetition backwards."""
    settings = itertools.starmap(Setting, itertools.product(options.models, options.ranks, options.rates))
    return [
        (setting, row, repetition)
        for setting in settings
        for repetition in range(options.repetitions)
        for row in options.rows[:: -1 if repetition % 2 else 1]
    ]


def run_all(runs: list[Run], options: Options) -> None:
    """Adds the runs that are missing, and writes all as each ends.

    Raises:
        OSError: Data that is missing, and cannot be fetched.
        ValueError: Data that is damaged, or too little of it for a batch on each rank.
    """
    loaded = {name: MODELS[name].load(options.data_dir, options.text) for name in options.models}
    for name, ranks in itertools.product(options.models, options.ranks):
        batch_size, samples = options.batch_size or MODELS[name].batch_size, len(loaded[name].data)
        if samples // ranks < batch_size:
            raise ValueError(f"--batch-size {batch_size} is too large: {name} has {samples} samples for {ranks} ranks.")
    options.output.mkdir(parents=True, exist_ok=True)
    done = {run.key for run in runs}
    for key in wanted(options):
        if key in done:
            continue
        setting, row, repetition = key
        runs.append(measure(setting, row, repetition, loaded[setting.model], options))
        save([run.stored() for run in runs], options.path, options.settings())
        step = statistics.mean(runs[-1].seconds)
        print(f"{', '.join(map(str, setting))}, {row}: {step:.3f} s", file=sys.stderr, flush=True)


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    # Lightning's advice on devices, workers and loggers.
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    settings = options.settings()
    try:
        if options.only_print:
            if not options.path.exists():
                sys.exit(f"{options.path} does not exist. Run without --only-print first, or name another --output.")
            # Whatever the machine, and the command line, that they were made with.
            settings = json.loads(options.path.read_text())["settings"]
            runs = [Run.of(stored) for stored in load(options.path, {}, resume=True)]
        else:
            runs = [Run.of(stored) for stored in load(options.path, settings, options.resume)]
            run_all(runs, options)
    except (LabError, OSError, ValueError) as error:
        sys.exit(str(error))
    asked = dict.fromkeys((setting, row) for setting, row, _ in wanted(options))
    shown = [run for key in asked for run in runs if (run.setting, run.row) == key]
    if not shown:
        sys.exit(f"{options.path} has none of the runs that were asked for.")
    for name, run in {run.model: run for run in shown}.items():
        print(f"{name}: {run.parameters:,} parameters, batches of {run.batch_size} {MODELS[name].samples} per rank")
    described = ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)
    repeated = sorted(Counter((run.setting, run.row) for run in shown).values())
    print(f"{repeated[0]} to {repeated[-1]} runs of each row, after {WARM_UP_STEPS} steps each; {described}\n")
    print(table(shown))
    print("\nMean ms per step, and how many times faster than ddp:\n")
    print(short_table(shown))
    print(f"\n{made_with(run.commit for run in shown)}")
    draw(shown, options.output / "training.png")


if __name__ == "__main__":
    main()
