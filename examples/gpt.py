"""Trains a GPT on text over a slow link: with ddp, and with methods that exchange weights every few steps.

Each row trains the same network from the same weights with AdamW, for as many steps or minutes as all others. Prints
the loss on held-out text as training goes on, then a table. Writes a plot of loss against time and against bytes, and
all numbers as JSON, which `--resume` goes on with.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytorch_lightning as pl
import torch
from command_line import at_least, file, folder, quieten
from matplotlib.figure import Figure
from pytorch_lightning.strategies import DDPStrategy, Strategy
from slow_link import enter
from stored import checksum, load, save
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from transformer import GPT, heads_of, read_characters, windows

from lightning_sparsecomm import SparseCommStrategy, methods

EXCERPT = Path(__file__).with_name("shakespeare-excerpt.txt")
CHARACTERS = 64
"""Of a window; each is predicted from those before it."""

HELD_OUT_WINDOWS = 128
WARM_UP_STEPS = 20
PARTS = 3
"""Parts of the model that streamed methods exchange one after another."""


class Row(NamedTuple):
    """A way to train.

    Attributes:
        strategy: Given the steps between two exchanges, and those that an exchange may take.
        summary: What it sends.
    """

    strategy: Callable[[int, int], Strategy]
    summary: str


ROWS = {
    "ddp": Row(lambda every, delay: DDPStrategy(), "all gradients, in each step"),
    "sparsecomm": Row(
        lambda every, delay: SparseCommStrategy(),
        "the largest elements of each rank's update, in every step or every second one",
    ),
    "diloco": Row(
        lambda every, delay: SparseCommStrategy(methods.diloco(every=every)), "the weights' change, every few steps"
    ),
    "streaming_diloco": Row(
        lambda every, delay: SparseCommStrategy(methods.streaming_diloco(every=every, fragments=PARTS, delay=delay)),
        "the weights' change in 4 bits, a part at a time, while training goes on",
    ),
    "sparse_loco": Row(
        lambda every, delay: SparseCommStrategy(methods.sparse_loco(every=every)),
        "1/64 of the weights' change in 2 bits, every few steps",
    ),
    "streamed_sparse_loco": Row(
        lambda every, delay: SparseCommStrategy(methods.sparse_loco(every=every, fragments=PARTS, delay=delay)),
        "the same, a part at a time, while training goes on",
    ),
}


class Learner(pl.LightningModule):
    """A GPT of 10.7 million parameters, or of a smaller width, with AdamW."""

    def __init__(self, symbols: int, rate: float, width: int, layers: int) -> None:
        super().__init__()
        self.network = GPT(symbols, CHARACTERS, width, layers)
        self.rate = rate

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        # Each rank has its own weights between two exchanges: the mean over ranks.
        self.log("loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> pl.utilities.types.OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), self.rate, betas=(0.9, 0.95), weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _loss(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        return cross_entropy(self.network(inputs).flatten(0, 1), targets.flatten())


class Point(NamedTuple):
    """How far a training has come.

    Attributes:
        steps: Optimizer steps.
        loss: On held-out text, in nats for each character.
        seconds: Of training, without those that measured the loss.
        sent_bytes: That one rank has put on the link, for gradients and weights.
    """

    steps: int
    loss: float
    seconds: float
    sent_bytes: float


class Recorder(pl.Callback):
    """Writes a list of Points to a file, since rank 0 may be a process that the strategy has started.

    Args:
        path: Where rank 0 writes, as JSON.
        seconds: After which it stops the training.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.limit = path, seconds
        self.points: list[Point] = []
        self.seconds, self.begin = 0.0, 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        torch.set_num_threads(1)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.begin = time.perf_counter()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.seconds += time.perf_counter() - self.begin

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._note(trainer)
        self.begin = time.perf_counter()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            self.path.write_text(json.dumps([point._asdict() for point in self.points]))

    def _note(self, trainer: pl.Trainer) -> None:
        steps, ranks = trainer.global_step, trainer.world_size
        ledger = getattr(trainer.strategy, "ledger", None)
        if ledger is None:
            of_step = sum(parameter.nbytes for parameter in trainer.lightning_module.parameters())
            sent_bytes = steps * of_step * 2 * (ranks - 1) / ranks  # a ring all-reduce
        else:
            sent_bytes = sum(ledger.link_bytes(row) for row in ("gradients", "weight updates"))
        # All ranks must stop after the same step.
        seconds = float(trainer.strategy.reduce(torch.tensor(self.seconds), reduce_op="mean"))
        point = Point(steps, float(trainer.callback_metrics["loss"]), seconds, sent_bytes)
        self.points.append(point)
        trainer.should_stop = trainer.should_stop or seconds > self.limit
        if trainer.is_global_zero:
            told = f"loss {point.loss:.3f} after {seconds:5.0f} s, {sent_bytes / 1e6:10.3f} MB sent"
            print(f"  step {steps:5} of {trainer.max_steps}: {told}", flush=True)


def main() -> None:
    options = parse()
    refused = enter(options.link, options.processes) if options.link else None
    quieten(".*does not end before.*", ".*number of training batches.*")
    characters = read_characters(options.text)
    settings = {
        name: value for name, value in vars(options).items() if name not in ("rows", "output", "resume", "text")
    }
    settings["data"] = checksum(options.text.read_bytes())
    options.output.mkdir(parents=True, exist_ok=True)
    numbers = options.output / "gpt.json"
    try:
        runs = load(numbers, settings, options.resume)
        held_out = windows(characters.numbers[-len(characters.numbers) // 10 :], CHARACTERS)
        data = windows(characters.numbers[: -len(characters.numbers) // 10], CHARACTERS), held_out
    except (FileExistsError, ValueError) as error:
        raise SystemExit(str(error)) from None
    trainer: pl.Trainer | None = None
    with tempfile.TemporaryDirectory() as directory:
        for row in options.rows:
            if any(run["row"] == row for run in runs):
                continue
            path = Path(directory) / f"{row}.json"
            trainer = train(row, characters.symbols, data, options, path)
            # With ddp's usual launcher, every process runs this whole script; rank 0 reports.
            if trainer.is_global_zero:
                runs.append({"row": row, "points": json.loads(path.read_text())})
                save(runs, numbers, settings)
    if trainer is None or trainer.is_global_zero:
        report({run["row"]: [Point(**point) for point in run["points"]] for run in runs}, options, refused)


def train(
    row: str, symbols: int, data: tuple[TensorDataset, TensorDataset], options: argparse.Namespace, path: Path
) -> pl.Trainer:
    """Trains one row; rank 0 writes its points to `path`."""
    pl.seed_everything(options.seed, verbose=False)
    every = options.every
    trainer = pl.Trainer(
        strategy=ROWS[row].strategy(every, options.delay),
        accelerator="cpu",
        devices=options.processes,
        max_steps=options.steps,
        # Right after an exchange.
        val_check_interval=every,
        check_val_every_n_epoch=None,
        callbacks=[Recorder(path, 60 * options.minutes)],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    if trainer.is_global_zero:
        print(f"{row}: {ROWS[row].summary}", flush=True)
    learner = Learner(symbols, options.rate, options.width, options.layers)
    train_data, held_out = data
    held_out = TensorDataset(*(tensor[:HELD_OUT_WINDOWS] for tensor in held_out.tensors))
    trainer.fit(
        learner, DataLoader(train_data, options.batch_size, shuffle=True, drop_last=True), DataLoader(held_out, 32)
    )
    return trainer


def report(runs: dict[str, list[Point]], options: argparse.Namespace, refused: str | None) -> None:
    """Prints the table, and draws."""
    rows = [["row", "steps", "loss", "seconds a step", "MB sent per rank", "fewer bytes a step"]]
    per_step = {row: points[-1].sent_bytes / points[-1].steps for row, points in runs.items()}
    for row, points in runs.items():
        last = points[-1]
        fewer = f"{per_step['ddp'] / per_step[row]:,.0f} x" if "ddp" in runs else ""
        cells = [f"{last.loss:.3f}", f"{last.seconds / last.steps:.2f}", f"{last.sent_bytes / 1e6:,.3f}", fewer]
        rows.append([row, str(last.steps), *cells])
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    print()
    for each in rows:
        cells = [cell.rjust(width) for cell, width in zip(each[1:], widths[1:], strict=True)]
        print("    ".join([each[0].ljust(widths[0]), *cells]))
    plot = options.output / "gpt.png"
    draw(runs, options, plot)
    link = f"each sends at {options.link} Mbit/s" if options.link and refused is None else "no slow link"
    print(
        f"\n{options.processes} processes, {link}; weights are exchanged every {options.every} steps, and streamed ones"
        f" used {options.delay} steps later.\nLoss: nats for each character of held-out text, the mean over processes."
        f"\nPlot: {plot}\nNumbers: {options.output / 'gpt.json'}"
    )
    if refused is not None:
        print(f"No slow link could be set up here: {refused}.")


def draw(runs: dict[str, list[Point]], options: argparse.Namespace, path: Path) -> None:
    """Loss against time and against bytes, one line for each row."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    by_time, by_bytes = figure.subplots(1, 2, sharey=True)
    for row, points in runs.items():
        losses = [point.loss for point in points]
        by_time.plot([point.seconds for point in points], losses, ".-", label=row)
        by_bytes.plot([point.sent_bytes / 1e6 for point in points], losses, ".-", label=row)
    by_time.set_xlabel("seconds of training" + (f" over {options.link} Mbit/s" if options.link else ""))
    by_time.set_ylabel("loss on held-out text, nats")
    by_bytes.set_xscale("log")
    by_bytes.xaxis.set_major_formatter("{x:g}")
    by_bytes.set_xlabel("MB sent by one process")
    for axes in (by_time, by_bytes):
        axes.grid(alpha=0.3)
    by_bytes.legend()
    figure.suptitle(f"GPT, {options.processes} processes, AdamW")
    figure.savefig(path, dpi=150)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=f"some of {', '.join(ROWS)}")
    add("--text", type=file, default=EXCERPT, metavar="FILE", help="text in UTF-8; its last tenth is held out")
    add("--processes", type=at_least(2), default=4, metavar="N", help="on this machine's CPU, one thread each")
    add(
        "--link",
        type=at_least(0),
        default=50,
        metavar="MBIT",
        help="rate at which each process can send; 0 for no link",
    )
    add("--steps", type=at_least(1), default=600, metavar="N", help="optimizer steps of each row, at most")
    add("--minutes", type=float, default=10.0, metavar="N", help="minutes of training of each row, at most")
    add("--every", type=at_least(2), default=30, metavar="H", help="steps between two exchanges, and two measurements")
    add("--delay", type=at_least(0), default=5, metavar="N", help="steps that a streamed exchange may take")
    add("--rate", type=float, default=1e-3, help="AdamW's learning rate")
    add(
        "--batch-size", type=at_least(1), default=8, metavar="N", help=f"windows of {CHARACTERS} characters per process"
    )
    add("--width", type=at_least(8), default=384, metavar="N", help="dimensions of the GPT, with heads of 64")
    add("--layers", type=at_least(1), default=6, metavar="N", help="layers of the GPT")
    add("--seed", type=int, default=0, metavar="N", help="of the initial weights and of the order of windows")
    add("--output", type=folder, default=Path("gpt"), metavar="DIR", help="folder for gpt.png and gpt.json")
    add("--resume", action="store_true", help="keep the rows in --output, and train only others")
    options = parser.parse_args()
    options.rows = list(dict.fromkeys(options.rows))
    if options.width % heads_of(options.width):
        parser.error(f"--width must be a multiple of its {heads_of(options.width)} heads; got {options.width}")
    try:
        # All rows now, before the first one trains.
        for row in options.rows:
            ROWS[row].strategy(options.every, options.delay)
    except ValueError as error:
        parser.error(f"--every {options.every} --delay {options.delay} with row {row}: {error}")
    return options


if __name__ == "__main__":
    main()
