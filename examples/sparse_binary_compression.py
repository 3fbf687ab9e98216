"""Repeats the small experiments of Sparse Binary Compression (Sattler et al. 2018), and runs ddp beside them.

lenet5: LeNet5-Caffe on Fashion-MNIST (the paper has MNIST), Adam, 128 images per client and step.
lenet5_sgd: the same with SGD at 0.01 and momentum 0.9, which is not in the paper.
charlstm: predicts the next character of Shakespeare with two LSTM layers of 200 units, without dropout; SGD, 5 windows
of 50 characters per client and step, the state carried over. As in the code that the paper adapts (TensorFlow's for
PTB), the loss is summed over a window and gradients are clipped to norm 5. The learning rate is 1; in the second half
of the training it is multiplied by 0.8 after every tenth.

The included text is All's Well That Ends Well: a text of Project Gutenberg in the public domain, as collected by Open
Shakespeare (Open Knowledge Foundation, CC BY 2.5). It is enough for short runs; 16,000 iterations read it more than a
hundred times. The paper uses all of Shakespeare's works: give them with --text.

Prints a table. Writes a plot of quality against bytes sent, and all numbers as JSON. All runs of a seed start from the
same weights and see the same batches. Each run is written as it ends: --resume continues after the last one. On two
cores a run of lenet5 takes three to five minutes, and one of charlstm about fifteen.
"""

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import pytorch_lightning as pl
import torch
from client_training import aligned, fit, times
from clients import (
    HELD_OUT_STREAMS,
    CharLSTM,
    ClientData,
    ClientImages,
    ClientText,
    LeNet5,
    Network,
    images_each,
    read_images,
    read_text,
)
from command_line import at_least, file, folder, quieten
from images import contents
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from stored import checksum, load, save
from torch.utils.data import DataLoader

import lightning_sparsecomm
from lightning_sparsecomm import Channel, DeltaSync, ErrorFeedback, Method, methods
from lightning_sparsecomm.basis import OURS, link_bytes
from lightning_sparsecomm.codecs import Float32, Golomb, SparseCodec, TopK
from lightning_sparsecomm.exchange import Gather

TaskName = Literal["lenet5", "charlstm", "lenet5_sgd"]

BASE = "base"

STEEP = 5  # plots show a perplexity up to so many times the best one

EXCERPT = Path(__file__).parent / "shakespeare-excerpt.txt"


class Row(NamedTuple):
    """One way to train.

    Attributes:
        title: Its name in table and plot.
        method: Makes the method; None for ddp.
    """

    title: str
    method: Callable[[], Method] | None


ROWS = {
    BASE: Row("base (ddp)", None),
    "sbc1": Row("SBC (1): every step, 0.1%", lambda: methods.sbc1()),
    "sbc2": Row("SBC (2): every 10 steps, 1%", lambda: methods.sbc2()),
    "sbc3": Row("SBC (3): every 100 steps, 1%", lambda: methods.sbc3()),
    "fedavg": Row("Federated Averaging: every 100 steps, dense", lambda: methods.federated_averaging(every=100)),
    # SBC (1) and (2) with one part changed, or with as many elements per step sent less often; not run by default.
    "sbc1_unmasked": Row(
        "SBC (1), momentum not masked", lambda: methods.sbc(density=0.001, every=1, momentum_masking=False)
    ),
    "sbc1_ahead": Row(
        "SBC (1), residual in weights", lambda: methods.sbc(density=0.001, every=1, residual_in_weights=True)
    ),
    "sbc1_denser": Row("SBC (1), but 1%", lambda: methods.sbc(density=0.01, every=1)),
    "sbc1_exact": Row("SBC (1), both signs, exact values", lambda: exact_top_k(density=0.001, every=1)),
    "sbc1_every2": Row("SBC, every 2 steps, 0.2%", lambda: methods.sbc(density=0.002, every=2)),
    "sbc1_every5": Row("SBC, every 5 steps, 0.5%", lambda: methods.sbc(density=0.005, every=5)),
    "sbc2_denser": Row("SBC (2), but 10%", lambda: methods.sbc(density=0.1, every=10)),
    "sbc2_exact": Row("SBC (2), both signs, exact values", lambda: exact_top_k(density=0.01, every=10)),
}

DEFAULT_ROWS = [BASE, "sbc1", "sbc2", "sbc3", "fedavg"]


def exact_top_k(density: float, every: int) -> Method:
    """Sends the exact values of each tensor's largest weight changes, with momentum masked as in SBC."""
    channel = Channel(Gather(SparseCodec(TopK(density, "tensor"), Float32(), Golomb())), [ErrorFeedback()])
    return Method([DeltaSync(channel, every, mask_momentum=True)])


class Options(NamedTuple):
    """What the command line asks for."""

    task: TaskName
    rows: list[str]
    clients: int
    iterations: int
    seeds: int
    data_dir: Path
    text: Path
    output: Path
    resume: bool


class Prepared(NamedTuple):
    """A task with its data read.

    Attributes:
        data: The data's name.
        checksum: The data's SHA-256.
        network: Makes the network.
        clients_data: Makes the data of a run with a given seed.
    """

    data: str
    checksum: str
    network: Callable[[], Network]
    clients_data: Callable[[int], ClientData]


def prepare_lenet5(options: Options) -> Prepared:
    """Reads the images."""
    name, read = read_images(options.data_dir)
    images_each(read, options.clients)
    optimizer: Literal["adam", "sgd"] = "adam" if options.task == "lenet5" else "sgd"
    return Prepared(
        name,
        checksum(*contents(options.data_dir).values()),
        lambda: LeNet5(optimizer),
        lambda seed: ClientImages(read, seed),
    )


def prepare_charlstm(options: Options) -> Prepared:
    """Reads the text."""
    text = read_text(options.text)
    return Prepared(
        options.text.name,
        checksum(options.text.read_bytes()),
        lambda: CharLSTM(text.symbols, options.iterations),
        lambda seed: ClientText(text, seed),
    )


class Task(NamedTuple):
    """An experiment, and how its quality is printed.

    Attributes:
        prepare: Reads the data.
        iterations: Optimizer steps of each client in the paper.
        quality: Name and unit of the quality.
        scale: Factor from the quality to this unit.
        decimals: Number of decimals.
        falls_steeply: Whether its axis is logarithmic.
        clip: Largest norm of a gradient; None for no clipping.
    """

    prepare: Callable[[Options], Prepared]
    iterations: int
    quality: str
    scale: float
    decimals: int
    falls_steeply: bool = False
    clip: float | None = None


TASKS: dict[TaskName, Task] = {
    "lenet5": Task(prepare_lenet5, 2_000, "test accuracy, %", scale=100, decimals=2),
    "lenet5_sgd": Task(prepare_lenet5, 2_000, "test accuracy, %", scale=100, decimals=2),
    "charlstm": Task(prepare_charlstm, 16_000, "perplexity per character", 1, 3, falls_steeply=True, clip=5.0),
}


class Point(NamedTuple):
    """Results at one point of a run.

    Attributes:
        iteration: Optimizer steps of each client so far.
        quality: Quality on held-out data; None if it is not finite.
        sent_bytes: Bytes that one client has handed to collectives for the method.
        link_bytes: Bytes that this has put on the link.
    """

    iteration: int
    quality: float | None
    sent_bytes: float
    link_bytes: float


class Run(NamedTuple):
    """One training run.

    Attributes:
        row: Its row's name.
        seed: Seed of the initial weights, of the clients' parts of the data and of their order.
        points: Results along the run; the last one is at the end. Empty if training diverged.
        ddp_bytes: Bytes that a client hands to collectives with ddp.
        ddp_link_bytes: Bytes that it puts on the link with ddp.
        other_bytes: Bytes handed over for other purposes, which all methods have; not counted with ddp.
        seconds: Seconds of training, without measurements.
    """

    row: str
    seed: int
    points: list[Point]
    ddp_bytes: float
    ddp_link_bytes: float
    other_bytes: dict[str, int]
    seconds: float

    @property
    def quality(self) -> float | None:
        """The quality at the end."""
        return self.points[-1].quality if self.points else None


class Recorder(pl.Callback):
    """Measures during the run and at its end, and writes the run to a file, since the strategy starts processes.

    Args:
        row: The row's name.
        seed: The run's seed.
        path: Where rank 0 writes, as JSON.
    """

    def __init__(self, row: str, seed: int, path: Path) -> None:
        self.row, self.seed, self.path = row, seed, path
        self.points: list[Point] = []
        self.seconds = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        torch.set_num_threads(1)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.begin = time.perf_counter()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seconds += time.perf_counter() - self.begin

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Network)
        self.add(trainer, pl_module.quality())
        self.begin = time.perf_counter()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Measured again: only now does the model include what clients had not communicated yet.
        self.seconds += time.perf_counter() - self.begin
        assert isinstance(pl_module, Network)
        if self.points and self.points[-1].iteration == trainer.global_step:
            self.points.pop()
        assert isinstance(trainer.val_dataloaders, DataLoader)
        self.add(trainer, pl_module.measure(trainer.val_dataloaders))
        if not trainer.is_global_zero:
            return
        ddp_bytes = trainer.global_step * gradient_bytes(pl_module)
        ledger = getattr(trainer.strategy, "ledger", None)
        purposes = [] if ledger is None else [purpose for purpose in ledger.rows if purpose not in OURS]
        run = Run(
            self.row,
            self.seed,
            self.points,
            ddp_bytes,
            link_bytes("all_reduce", ddp_bytes, trainer.world_size),
            {} if ledger is None else {purpose: ledger.handed_bytes(purpose) for purpose in purposes},
            self.seconds,
        )
        self.path.write_text(json.dumps(written(run)))

    def add(self, trainer: pl.Trainer, quality: float) -> None:
        """Adds a point."""
        ledger = getattr(trainer.strategy, "ledger", None)
        if ledger is None:
            sent = trainer.global_step * gradient_bytes(trainer.lightning_module)
            on_link = link_bytes("all_reduce", sent, trainer.world_size)
        else:
            sent, on_link = ledger.sent_bytes, ledger.sent_link_bytes
        self.points.append(Point(trainer.global_step, quality if math.isfinite(quality) else None, sent, on_link))


def gradient_bytes(module: pl.LightningModule) -> int:
    """Bytes of one step's gradients."""
    return sum(parameter.nbytes for parameter in module.parameters())


def train(row: str, seed: int, prepared: Prepared, options: Options) -> Run:
    """One run, from its beginning to its last measurement."""
    method = ROWS[row].method
    content = fit(
        None if method is None else method(),
        seed,
        prepared.network,
        prepared.clients_data(seed),
        lambda path: Recorder(row, seed, path),
        options.clients,
        options.iterations,
        TASKS[options.task].clip,
    )
    if content is None:
        return Run(row, seed, [], ddp_bytes=0, ddp_link_bytes=0, other_bytes={}, seconds=0)
    return read(content)


def written(run: Run) -> dict[str, object]:
    """A run for JSON."""
    return run._asdict() | {"points": [point._asdict() for point in run.points]}


def read(content: dict[str, object]) -> Run:
    """A run from JSON."""
    run = Run(**content)  # type: ignore[arg-type]
    return run._replace(points=[Point(**point) for point in run.points])  # type: ignore[arg-type]


def settings(prepared: Prepared, options: Options) -> dict[str, str | int]:
    """All that the result of a run depends on, besides row and seed. Equal for all runs of a file."""
    return {
        "task": options.task,
        "data": prepared.data,
        "data_sha256": prepared.checksum,
        "clients": options.clients,
        "iterations": options.iterations,
        "lightning_sparsecomm": lightning_sparsecomm.__version__,
        "torch": torch.__version__,
        "pytorch_lightning": version("pytorch-lightning"),
        "python": platform.python_version(),
        "architecture": platform.machine(),
    }


def report(runs: list[Run], prepared: Prepared, options: Options) -> str:
    """The table, and the meaning of its columns."""
    task = TASKS[options.task]
    median = ["median"] if options.seeds > 2 else []
    header = ["row", task.quality, *median, "MB sent per client", "fewer bytes", "fewer on the link", "seconds"]
    lines = [header]
    for row in options.rows:
        finished = [run for run in runs if run.row == row]
        whole = [run for run in finished if run.quality is not None]
        if not whole:
            lines.append([ROWS[row].title, "diverged", *("—" for _ in header[2:])])
            continue
        qualities = [task.scale * run.quality for run in whole if run.quality is not None]
        spread = f" ± {statistics.stdev(qualities):.{task.decimals}f}" if len(qualities) > 1 else ""
        lost = f", {len(finished) - len(whole)} diverged" if len(finished) > len(whole) else ""
        cells = [ROWS[row].title, f"{statistics.mean(qualities):.{task.decimals}f}{spread}{lost}"]
        if median:
            cells.append(f"{statistics.median(qualities):.{task.decimals}f}")
        cells += [
            f"{statistics.mean(run.points[-1].sent_bytes for run in whole) / 1e6:,.3f}",
            times(run.ddp_bytes / run.points[-1].sent_bytes for run in whole),
            times(run.ddp_link_bytes / run.points[-1].link_bytes for run in whole),
            f"{statistics.mean(run.seconds for run in whole):,.0f}",
        ]
        lines.append(cells)
    purposes = sorted({purpose for run in runs for purpose in run.other_bytes})
    most = {purpose: max(run.other_bytes.get(purpose, 0) for run in runs) for purpose in purposes}
    others = "; ".join(f"{purpose} {most[purpose] / 1e3:,.1f} kB" for purpose in purposes) or "not counted with ddp"
    seeds = f"{options.seeds} seeds: mean ± standard deviation" if options.seeds > 1 else "1 seed"
    return f"""
{aligned(lines)}

{options.task} on {prepared.data}; {options.clients} clients, {options.iterations:,} iterations, {seeds}.
MB sent: 10^6 bytes that one client hands over in the whole training, headers included ("upstream" in the paper).
Fewer bytes: ddp's float32 gradients over these bytes. Fewer on the link: the same for bytes on the link, by the
    collectives' published algorithms (a ring all-reduce sends 2(W-1)/W times its tensor, an all-gather W-1 times).
Not in the table: bytes for other purposes, which all methods have; the most of any row: {others}.
Seconds: training only, all clients on this machine, where sending is almost free."""


def draw(runs: list[Run], prepared: Prepared, options: Options, path: Path) -> None:
    """Draws quality against bytes sent: a colour per row, a line per seed."""
    task = TASKS[options.task]
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    colors = {row: f"C{index}" for index, row in enumerate(ROWS)}
    decades: list[float] = []
    qualities: list[float] = []
    for row in options.rows:
        label: str | None = ROWS[row].title
        for run in runs:
            # A logarithmic axis cannot show results before anything was sent.
            shown = [(point.sent_bytes, point.quality) for point in run.points if point.sent_bytes]
            measured = [(sent / 1e6, task.scale * quality) for sent, quality in shown if quality is not None]
            if run.row == row and measured:
                axes.plot(*zip(*measured, strict=True), ".-", color=colors[row], label=label)
                label = None
                decades += [math.log10(sent) for sent, _ in measured]
                qualities += [quality for _, quality in measured]
    axes.set_xscale("log")
    if decades:
        # Whole decades, so that there are labels.
        axes.set_xlim(10.0 ** math.floor(min(decades)), 10.0 ** math.ceil(max(decades)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel("MB sent by one client")
    axes.set_ylabel(task.quality)
    if task.falls_steeply:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
        # A row that diverges for a while would leave no room for the others.
        most = STEEP * min(qualities, default=1.0)
        if max(qualities, default=0.0) > most:
            axes.set_ylim(top=most)
            axes.set_ylabel(f"{task.quality} (not shown above {most:.0f})")
    axes.set_title(f"{options.task} on {prepared.data}, {options.clients} clients, {options.iterations:,} iterations")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=150)


def parse() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--task", choices=get_args(TaskName), required=True, help="experiment to repeat")
    rows = f"rows of the table, among {', '.join(ROWS)} (default: the first five)"
    add("--rows", nargs="+", choices=list(ROWS), default=DEFAULT_ROWS, metavar="NAME", help=rows)
    add("--clients", type=at_least(2), default=4, metavar="N", help="processes on this machine's CPU (default: 4)")
    lengths = ", ".join(f"{task.iterations:,} of {name}" for name, task in TASKS.items())
    add("--iterations", type=at_least(1), metavar="N", help=f"optimizer steps of each client (default: {lengths})")
    add("--seeds", type=at_least(1), default=1, metavar="N", help="runs of each row, with seeds 0 to N-1 (default: 1)")
    images = "folder of Fashion-MNIST's or MNIST's four files, packed or not; downloaded if missing (default: data)"
    add("--data-dir", type=folder, default=Path("data"), metavar="DIR", help=images)
    text = "text in UTF-8, whose last 5%% are held out (default: an excerpt of Shakespeare)"
    add("--text", type=file, default=EXCERPT, metavar="FILE", help=text)
    output = "folder for a plot and numbers as JSON (default: comparison)"
    add("--output", type=folder, default=Path("comparison"), metavar="DIR", help=output)
    add("--resume", action="store_true", help="skip runs that the JSON file already has")
    arguments = vars(parser.parse_args())
    arguments["rows"] = list(dict.fromkeys(arguments["rows"]))
    if arguments["task"] == "charlstm" and arguments["clients"] > HELD_OUT_STREAMS:
        parser.error(
            f"--clients must be at most {HELD_OUT_STREAMS}, the number of parts of the held-out text; got"
            f" {arguments['clients']}"
        )
    arguments["iterations"] = arguments["iterations"] or TASKS[arguments["task"]].iterations
    return Options(**arguments)


def main() -> None:
    options = parse()
    quieten()
    torch.set_num_threads(1)
    task = TASKS[options.task]
    numbers = options.output / f"sparse_binary_compression_{options.task}.json"
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        prepared = task.prepare(options)
        stored_with = settings(prepared, options)
        runs = [read(run) for run in load(numbers, stored_with, options.resume)]
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    wanted = [(row, seed) for seed in range(options.seeds) for row in options.rows]
    for row, seed in wanted:
        if any((run.row, run.seed) == (row, seed) for run in runs):
            continue
        run = train(row, seed, prepared, options)
        runs.append(run)
        save([written(run) for run in runs], numbers, stored_with)
        quality = "diverged" if run.quality is None else f"{task.quality} {task.scale * run.quality:.{task.decimals}f}"
        print(f"seed {seed}, {ROWS[row].title}: {quality}, {run.seconds:,.1f} s", file=sys.stderr, flush=True)
    shown = [run for run in runs if (run.row, run.seed) in wanted]
    plot = numbers.with_suffix(".png")
    draw(shown, prepared, options, plot)
    print(f"{report(shown, prepared, options)}\n\nPlot: {plot}\nNumbers: {numbers}")


if __name__ == "__main__":
    main()
