"""Times a training step with ddp, with ddp and torch's own compression, and with each method, at several network rates.

Each rank runs on its own host in the lab of network.py, which needs Linux. All rows train the same model on
the same batches for the same number of steps, through Lightning's Trainer. Each run is written to a JSON file as it
ends; `--resume` skips the runs in that file. Prints a Markdown table and draws a plot.

Two checkouts are compared by `--package OLD --package NEW`: each row runs with one and then with the other, so that a
machine that slows down slows both. The script and its models are those of this checkout. The table gives a step's time
with each checkout, and their ratio; rows that use neither, such as ddp, show how much of it is noise.
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
from typing import TYPE_CHECKING, Any, NamedTuple

# torch warns that the lab's hosts have no names.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import pytorch_lightning as pl
import torch
from cable import Cable
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
    machine,
    messages_of,
    patience_seconds,
)
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from pytorch_lightning.strategies import DDPStrategy, Strategy
from runs import Package, forget_most_memory, load, made_with, most_memory_bytes, save, spread, versions
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from lightning_sparsecomm import Ledger, Method

# Only ranks import lightning_sparsecomm: each may use another copy.

CHECKOUT = Path(__file__).resolve().parent.parent

# DDP rebuilds its buckets after the first step, PowerSGD starts in the third, and methods that exchange every 10 steps
# first touch their memory in the tenth.
WARM_UP_STEPS = 10

ALONE, BASELINE = "no communication", "ddp"
EMPHASIZED = "dgc(0.001)"  # stands out in the plot

KEEPS = "keeps"
MALLOC_HELP = "whether malloc keeps freed memory, or may return that of gradients to the system in each step"
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3

# DDP's, in all rows: seeds make the weights equal, so that they need not be sent before the first step.
OPTIONS: dict[str, Any] = {"init_sync": False}


class Apart(DDPStrategy):
    """The same processes and the same model in DDP, but no gradient is ever reduced: each rank trains alone."""

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        wrapped = super()._setup_model(model)
        wrapped.require_backward_grad_sync = False
        return wrapped


class Hooked(DDPStrategy):
    """ddp with one of torch's communication hooks, which Lightning registers on GPUs only.

    Args:
        hook: The hook.
        state: Makes the hook's state.
        options: DDP's.
    """

    def __init__(self, hook: Callable[..., Any], state: Callable[[], object] = lambda: None, **options: float) -> None:
        super().__init__(**options)
        self._hook, self._state = hook, state

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(self._state(), self._hook)


def power_sgd(rank: int) -> Strategy:
    """torch's PowerSGD, from the third step on. All gradients are in one bucket: with several it hangs on Gloo."""

    def state() -> PowerSGDState:
        return PowerSGDState(None, rank, start_powerSGD_iter=2)

    return Hooked(powerSGD_hook, state, bucket_cap_mb=10_000, **OPTIONS)


def ours(make: Callable[[Any], "Method"]) -> Callable[[], Strategy]:
    """Makes the strategy of a method, which `make` takes from `lightning_sparsecomm.methods`."""

    def strategy() -> Strategy:
        from lightning_sparsecomm import methods
        from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy

        return SparseCommStrategy(method=make(methods), **OPTIONS)

    return strategy


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    ALONE: lambda: Apart(**OPTIONS),
    BASELINE: lambda: DDPStrategy(**OPTIONS),
    "ddp, bf16 hook": lambda: Hooked(bf16_hook, **OPTIONS),
    "ddp, PowerSGD hook, rank 1": lambda: power_sgd(1),
    "ddp, PowerSGD hook, rank 2": lambda: power_sgd(2),
    "dense()": ours(lambda methods: methods.dense()),
    "dense('bfloat16')": ours(lambda methods: methods.dense("bfloat16")),
    "dgc(0.001)": ours(lambda methods: methods.dgc(0.001, warmup_steps=0)),
    "dgc(0.001, delay=1)": ours(lambda methods: methods.dgc(0.001, warmup_steps=0, delay=1)),
    "dgc(0.01)": ours(lambda methods: methods.dgc(0.01, warmup_steps=0)),
    "dgc(0.01, delay=1)": ours(lambda methods: methods.dgc(0.01, warmup_steps=0, delay=1)),
    "dgc(0.001, clip=1)": ours(lambda methods: methods.dgc(0.001, warmup_steps=0, clip=1.0)),
    "gradient_dropping(0.01)": ours(lambda methods: methods.gradient_dropping(0.01)),
    "gradient_dropping(0.001)": ours(lambda methods: methods.gradient_dropping(0.001)),
    "powersgd(rank=1)": ours(lambda methods: methods.powersgd(1)),
    "powersgd(rank=2)": ours(lambda methods: methods.powersgd(2)),
    "ok_topk(0.01)": ours(lambda methods: methods.ok_topk(0.01)),
    "quantized(bits=4)": ours(lambda methods: methods.quantized(4)),
    "sketched_sgd(0.001)": ours(lambda methods: methods.sketched_sgd(0.001)),
    "s2_reducer()": ours(lambda methods: methods.s2_reducer()),
    "sbc1()": ours(lambda methods: methods.sbc1()),
    "sbc2()": ours(lambda methods: methods.sbc2()),
    "federated_averaging(every=10)": ours(lambda methods: methods.federated_averaging(every=10)),
    "diloco(every=10)": ours(lambda methods: methods.diloco(every=10)),
    "sparse_loco(every=10)": ours(lambda methods: methods.sparse_loco(every=10)),
    "sparse_loco(every=30, fragments=3, delay=5)": ours(
        lambda methods: methods.sparse_loco(every=30, fragments=3, delay=5)
    ),
    "sparsecomm": ours(lambda methods: methods.default()),
    "auto()": ours(lambda methods: methods.auto()),
}
"""The rows. Methods that exchange every 30 to 500 steps by default do so every 10 here, to be measured at all."""


WITHOUT_PACKAGE = [ALONE, *(row for row in STRATEGIES if row.startswith(BASELINE))]
"""Rows that do not use lightning_sparsecomm: two packages differ in them by noise alone."""

ROUND_STEPS = 10
EVERY_TEN = [row for row in STRATEGIES if "every=10" in row or row == "sbc2()"]
"""Rows that exchange in one step of ten: only the mean over whole rounds says what a step takes."""


class Setting(NamedTuple):
    """Model and network; rows are compared within one setting."""

    model: str
    ranks: int
    rate: str


class Marks(NamedTuple):
    """What one rank has sent and computed so far.

    Attributes:
        counters: Of its network device.
        link_bytes: By the ledger, for any purpose; None with ddp, which has no ledger.
        framing_bytes: What Gloo sends besides, averaged over ranks.
        exchange_seconds: Time in exchanges by the ledger, waiting included.
        cpu_seconds: Of the whole process.
    """

    counters: Counters
    link_bytes: float | None
    framing_bytes: float
    exchange_seconds: float
    cpu_seconds: float

    @classmethod
    def read(cls, strategy: Strategy) -> "Marks":
        ledger: Ledger | None = getattr(strategy, "ledger", None)
        return cls(
            Counters.read(DEVICE),
            None if ledger is None else sum(ledger.link_bytes(row) for row in ledger.rows),
            0.0 if ledger is None else framing_bytes(ledger),
            0.0 if ledger is None else ledger.exchange_seconds,
            time.process_time(),
        )


def framing_bytes(ledger: "Ledger") -> float:
    """What Gloo sends besides the messages of the ledger's calls, averaged over ranks."""
    calls = [(kind, traffic.calls) for kinds in ledger.rows.values() for kind, traffic in kinds.items()]
    return MESSAGE_BYTES * sum(count * messages_of(kind, ledger.world_size) for kind, count in calls)


class Measured(NamedTuple):
    """One rank's part of a run, between two moments when no rank sends.

    Attributes:
        seconds: Of each step.
        counted_bytes: What its network device sent, without headers.
        repeated: TCP segments sent again, which are counted twice.
        link_bytes: What its ledger says was sent; None with ddp.
        framing_bytes, exchange_seconds, cpu_seconds: As in `Marks`.
        memory_bytes: Peak memory of the process.
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
    """Measures one rank's steps, from the end of the warm-up to the last step but one."""

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
        """Reads the marks while no rank sends."""
        self.barrier.wait(600)
        marks = Marks.read(trainer.strategy)
        self.barrier.wait(600)
        return marks


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory, as `MALLOC_TRIM_THRESHOLD_` and `MALLOC_MMAP_THRESHOLD_` do for a whole process.

    By default, glibc may return the memory of gradients in each step and take it back page by page. Whether it does
    depends on where they happen to lie, with ddp as with methods. No effect with another C library.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        # Before glibc 2.35, more than 32 MiB is refused.
        library.mallopt(_MMAP_THRESHOLD, 2**31 - 1) or library.mallopt(_MMAP_THRESHOLD, 2**25)


def fit(
    strategy: Strategy, hosts: int, per_host: int, model: str, loaded: Loaded, steps: int, callback: pl.Callback
) -> pl.Trainer:
    """Trains one of `MODELS` on this rank of the lab, with nothing but a callback that measures."""
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=per_host,
        num_nodes=hosts,
        plugins=[TorchElasticEnvironment()],
        max_steps=steps,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    kind = MODELS[model]
    module = Trained(kind.network(loaded.classes), kind.learning_rate)
    trainer.fit(module, DataLoader(loaded.data, kind.batch_size, shuffle=True, drop_last=True))
    return trainer


class Job(NamedTuple):
    """One run of one row.

    Attributes:
        setting: Model and network.
        row: Its name in STRATEGIES.
        package: The copy of lightning_sparsecomm that ranks import.
        loaded: The model's data.
        steps: Measured steps.
        batch_size: Samples per rank and step.
        malloc: `keeps` or `default`; see `keep_freed_memory`.
    """

    setting: Setting
    row: str
    package: Package
    loaded: Loaded
    steps: int
    batch_size: int
    malloc: str

    @property
    def timeout(self) -> float:
        """Seconds within which it must end."""
        model = MODELS[self.setting.model]
        # Batches of the default size take a rank less than half a second, and here ranks share cores.
        computing_seconds = 3.0 * self.setting.ranks * max(1, self.batch_size / model.batch_size)
        return patience_seconds(WARM_UP_STEPS + self.steps, self.parameters, self.setting.rate, computing_seconds)

    @property
    def parameters(self) -> int:
        """How many the model has."""
        network = MODELS[self.setting.model].network(self.loaded.classes)
        return sum(parameter.numel() for parameter in network.parameters())


def train(rank: int, job: Job, barrier: Barrier, callbacks: Sequence[pl.Callback] = ()) -> Measured:
    """What each rank does, on its host."""
    # In all rows, so that their peak memory can be compared.
    job.package.use()
    if job.malloc == KEEPS:
        keep_freed_memory()
    # The parent's peak does not count.
    forget_most_memory()
    torch.manual_seed(0)
    model = MODELS[job.setting.model]
    meter = Meter(barrier, job.steps)
    trainer = pl.Trainer(
        strategy=STRATEGIES[job.row](),
        accelerator="cpu",
        devices=1,
        num_nodes=job.setting.ranks,
        plugins=[TorchElasticEnvironment()],
        # One more than is measured: the last step also exchanges, once a run, all that residuals still hold.
        max_steps=WARM_UP_STEPS + job.steps + 1,
        callbacks=[meter, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Trained(model.network(job.loaded.classes), model.learning_rate)
    trainer.fit(module, DataLoader(job.loaded.data, job.batch_size, shuffle=True, drop_last=True))
    return meter.measured


class Run(NamedTuple):
    """One row's training run in one setting.

    Attributes:
        model, ranks, rate: The setting; the rate is all that a cable is, such as `100mbit, rtt 20ms`.
        row: Its name in STRATEGIES.
        repetition: Its number, from 0.
        parameters: How many the model has.
        batch_size: Samples per rank and step.
        measured: By rank.
        commit: Of lightning_sparsecomm; None if unknown.
        package: Name of the copy that was used; None for this checkout's.
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
    package: str | None = None

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
        return self.setting, self.row, self.repetition, self.package

    @property
    def seconds(self) -> list[float]:
        """Of each step, on rank 0: ranks wait for each other."""
        return self.measured[0].seconds

    @property
    def typical_seconds(self) -> float:
        """The median step, or the mean where most steps exchange nothing."""
        return statistics.mean(self.seconds) if self.row in EVERY_TEN else statistics.median(self.seconds)

    def mean_of(self, name: str) -> float:
        """Of one of the measurements, per step and rank."""
        return statistics.mean(getattr(each, name) for each in self.measured) / len(self.seconds)

    @property
    def explained(self) -> float | None:
        """Bytes that network devices counted, without Gloo's framing, over the ledgers' bytes; None with ddp."""
        known = [each.link_bytes for each in self.measured if each.link_bytes is not None]
        if not sum(known):
            return None
        counted = sum(each.counted_bytes - each.framing_bytes for each in self.measured)
        return counted / sum(known)


class Options(NamedTuple):
    """What the command line asks for."""

    packages: dict[str | None, Package]
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
        """All that the result of a run depends on, besides its row, its setting and the commit."""
        return {
            "steps": self.steps,
            "batch_size": self.batch_size,
            "text": self.text.name,
            "malloc": self.malloc,
            **machine(),
            **versions(list(self.packages.values())),
        }

    @property
    def path(self) -> Path:
        """The file of all runs."""
        return self.output / "training.json"


def measure(key: "Key", loaded: Loaded, options: Options) -> Run:
    """One training run in a lab of its own."""
    setting, row, repetition, name = key
    batch_size = options.batch_size or MODELS[setting.model].batch_size
    job = Job(setting, row, options.packages[name], loaded, options.steps, batch_size, options.malloc)
    with Lab(setting.ranks, setting.rate) as lab:
        measured = lab.run(train, job, FORK.Barrier(setting.ranks), timeout=job.timeout)
    return Run(*setting, row, repetition, job.parameters, batch_size, measured, job.package.commit, name)


def comparison(runs: list[Run], old: str | None, new: str | None) -> str:
    """The time of a step with two packages: a line for each row in each setting, as Markdown, and a summary."""
    header = ["model", "ranks", "rate", "strategy", f"{old}: ms per step", "least – most"]
    header += [f"{new}: ms per step", "least – most", f"{new} by {old}", "of each repetition, least – most"]
    header += [f"{new} by {old}, processor time"]
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * 4}{'---:|' * (len(header) - 4)}"]
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for setting, row in dict.fromkeys((run.setting, run.row) for run in runs):
        here = [run for run in runs if (run.setting, run.row) == (setting, row)]
        olds, news = ({run.repetition: run for run in here if run.package == name} for name in (old, new))
        pairs = [(olds[each].typical_seconds, news[each].typical_seconds) for each in olds if each in news]
        if not pairs:
            continue
        before, after = zip(*pairs)
        ratio = statistics.median(after) / statistics.median(before)
        ratios[row in WITHOUT_PACKAGE].append(ratio)
        cells = [*map(str, setting), f"`{row}`"]
        for seconds in (before, after):
            cells += [f"{1000 * statistics.median(seconds):,.1f}", spread([1000 * each for each in seconds], 1)]
        processor = [statistics.median(run.mean_of("cpu_seconds") for run in of.values()) for of in (olds, news)]
        cells += [f"{ratio:.3f}", spread([late / early for early, late in pairs], 3)]
        cells.append(f"{processor[1] / processor[0]:.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    summary = [
        f"{kind}: median {statistics.median(each):.3f}, {spread(each, 3)}"
        for kind, each in (("rows that use a package", ratios[False]), ("rows that use neither", ratios[True]))
        if each
    ]
    return "\n".join([*lines, "", f"{new} by {old}: {'; '.join(summary)}."])


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
    """Draws seconds per step against the rate: a column of panels for each model, a line for each number of ranks."""
    models = list(dict.fromkeys(run.model for run in runs))
    worlds = sorted({run.ranks for run in runs}, reverse=True)
    rates = sorted({run.rate for run in runs}, key=lambda rate: (Cable.of(rate).up_bits or math.inf, rate))
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
                # It hides the line of ddp, or of its bfloat16 hook.
                style["linestyle"] = ":"
            if row == EMPHASIZED:
                style |= {"color": "red", "linewidth": 2.5, "zorder": 3}
            if row in (ALONE, BASELINE):
                style = {"color": "black", "linewidth": 2, "linestyle": "--" if row == ALONE else "-"}
            # The legend also lists rows that were not run here.
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
    package = "folder that holds the lightning_sparsecomm to use; give it twice to compare two (default: this checkout)"
    add("--package", type=Path, action="append", default=argparse.SUPPRESS, metavar="PATH", help=package)
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="networks to train")
    add("--ranks", nargs="+", type=int, default=[2, 4], metavar="N", help="numbers of processes, one thread each")
    rates = ["100mbit", "1gbit", "10gbit", UNLIMITED]
    add("--rates", nargs="+", default=rates, metavar="RATE", help="rates of each rank's cable, in both directions")
    add("--rtt", default="0ms", metavar="TIME", help="round-trip time between two ranks, such as 20ms")
    add("--jitter", default="0ms", metavar="TIME", help="the round-trip time wanders by so much, up and down")
    add("--loss", default="0%", metavar="PERCENT", help="packets lost in each direction, such as 0.1%%")
    add("--rows", nargs="+", default=list(STRATEGIES), metavar="NAME", help="rows of the table")
    add("--steps", type=int, default=10, metavar="N", help=f"measured steps, after {WARM_UP_STEPS} warm-up steps")
    add("--repetitions", type=int, default=1, metavar="N", help="runs of each row, in turns")
    sizes = ", ".join(f"{model.batch_size} of {name}" for name, model in MODELS.items())
    batch_size = f"samples per rank and step (default: {sizes})"
    add("--batch-size", type=int, default=argparse.SUPPRESS, metavar="N", help=batch_size)
    add("--malloc", choices=[KEEPS, "default"], default=KEEPS, help=MALLOC_HELP)
    data = "folder of Fashion-MNIST, downloaded if missing"
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help=data)
    add("--text", type=Path, default=EXCERPT, metavar="FILE", help="text for the language models, in UTF-8")
    add(
        "--output", type=Path, default=Path("training"), metavar="DIR", help="folder for training.json and training.png"
    )
    add("--resume", action="store_true", help="skip runs that training.json already has")
    add("--only-print", action="store_true", help="run nothing: print and draw the runs of training.json")
    arguments = vars(parser.parse_args())
    try:
        packages = packages_of(arguments.pop("package", []))
    except ValueError as error:
        parser.error(f"--package: {error}")
    length = {name: arguments.pop(name) for name in ("rtt", "jitter", "loss")}
    try:
        arguments["rates"] = [str(Cable(rate, **length)) for rate in arguments["rates"]]
    except ValueError as error:
        parser.error(str(error))
    options = Options(packages, **{"batch_size": None, **arguments})
    if min(options.repetitions, options.batch_size or 1) < 1 or options.steps < 2:
        parser.error("--repetitions and --batch-size must be at least 1, and --steps at least 2")
    unknown = [row for row in options.rows if row not in STRATEGIES]
    if unknown:
        parser.error(f"--rows must be among {', '.join(map(repr, STRATEGIES))}; got {unknown[0]!r}")
    if options.steps % ROUND_STEPS and set(options.rows) & set(EVERY_TEN):
        parser.error(
            f"--steps must be a multiple of {ROUND_STEPS}, since {', '.join(EVERY_TEN)} exchange every {ROUND_STEPS}"
            f" steps; got {options.steps}"
        )
    try:
        for ranks, rate in itertools.product(options.ranks, options.rates):
            Lab(ranks, rate)
    except ValueError as error:
        parser.error(str(error))
    return options


def packages_of(folders: list[Path]) -> dict[str | None, Package]:
    """Packages by name: by their folders' names, or where these are equal, by their paths.

    Raises:
        ValueError: More than two, one given twice, or a folder without the package.
    """
    if not folders:
        return {None: Package.at(CHECKOUT)}
    paths = list(dict.fromkeys(folder.resolve() for folder in folders))
    if len(folders) > 2 or len(paths) < len(folders):
        raise ValueError(f"give one folder, or two that differ; got {', '.join(map(str, folders))}.")
    differ = len({path.name for path in paths}) == len(paths)
    return {path.name if differ else str(path): Package.at(path) for path in paths}


Key = tuple[Setting, str, int, str | None]
"""A run's setting, row, repetition, and the name of its package."""


def wanted(options: Options) -> list[Key]:
    """The runs that the command line asks for, in order: rows in turns, each with one package after the other.

    Every second repetition runs backwards.
    """
    settings = itertools.starmap(Setting, itertools.product(options.models, options.ranks, options.rates))
    turns = list(itertools.product(options.rows, options.packages))
    return [
        (setting, row, repetition, package)
        for setting in settings
        for repetition in range(options.repetitions)
        for row, package in turns[:: -1 if repetition % 2 else 1]
    ]


def run_all(runs: list[Run], options: Options) -> None:
    """Runs what is missing, and writes all runs to the file as each ends.

    Raises:
        OSError: Data is missing and cannot be downloaded.
        ValueError: Data is damaged, or too small for a batch on each rank.
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
        setting, row, _, package = key
        runs.append(measure(key, loaded[setting.model], options))
        save([run.stored() for run in runs], options.path, options.settings())
        step = statistics.mean(runs[-1].seconds)
        of = "" if package is None else f", {package}"
        print(f"{', '.join(map(str, setting))}, {row}{of}: {step:.3f} s", file=sys.stderr, flush=True)


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    # Lightning's advice about devices, workers and loggers.
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    settings = options.settings()
    try:
        if options.only_print:
            if not options.path.exists():
                sys.exit(f"{options.path} does not exist. Run without --only-print first, or name another --output.")
            # Not those of this machine and command line, but those the runs were made with.
            settings = json.loads(options.path.read_text())["settings"]
            runs = [Run.of(stored) for stored in load(options.path, {}, resume=True)]
        else:
            runs = [Run.of(stored) for stored in load(options.path, settings, options.resume)]
            run_all(runs, options)
    except (LabError, OSError, ValueError) as error:
        sys.exit(str(error))
    asked = dict.fromkeys((setting, row, package) for setting, row, _, package in wanted(options))
    shown = [run for key in asked for run in runs if (run.setting, run.row, run.package) == key]
    if not shown:
        sys.exit(f"{options.path} has none of the runs that were asked for.")
    for name, run in {run.model: run for run in shown}.items():
        print(f"{name}: {run.parameters:,} parameters, batches of {run.batch_size} {MODELS[name].samples} per rank")
    described = ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)
    repeated = sorted(Counter((run.setting, run.row, run.package) for run in shown).values())
    print(f"{repeated[0]} to {repeated[-1]} runs of each row, after {WARM_UP_STEPS} steps each; {described}\n")
    for package in options.packages:
        of_package = [run for run in shown if run.package == package]
        if package is not None:
            print(f"With {package}:\n")
        print(table(of_package))
        print("\nMean ms per step, and how many times faster than ddp:\n")
        print(short_table(of_package))
        print(f"\n{made_with(run.commit for run in of_package)}\n")
    if len(options.packages) == 1:
        draw(shown, options.output / "training.png")
        return
    print("A run's time is its median step; its mean step in rows that exchange every 10. Median over runs:\n")
    print(comparison(shown, *options.packages))


if __name__ == "__main__":
    main()
