"""Trains the same network on the same images with ddp and with sparsecomm over a slow link, and compares them.

Prints a table of accuracy, time and bytes. Writes a plot, and all numbers as JSON.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import NamedTuple, get_args

import pytorch_lightning as pl
import torch
from classifier import Classifier
from command_line import at_least, folder, quieten
from images import TEST_IMAGES, DataName, Images
from matplotlib.figure import Figure
from pytorch_lightning.strategies import StrategyRegistry
from slow_link import enter

import lightning_sparsecomm  # noqa: F401  (registers the names of the strategies)

EPOCHS: dict[DataName, int] = {"digits": 8, "fashion-mnist": 5}


class Epoch(NamedTuple):
    """Results at the end of an epoch.

    Attributes:
        epoch: Epochs finished.
        accuracy: Fraction of the test images that are classified correctly.
        sent_bytes: Bytes of gradients that one rank has put on the link so far.
        ddp_bytes: Bytes that it would have put there with ddp.
        seconds: Seconds of training so far, without those of the test.
    """

    epoch: int
    accuracy: float
    sent_bytes: float
    ddp_bytes: float
    seconds: float


class Recorder(pl.Callback):
    """Writes a list of Epochs to a file, since rank 0 may be a process that the strategy has started.

    Args:
        path: Where rank 0 writes, as JSON.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.epochs: list[Epoch] = []
        self.gradient_bytes = 0
        self.seconds = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        torch.set_num_threads(1)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.begin = time.perf_counter()

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        gradients = (parameter.grad for parameter in pl_module.parameters())
        self.gradient_bytes += sum(gradient.nbytes for gradient in gradients if gradient is not None)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seconds += time.perf_counter() - self.begin

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        ranks = trainer.world_size
        ddp_bytes = self.gradient_bytes * 2 * (ranks - 1) / ranks  # a ring all-reduce
        ledger = getattr(trainer.strategy, "ledger", None)
        sent_bytes = ddp_bytes if ledger is None else ledger.link_bytes("gradients")
        accuracy = float(trainer.callback_metrics["accuracy"])
        epoch = Epoch(trainer.current_epoch + 1, accuracy, sent_bytes, ddp_bytes, self.seconds)
        self.epochs.append(epoch)
        if trainer.is_global_zero:
            self.path.write_text(json.dumps([epoch._asdict() for epoch in self.epochs]))
            sent = f"{sent_bytes / 1e6:8.2f} MB sent"
            print(f"  epoch {epoch.epoch:2} of {trainer.max_epochs}: {accuracy:6.1%} right, {sent}", flush=True)


class Options(NamedTuple):
    """What the command line asks for."""

    strategies: list[str]
    data: DataName
    data_dir: Path
    processes: int
    epochs: int
    batch_size: int
    seed: int
    link: int
    output: Path


def main() -> None:
    options = parse()
    # With the links of data centres, sending takes no time that one would see on a single machine.
    refused = enter(options.link, options.processes) if options.link else None
    quieten()
    runs: dict[str, list[Epoch]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for strategy in options.strategies:
            path = Path(directory) / f"{strategy}.json"
            trainer = train(strategy, options, path)
            # With a plain name such as ddp, every process runs this whole script; rank 0 reports.
            if trainer.is_global_zero:
                runs[strategy] = [Epoch(**epoch) for epoch in json.loads(path.read_text())]
    if trainer.is_global_zero:
        if refused is not None:
            runs = {name: [with_link(epoch, options.link) for epoch in epochs] for name, epochs in runs.items()}
        report(runs, options, refused)


def train(strategy: str, options: Options, path: Path) -> pl.Trainer:
    """Trains from the same weights on the same batches with any strategy; rank 0 writes its epochs to `path`."""
    pl.seed_everything(options.seed, verbose=False)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=options.processes,
        max_epochs=options.epochs,
        callbacks=[Recorder(path)],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    if trainer.is_global_zero:
        print(f"Trainer(strategy={strategy!r})", flush=True)
    trainer.fit(Classifier(hidden=1024), Images(options.data, options.data_dir, options.batch_size))
    return trainer


def with_link(epoch: Epoch, megabits: int) -> Epoch:
    """The epoch with the time that its bytes would take on the link."""
    return epoch._replace(seconds=epoch.seconds + 8 * epoch.sent_bytes / (megabits * 1e6))


def report(runs: dict[str, list[Epoch]], options: Options, refused: str | None) -> None:
    """Prints the table, and writes plot and numbers."""
    options.output.mkdir(parents=True, exist_ok=True)
    numbers, plot = options.output / "compare.json", options.output / "compare.png"
    link = f"{options.link} Mbit/s" if options.link else "no link"
    rows = [["strategy", "test accuracy", "MB sent per rank", "fewer bytes", f"seconds, {link}", "times faster"]]
    slowest = next(iter(runs.values()))[-1].seconds
    for strategy, epochs in runs.items():
        last = epochs[-1]
        sent, ratio = f"{last.sent_bytes / 1e6:,.2f}", f"{last.ddp_bytes / last.sent_bytes:.1f} x"
        faster = f"{slowest / last.seconds:.1f} x"
        rows.append([strategy, f"{last.accuracy:.1%}", sent, ratio, f"{last.seconds:.1f}", faster])
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        print("    ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]))
    draw(runs, options, plot, refused is not None)
    write(runs, options, numbers)
    test_images = TEST_IMAGES[options.data]
    error = max((e[-1].accuracy * (1 - e[-1].accuracy) / test_images) ** 0.5 for e in runs.values())
    print(f"""
{options.processes} processes, {options.epochs} epochs of {options.data}, seed {options.seed}.
Accuracy: on {test_images:,} test images; standard error {error:.1%}.
MB: 10^6 bytes of gradients on the link, by the collectives' published algorithms (a ring all-reduce
    sends 2(W-1)/W times its tensor, an all-gather W-1 times); 'fewer bytes' is against ddp's all-reduce.
Seconds: training only. {_how_timed(options, refused)}

Plot: {plot}
Numbers: {numbers}""")


def _how_timed(options: Options, refused: str | None) -> str:
    if not options.link:
        return "On one machine sending is almost free: they show what compression costs."
    if refused is None:
        return f"Measured: each process sends through a link of {options.link} Mbit/s."
    return (
        f"Computed, not measured: those on this machine, and {options.link} Mbit/s for the bytes, as no\n"
        f"    slow link could be set up here: {refused}."
    )


def write(runs: dict[str, list[Epoch]], options: Options, path: Path) -> None:
    """Settings, and for each strategy its last epoch, the ratio to ddp's bytes, and all epochs, as JSON."""
    settings = options._asdict() | {"data_dir": str(options.data_dir), "output": str(options.output)}
    results = {
        strategy: {
            **epochs[-1]._asdict(),
            "ratio": epochs[-1].ddp_bytes / epochs[-1].sent_bytes,
            "history": [epoch._asdict() for epoch in epochs],
        }
        for strategy, epochs in runs.items()
    }
    path.write_text(json.dumps({"settings": settings, "runs": results}, indent=2) + "\n")


def draw(runs: dict[str, list[Epoch]], options: Options, path: Path, computed: bool) -> None:
    """Accuracy against time and against bytes, one line per strategy, one point per epoch."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    by_time, by_bytes = figure.subplots(1, 2, sharey=True)
    for strategy, epochs in runs.items():
        accuracies = [100 * epoch.accuracy for epoch in epochs]
        by_time.plot([epoch.seconds for epoch in epochs], accuracies, ".-", label=strategy)
        by_bytes.plot([epoch.sent_bytes / 1e6 for epoch in epochs], accuracies, ".-", label=strategy)
    link = f"a link of {options.link} Mbit/s" if options.link else "one machine"
    on = "over" if options.link else "on"
    by_time.set_xlabel(f"seconds of training {on} {link}{', computed' if options.link and computed else ''}")
    by_time.set_ylabel("test accuracy, %")
    by_bytes.set_xscale("log")
    by_bytes.xaxis.set_major_formatter("{x:g}")
    by_bytes.set_xlabel("MB of gradients sent by one rank")
    for axes in (by_time, by_bytes):
        axes.grid(alpha=0.3)
    by_bytes.legend()
    figure.suptitle(f"{options.data}, {options.processes} processes, one point per epoch")
    figure.savefig(path, dpi=150)


def parse() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    names = ["ddp", "ddp_spawn", "ddp_fork"]
    # One that needs a lighthouse is left out.
    ours = [name for name in StrategyRegistry.available_strategies() if name.startswith("sparsecomm")]
    names += [name for name in ours if "elastic" not in name]
    default = ["ddp", "sparsecomm"]
    add(
        "--strategies",
        nargs="+",
        choices=names,
        default=default,
        metavar="NAME",
        help="names as in Trainer(strategy=NAME)",
    )
    add(
        "--data", choices=get_args(DataName), default="digits", help="images to train on; digits come with scikit-learn"
    )
    data = "folder of Fashion-MNIST, downloaded if missing"
    add("--data-dir", type=folder, default=Path("data"), metavar="DIR", help=data)
    add(
        "--processes", type=at_least(2), default=2, metavar="N", help="processes on this machine's CPU, one thread each"
    )
    epochs = (
        f"passes over the training images (default: {EPOCHS['digits']}, or {EPOCHS['fashion-mnist']} of fashion-mnist)"
    )
    add("--epochs", type=at_least(1), default=argparse.SUPPRESS, metavar="N", help=epochs)
    add("--batch-size", type=at_least(1), default=32, metavar="N", help="images per process and step")
    add("--seed", type=int, default=0, metavar="N", help="seed of the initial weights and of the order of images")
    link = "Mbit/s at which each process can send; 0 for no slow link"
    add("--link", type=at_least(0), default=100, metavar="MBIT", help=link)
    add(
        "--output",
        type=folder,
        default=Path("comparison"),
        metavar="DIR",
        help="folder for compare.png and compare.json",
    )
    arguments = vars(parser.parse_args())
    arguments.setdefault("epochs", EPOCHS[arguments["data"]])
    options = Options(**arguments)
    if len({start_method(name) for name in options.strategies}) > 1:
        parser.error(
            "--strategies must all start processes in the same way: all plain, all _spawn, or all _fork or _notebook"
        )
    return options


def start_method(strategy: str) -> str:
    """How the strategy of this name starts its processes."""
    methods = {"_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
    return next((method for suffix, method in methods.items() if strategy.endswith(suffix)), "popen")


if __name__ == "__main__":
    main()
