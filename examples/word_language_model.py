"""Trains a language model whose large embedding table has a gradient that is zero except for the words just read.

An LSTM predicts the next word of Shakespeare. Rows differ in how the gradient of the embedding table is shared; all
other parameters are all-reduced. ddp sends the whole table in every step. all-gather sends the table's nonzero rows and
their numbers to every other client, as torch does with sparse gradients. Block reduce agrees on the rows that are
nonzero on any client, packs them and all-reduces them. S2 Reducer all-reduces a count sketch of them instead, whose
size is a given ratio of one client's nonzero elements.

The included text is All's Well That Ends Well: a text of Project Gutenberg in the public domain, as collected by Open
Shakespeare (Open Knowledge Foundation, CC BY 2.5). It has 31,000 words, enough for a first look: all rows take two or
three minutes on two cores. With more words, a step reads a smaller part of the table. For real results, use all of
Shakespeare's works (1.2 million words; about 20 minutes per row) or WikiText-2, which the paper uses:

    python examples/word_language_model.py --text FILE --batch-size 16 --iterations 3000

Prints a table. Writes a plot of perplexity against bytes sent, and all numbers as JSON. All runs of a seed start from
the same weights and see the same batches. Each run is written as it ends: --resume continues after the last one.
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
from typing import NamedTuple, get_args

import pytorch_lightning as pl
import torch
from client_training import aligned, fit, times
from clients import HELD_OUT_STREAMS, Batch, ClientText
from command_line import at_least, file, folder, quieten
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from sparse_binary_compression import EXCERPT
from stored import checksum, load, save
from torch.utils.data import DataLoader
from words import DIMENSIONS, TABLE, WORDS, OptimizerName, WordLSTM, Words, read_words

import lightning_sparsecomm
from lightning_sparsecomm import Channel, GradientSync, Method
from lightning_sparsecomm.basis import Ledger, Round, Vector, Wire, link_bytes
from lightning_sparsecomm.codecs import Float32, Runs, SparseCodec, TopBlocks
from lightning_sparsecomm.exchange import BlockReduce, DenseAllReduce, Exchange, Exchanged, Gather, SparseExchange

CLIP = 0.25  # largest norm of a gradient


class Row(NamedTuple):
    """One way to share the gradient of the embedding table.

    Attributes:
        title: Its name in table and plot.
        channel: Makes the channel for it; None for ddp.
    """

    title: str
    channel: Callable[[], Channel] | None


def sketched(ratio: float) -> Channel:
    """S2 Reducer's channel, with the table's rows as blocks and a sketch sized by one client, as in the paper."""
    return Channel(BlockReduce(TopBlocks(1.0, DIMENSIONS), ratio, sized_by="rank", always_sketch=True))


class Nothing(Exchange):
    """Shares nothing, so the table keeps its initial values. A row that is no better has not trained the table."""

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        """Zeros."""
        return Exchanged(torch.zeros_like(x.values), x.values, [True] * len(context.layout.segments))

    def __repr__(self) -> str:
        return "Nothing()"


ROWS = {
    "ddp": Row("ddp", None),
    "gather": Row("all-gather of rows", lambda: Channel(Gather(SparseCodec(TopBlocks(1.0), Float32(), Runs())))),
    "blocks": Row("block reduce", lambda: Channel(BlockReduce(TopBlocks(1.0, DIMENSIONS)))),
    "s2_2": Row("S2 Reducer, ratio 2", lambda: sketched(2.0)),
    "s2_1": Row("S2 Reducer, ratio 1", lambda: sketched(1.0)),
    "s2_05": Row("S2 Reducer, ratio 0.5", lambda: sketched(0.5)),
    # What it costs to share the table separately, and what it is worth to share it at all.
    "dense": Row("all-reduce of its own", lambda: Channel(DenseAllReduce())),
    "none": Row("not trained", lambda: Channel(Nothing())),
}
DEFAULT_ROWS = ["ddp", "gather", "blocks", "s2_2", "s2_1", "s2_05"]


class Separately(SparseExchange):
    """Enters the traffic of another exchange in its own row of the ledger.

    Args:
        exchange: The other, which keeps no state. Where the sync is sparse, it must be a SparseExchange too.
    """

    row = "embedding table"

    def __init__(self, exchange: Exchange) -> None:
        self.inner = exchange

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        """As the other exchange does."""
        return self.inner.exchange(x, context, wire.under(self.row))

    def __repr__(self) -> str:
        return f"Separately({self.inner!r})"


def method_of(channel: Channel, sparse: bool) -> Method:
    """The table goes through a channel, and all other parameters through an all-reduce."""
    separate = Channel(Separately(channel.exchange), channel.memories)
    table = GradientSync(separate, parameters=[TABLE], sparse=sparse)
    return Method([table, GradientSync(Channel(DenseAllReduce()), rest=True)])


class Options(NamedTuple):
    """What the command line asks for."""

    rows: list[str]
    clients: int
    iterations: int
    batch_size: int
    optimizer: OptimizerName
    sparse: bool
    seeds: int
    text: Path
    output: Path
    resume: bool


class Sent(NamedTuple):
    """Bytes that one client has sent.

    Attributes:
        handed: Bytes handed to collectives, headers included.
        link: Bytes that this has put on the link.
    """

    handed: float
    link: float


class Point(NamedTuple):
    """Results at one point of a run.

    Attributes:
        iteration: Optimizer steps of each client so far.
        quality: Perplexity on held-out words; None if it is not finite.
        sent: Bytes for all gradients.
        table: The part for the embedding table.
    """

    iteration: int
    quality: float | None
    sent: Sent
    table: Sent


class Run(NamedTuple):
    """One training run.

    Attributes:
        row: Its row's name.
        seed: Seed of the initial weights, and of the places where reading begins.
        points: Results along the run; the last one is at the end. Empty if training diverged.
        ddp: Sent with ddp, for all gradients.
        ddp_table: The part for the embedding table.
        step_seconds: Median of one training step.
        seconds: Total of all training steps.
    """

    row: str
    seed: int
    points: list[Point]
    ddp: Sent
    ddp_table: Sent
    step_seconds: float
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
        self.seconds: list[float] = []
        self.sparse_bytes = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        torch.set_num_threads(1)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, WordLSTM)
        # torch hands over the distinct rows of a sparse gradient, and a 64-bit number for each.
        weight = pl_module.embedding.weight
        self.sparse_bytes += batch[0][:, :-1].unique().numel() * (weight[0].nbytes + 8)
        self.begin = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        self.seconds.append(time.perf_counter() - self.begin)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, WordLSTM)
        self.add(trainer, pl_module, pl_module.quality())

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, WordLSTM)
        if not self.points or self.points[-1].iteration != trainer.global_step:
            assert isinstance(trainer.val_dataloaders, DataLoader)
            self.add(trainer, pl_module, pl_module.measure(trainer.val_dataloaders))
        if trainer.is_global_zero:
            ddp, ddp_table = under_ddp(pl_module, trainer)
            median = statistics.median(self.seconds)
            run = Run(self.row, self.seed, self.points, ddp, ddp_table, median, sum(self.seconds))
            self.path.write_text(json.dumps(written(run)))

    def add(self, trainer: pl.Trainer, module: WordLSTM, quality: float) -> None:
        """Adds a point."""
        ledger: Ledger | None = getattr(trainer.strategy, "ledger", None)
        if ledger is not None:
            table = Sent(ledger.handed_bytes(Separately.row), ledger.link_bytes(Separately.row))
            others = Sent(ledger.sent_bytes, ledger.sent_link_bytes)
        else:
            whole, table = under_ddp(module, trainer)
            others = Sent(whole.handed - table.handed, whole.link - table.link)
            if module.embedding.sparse:
                table = Sent(self.sparse_bytes, link_bytes("all_gather", self.sparse_bytes, trainer.world_size))
        sent = Sent(others.handed + table.handed, others.link + table.link)
        self.points.append(Point(trainer.global_step, quality if math.isfinite(quality) else None, sent, table))


def under_ddp(module: WordLSTM, trainer: pl.Trainer) -> tuple[Sent, Sent]:
    """What ddp has sent so far with dense gradients: for all parameters, and for the embedding table."""
    steps, ranks = trainer.global_step, trainer.world_size
    whole = steps * sum(parameter.nbytes for parameter in module.parameters())
    table = steps * module.embedding.weight.nbytes
    return Sent(whole, link_bytes("all_reduce", whole, ranks)), Sent(table, link_bytes("all_reduce", table, ranks))


def train(row: str, seed: int, words: Words, options: Options) -> Run:
    """One run, from its beginning to its last measurement."""
    channel = ROWS[row].channel
    content = fit(
        None if channel is None else method_of(channel(), options.sparse),
        seed,
        lambda: WordLSTM(words.text.symbols, options.iterations, options.optimizer, options.sparse),
        ClientText(words.text, seed, options.batch_size, WORDS),
        lambda path: Recorder(row, seed, path),
        options.clients,
        options.iterations,
        CLIP,
    )
    if content is None:
        return Run(row, seed, [], Sent(0, 0), Sent(0, 0), step_seconds=0, seconds=0)
    return read(content)


def written(run: Run) -> dict[str, object]:
    """A run for JSON."""
    points = [point._asdict() | {"sent": point.sent._asdict(), "table": point.table._asdict()} for point in run.points]
    return run._asdict() | {"points": points, "ddp": run.ddp._asdict(), "ddp_table": run.ddp_table._asdict()}


def read(content: dict[str, object]) -> Run:
    """A run from JSON."""
    run = Run(**content)  # type: ignore[arg-type]
    points = [Point(**point) for point in run.points]  # type: ignore[arg-type]
    return run._replace(
        points=[point._replace(sent=Sent(**point.sent), table=Sent(**point.table)) for point in points],  # type: ignore[arg-type]
        ddp=Sent(**run.ddp),  # type: ignore[arg-type]
        ddp_table=Sent(**run.ddp_table),  # type: ignore[arg-type]
    )


def settings(options: Options) -> dict[str, str | int]:
    """All that the result of a run depends on, besides row and seed. Equal for all runs of a file."""
    return {
        "text": options.text.name,
        "text_sha256": checksum(options.text.read_bytes()),
        "clients": options.clients,
        "iterations": options.iterations,
        "batch_size": options.batch_size,
        "optimizer": options.optimizer,
        "sparse": options.sparse,
        "lightning_sparsecomm": lightning_sparsecomm.__version__,
        "torch": torch.__version__,
        "pytorch_lightning": version("pytorch-lightning"),
        "python": platform.python_version(),
        "architecture": platform.machine(),
    }


def report(runs: list[Run], words: Words, options: Options) -> str:
    """The table, and the meaning of its columns."""
    header = ["embedding table", "perplexity", "MB sent", "for the table", "fewer on the link", "for the table"]
    header.append("seconds/step")
    lines = [header]
    for row in options.rows:
        finished = [run for run in runs if run.row == row]
        whole = [run for run in finished if run.quality is not None]
        if not whole:
            lines.append([ROWS[row].title, "diverged", *("—" for _ in header[2:])])
            continue
        qualities = [run.quality for run in whole if run.quality is not None]
        spread = f" ± {statistics.stdev(qualities):.2f}" if len(qualities) > 1 else ""
        lost = f", {len(finished) - len(whole)} diverged" if len(finished) > len(whole) else ""
        shared = all(run.points[-1].table.link for run in whole)
        lines.append(
            [
                ROWS[row].title,
                f"{statistics.mean(qualities):.2f}{spread}{lost}",
                f"{statistics.mean(run.points[-1].sent.handed for run in whole) / 1e6:,.1f}",
                f"{statistics.mean(run.points[-1].table.handed for run in whole) / 1e6:,.1f}",
                times(run.ddp.link / run.points[-1].sent.link for run in whole),
                times(run.ddp_table.link / run.points[-1].table.link for run in whole) if shared else "—",
                f"{statistics.median(run.step_seconds for run in whole):.3f}",
            ]
        )
    seeds = f"{options.seeds} seeds: mean ± standard deviation" if options.seeds > 1 else "1 seed"
    symbols, held_out = words.text.symbols, words.text.held_out
    predicted, unknown = held_out.numel() - len(held_out), f"{words.unknown:.1%}"
    sparse = "\nSparse: ddp sends the rows that are not zero, and their numbers."
    return f"""
{aligned(lines)}

{options.text.name}: {len(words.text.train):,} words to train on, {symbols:,} distinct; {options.clients} clients,
    {options.batch_size} x {WORDS} words each in {options.iterations:,} iterations; {options.optimizer}, {seeds}.
Perplexity: per word, on {predicted:,} held-out words; {unknown} are not in the vocabulary, and count as one word.
MB sent: 10^6 bytes of gradients that one client hands over in the whole training, headers included.
Fewer on the link: against ddp's all-reduce of float32 gradients, by the collectives' published algorithms (a ring
    all-reduce sends 2(W-1)/W times its tensor, an all-gather W-1 times). For the table: the embedding's gradient alone.
Seconds/step: the median, all clients on this machine, where sending is almost free.{sparse * options.sparse}"""


def draw(runs: list[Run], options: Options, path: Path) -> None:
    """Draws perplexity against bytes sent: a colour per row, a line per seed."""
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    colors = {row: f"C{index}" for index, row in enumerate(ROWS)}
    for row in options.rows:
        label: str | None = ROWS[row].title
        for run in runs:
            measured = [(point.sent.link / 1e6, point.quality) for point in run.points if point.quality is not None]
            if run.row == row and measured:
                axes.plot(*zip(*measured, strict=True), ".-", color=colors[row], label=label)
                label = None
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis, steps in ((axes.xaxis, (1, 2, 5)), (axes.yaxis, (1, 1.2, 1.5, 2, 3, 4, 5, 7))):
        axis.set_major_locator(LogLocator(subs=steps))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("MB of gradients that one client put on the link")
    axes.set_ylabel("perplexity per held-out word")
    axes.set_title(f"{options.text.name}, {options.clients} clients, {options.iterations:,} iterations")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=150)


def parse() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    rows = f"rows of the table, among {', '.join(ROWS)} (default: all but dense and none)"
    add("--rows", nargs="+", choices=list(ROWS), default=DEFAULT_ROWS, metavar="NAME", help=rows)
    add("--clients", type=at_least(2), default=4, metavar="N", help="processes on this machine's CPU (default: 4)")
    add(
        "--iterations", type=at_least(1), default=200, metavar="N", help="optimizer steps of each client (default: 200)"
    )
    batch_size = f"places where a client reads at once, {WORDS} words at each (default: 4)"
    add("--batch-size", type=at_least(1), default=4, metavar="N", help=batch_size)
    optimizer = "sgd (learning rate 20, no momentum) or adam (0.003); the rate falls to 0 (default: sgd)"
    add("--optimizer", choices=get_args(OptimizerName), default="sgd", help=optimizer)
    add("--sparse", action="store_true", help="use nn.Embedding(sparse=True); needs sgd, and rows that can take it")
    add("--seeds", type=at_least(1), default=1, metavar="N", help="runs of each row, with seeds 0 to N-1 (default: 1)")
    text = "text in UTF-8, whose last 10%% are held out (default: an excerpt of Shakespeare)"
    add("--text", type=file, default=EXCERPT, metavar="FILE", help=text)
    output = "folder for a plot and numbers as JSON (default: comparison)"
    add("--output", type=folder, default=Path("comparison"), metavar="DIR", help=output)
    add("--resume", action="store_true", help="skip runs that the JSON file already has")
    options = Options(**vars(parser.parse_args()))
    if options.clients > HELD_OUT_STREAMS:
        parser.error(
            f"--clients must be at most {HELD_OUT_STREAMS}, the number of parts of the held-out text; got"
            f" {options.clients}"
        )
    if options.sparse and options.optimizer != "sgd":
        parser.error(f"--sparse needs --optimizer sgd: torch's {options.optimizer} cannot take sparse gradients")
    dense = [
        row for row in options.rows if (make := ROWS[row].channel) and not isinstance(make().exchange, SparseExchange)
    ]
    if options.sparse and dense:
        parser.error(f"--sparse: {', '.join(dense)} can only take dense gradients; name others with --rows")
    return options


def main() -> None:
    options = parse()
    quieten()
    torch.set_num_threads(1)
    numbers = options.output / "word_language_model.json"
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        words = read_words(options.text)
        stored_with = settings(options)
        runs = [read(run) for run in load(numbers, stored_with, options.resume)]
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    wanted = [(row, seed) for seed in range(options.seeds) for row in options.rows]
    for row, seed in wanted:
        if any((run.row, run.seed) == (row, seed) for run in runs):
            continue
        run = train(row, seed, words, options)
        runs.append(run)
        save([written(run) for run in runs], numbers, stored_with)
        quality = "diverged" if run.quality is None else f"perplexity {run.quality:.2f}"
        print(f"seed {seed}, {ROWS[row].title}: {quality}, {run.seconds:,.1f} s", file=sys.stderr, flush=True)
    shown = [run for run in runs if (run.row, run.seed) in wanted]
    plot = numbers.with_suffix(".png")
    draw(shown, options, plot)
    print(f"{report(shown, words, options)}\n\nPlot: {plot}\nNumbers: {numbers}")


if __name__ == "__main__":
    main()
