"""How well methods learn: final quality on real data, over several seeds, next to ddp.

All runs of a seed start from the same weights and see the same batches. Runs go seed by seed, and each is written to a
JSON file as it ends; `--resume` skips the runs in that file. Prints a Markdown table.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from runs import COMMIT, load, made_with, save, spread, versions
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.nn.functional import cross_entropy

from lightning_sparsecomm import Channel, GradientSync, Method, NonFiniteGradientError, methods
from lightning_sparsecomm.basis import Round, SparseVector, Vector, Wire, link_bytes
from lightning_sparsecomm.codecs import TopK
from lightning_sparsecomm.codecs.selectors.base import k_of
from lightning_sparsecomm.exchange import DenseAllReduce, Exchange, Exchanged
from lightning_sparsecomm.strategies.lightning_fabric import SparseCommStrategy

# The examples are scripts, not a package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from command_line import at_least, file, folder, quieten
from images import DataName, Images, read_digits, read_fashion_mnist

TaskName = Literal["fashion-mnist", "digits", "shakespeare"]

BASELINE = "ddp"

TUNING_IMAGES = 10_000
TUNING_DIGITS = 300

CHARACTERS = 50  # of context, at most
HELD_OUT = 0.05  # of the text
EVALUATED_WINDOWS = 2_000  # the first of the held-out text


class Options(NamedTuple):
    """What the command line asks for."""

    task: TaskName
    data_dir: Path
    text: Path | None
    seeds: int
    processes: int
    steps: int
    batch_size: int
    learning_rate: float
    density: float
    warmup_steps: int
    average_every: int
    rows: list[str]
    tuning: bool
    output: Path
    resume: bool

    def settings(self) -> dict[str, str | int | float | None]:
        """All that the result of a run depends on, besides row and seed. Equal for all runs of a file."""
        chosen = self._asdict()
        for name in ("data_dir", "text", "seeds", "rows", "output", "resume"):
            del chosen[name]
        return chosen | {"text": self.text.name if self.text is not None else None} | versions()


class Data(NamedTuple):
    """A task's data in memory, read once and inherited by all processes.

    Attributes:
        train: Training data, a row per sample.
        held_out: Data on which quality is measured, likewise.
        classes: Number of classes of images, or of distinct characters.
    """

    train: tuple[Tensor, ...]
    held_out: tuple[Tensor, ...]
    classes: int


class Learner(nn.Module):
    """A network with its optimizer and its measure of quality. Its forward pass returns the loss of a batch."""

    def forward(self, *batch: Tensor) -> Tensor:
        raise NotImplementedError

    def optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        """The optimizer that all methods train with."""
        raise NotImplementedError

    def quality(self, *held_out: Tensor) -> float:
        """Quality on some samples; the mean over samples."""
        raise NotImplementedError


class ImageNetwork(Learner):
    """A convolution and two linear layers. The convolution's large stride replaces pooling and keeps steps short."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, 6, stride=4, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 7 * 7, 256),
            nn.ReLU(),
            nn.Linear(256, classes),
        )

    def forward(self, *batch: Tensor) -> Tensor:
        images, labels = batch
        return cross_entropy(self.network(images), labels)

    def optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), learning_rate, momentum=0.9, weight_decay=1e-4)

    def quality(self, *held_out: Tensor) -> float:
        """Accuracy."""
        images, labels = held_out
        return float((self.network(images).argmax(dim=1) == labels).double().mean())


class DigitNetwork(ImageNetwork):
    """Two linear layers, for small images and short runs."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(8 * 8, 256), nn.ReLU(), nn.Linear(256, classes))


class CharacterModel(Learner):
    """Predicts each next character with an LSTM, whose state is empty at the start of each window."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, 64)
        self.lstm = nn.LSTM(64, 128, batch_first=True)
        self.output = nn.Linear(128, classes)

    def forward(self, *batch: Tensor) -> Tensor:
        """Mean cross-entropy of all characters but the first of each window, in nats."""
        windows = batch[0].long()
        states, _ = self.lstm(self.embedding(windows[:, :-1]))
        return cross_entropy(self.output(states).flatten(0, 1), windows[:, 1:].flatten())

    def optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), learning_rate)

    def quality(self, *held_out: Tensor) -> float:
        """Cross-entropy in nats per character."""
        return float(self(*held_out))


class TrueTopK(Exchange):
    """Shares the k elements whose sum over ranks is largest, which Sketched-SGD only estimates. It sends everything."""

    def __init__(self, density: float) -> None:
        self.density = density

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        shared, _, present = DenseAllReduce().exchange(x, context, wire)
        assert isinstance(shared, Tensor)
        found = TopK(self.density).select(shared, context)
        size = context.layout.size
        return Exchanged(SparseVector(found, shared[found], size), SparseVector(found, x.values[found], size), present)


def sketched(options: Options, columns_by_k: int, candidates: int = 36, clip: float | None = 1.0) -> Method:
    """Sketched-SGD with so many columns of the sketch, and so many candidates, per element that is shared."""
    # Draws no random numbers, which would change the training.
    with torch.device("meta"):
        network = (DigitNetwork if options.task == "digits" else ImageNetwork)(10)
    weights = sum(parameter.numel() for parameter in network.parameters() if parameter.dim() > 1)
    columns = columns_by_k * k_of(options.density, weights)
    return methods.sketched_sgd(density=options.density, columns=columns, candidates=candidates, clip=clip)


def paper_dgc(options: Options) -> Method:
    """Deep Gradient Compression to the letter."""
    return methods.dgc(options.density, options.warmup_steps, clip=1.0, momentum_masking=True, follow_rate=False)


def true_top_k(options: Options, clip: float | None = 1.0) -> Method:
    """Sketched-SGD without a sketch."""
    sketched, dense = methods.sketched_sgd(density=options.density, clip=clip).syncs
    assert isinstance(sketched, GradientSync)
    channel = Channel(TrueTopK(options.density), sketched.channel.memories)
    return Method([GradientSync(channel, min_dimensions=2), dense])


class Row(NamedTuple):
    """One way to train.

    Attributes:
        method: Makes the method; None for ddp.
        clip: Largest norm of the averaged gradient, with ddp; None for no clipping.
    """

    method: Callable[[Options], Method] | None = None
    clip: float | None = None


IMAGE_ROWS = {
    # Clipped as dgc is, so that rows differ from it in one thing.
    BASELINE: Row(clip=1.0),
    "ddp, no clipping": Row(),
    "gradient dropping": Row(lambda options: methods.gradient_dropping(density=options.density, scope="tensor")),
    "dgc": Row(lambda options: methods.dgc(density=options.density, warmup_steps=options.warmup_steps, clip=1.0)),
    "dgc, as in the paper": Row(paper_dgc),
    "dgc, no momentum correction": Row(
        lambda options: methods.dgc(
            density=options.density, warmup_steps=options.warmup_steps, clip=1.0, momentum_correction=False
        )
    ),
    "dgc, masking": Row(
        lambda options: methods.dgc(
            density=options.density, warmup_steps=options.warmup_steps, clip=1.0, momentum_masking=True
        )
    ),
    "dgc, no clipping": Row(
        lambda options: methods.dgc(density=options.density, warmup_steps=options.warmup_steps, clip=None)
    ),
    "dgc, no warm-up": Row(lambda options: methods.dgc(density=options.density, warmup_steps=0, clip=1.0)),
    "true top-k": Row(true_top_k),
    "sketched_sgd": Row(lambda options: methods.sketched_sgd(density=options.density, clip=1.0)),
    # The default is 10 columns and 36 candidates for each of the k elements.
    "sketched_sgd, 30 k columns": Row(lambda options: sketched(options, 30)),
    "sketched_sgd, 100 k columns": Row(lambda options: sketched(options, 100)),
    # As many bytes as the row above.
    "sketched_sgd, 30 k columns, P = 390": Row(lambda options: sketched(options, 30, candidates=390)),
    "true top-k, no clipping": Row(lambda options: true_top_k(options, clip=None)),
    "sketched_sgd, no clipping": Row(lambda options: methods.sketched_sgd(density=options.density)),
    "sketched_sgd, 100 k columns, no clipping": Row(lambda options: sketched(options, 100, clip=None)),
}


def local_gradients(
    local: Literal["none", "partial", "sum", "error"], averaged: bool = True, warmed_up: bool = True
) -> Row:
    """Gradient dropping that applies locally what it does not send, in the given mode."""
    return Row(
        lambda options: methods.gradient_dropping(
            density=0.01,
            warmup_steps=options.warmup_steps if warmed_up else 0,
            local=local,
            average_every=options.average_every if averaged else None,
        )
    )


TEXT_ROWS = {
    BASELINE: Row(),
    # Compare rows with warm-up with each other, and likewise rows without.
    "none": local_gradients("none", averaged=False, warmed_up=False),
    "partial, averaged, not warmed up": local_gradients("partial", warmed_up=False),
    "sum, averaged, not warmed up": local_gradients("sum", warmed_up=False),
    "error, averaged, not warmed up": local_gradients("error", warmed_up=False),
    "none, warmed up": local_gradients("none", averaged=False),
    "partial, averaged": local_gradients("partial"),
    "sum, averaged": local_gradients("sum"),
    "error, averaged": local_gradients("error"),
    "partial, never averaged": local_gradients("partial", averaged=False),
}


def read_images(options: Options) -> Data:
    """The task's images; for tuning, the last training images are held out and the test images are not used."""
    return images_of("digits" if options.task == "digits" else "fashion-mnist", options.data_dir, options.tuning)


def images_of(name: DataName, data_dir: Path, hold_out_training: bool = False) -> Data:
    """Training images, and held-out ones: the test images, or with `hold_out_training` the last training images.

    Raises:
        OSError: They are missing and cannot be downloaded.
        ValueError: They are damaged.
    """
    if name == "digits":
        read, tuning = read_digits(), TUNING_DIGITS
    else:
        Images("fashion-mnist", data_dir).prepare_data()
        read, tuning = read_fashion_mnist(data_dir), TUNING_IMAGES
    images, labels, *test = read.standardized()
    if hold_out_training:
        test = [images[-tuning:], labels[-tuning:]]
        images, labels = images[:-tuning], labels[:-tuning]
    return Data((images, labels), tuple(test), classes=10)


def read_text(options: Options) -> Data:
    """Consecutive windows of the text. Its last part is held out, or for tuning the part before the last."""
    path = options.text or options.data_dir / "shakespeare.txt"
    code_points = np.frombuffer(path.read_text(encoding="utf-8").encode("utf-32-le"), np.uint32)
    distinct, indices = np.unique(code_points, return_inverse=True)
    text = torch.from_numpy(indices.astype(np.int16))
    part = int(HELD_OUT * len(text))
    end = len(text) - part if options.tuning else len(text)
    train, held_out = text[: end - part], text[end - part : end]
    if len(held_out) <= CHARACTERS:
        least = math.ceil((CHARACTERS + 1) / HELD_OUT)
        raise ValueError(f"{path} must have at least {least:,} characters; got {len(text):,}. Name a longer text.")
    # One character more: the successor of the last one is predicted too.
    train_windows, windows = (some.unfold(0, CHARACTERS + 1, CHARACTERS) for some in (train, held_out))
    return Data((train_windows,), (windows[:EVALUATED_WINDOWS],), len(distinct))


class Task(NamedTuple):
    """A task, and how its quality is printed.

    Attributes:
        read: Reads the data.
        learner: Makes the network, given the number of classes.
        rows: The ways to train, by name.
        batch_size, steps, warmup_steps, learning_rate: Defaults of the options.
        quality: Name and unit of the quality.
        unit: Unit of a difference of qualities.
        scale: Factor from the quality to this unit.
        decimals: Number of decimals.
    """

    read: Callable[[Options], Data]
    learner: Callable[[int], Learner]
    rows: dict[str, Row]
    batch_size: int
    steps: int
    warmup_steps: int
    learning_rate: float
    quality: str
    unit: str
    scale: float
    decimals: int


TASKS: dict[TaskName, Task] = {
    "fashion-mnist": Task(
        read_images,
        ImageNetwork,
        IMAGE_ROWS,
        batch_size=32,
        steps=14_040,  # 30 epochs
        warmup_steps=1404,
        learning_rate=0.05,
        quality="accuracy, %",
        unit="points",
        scale=100,
        decimals=2,
    ),
    "digits": Task(
        read_images,
        DigitNetwork,
        IMAGE_ROWS,
        batch_size=16,
        steps=1000,
        warmup_steps=100,
        learning_rate=0.05,
        quality="accuracy, %",
        unit="points",
        scale=100,
        decimals=2,
    ),
    "shakespeare": Task(
        read_text,
        CharacterModel,
        TEXT_ROWS,
        batch_size=8,
        steps=1500,
        warmup_steps=200,
        learning_rate=5e-3,
        quality="nats per character",
        unit="nats",
        scale=1,
        decimals=4,
    ),
}


class Run(NamedTuple):
    """One training run.

    Attributes:
        row: Its row's name.
        seed: Seed of the initial weights and of the order of the data.
        quality: Quality at the end, on held-out data; None if training diverged.
        link_bytes: Bytes that the method put on the link, per rank.
        ledger: The same for each purpose in the ledger; empty for ddp, which has no ledger.
        steps: Optimizer steps.
        seconds: Total of all steps, on rank 0.
        method: The method in full.
        commit: Of lightning_sparsecomm; None if unknown.
    """

    row: str
    seed: int
    quality: float | None
    link_bytes: float
    ledger: dict[str, float]
    steps: int
    seconds: float
    method: str
    commit: str | None = None


def batches(data: Data, batch_size: int, rank: int, ranks: int, seed: int) -> Iterator[list[Tensor]]:
    """One rank's batches, endlessly: a new order in each epoch, cut into batches that ranks take in turns."""
    generator = torch.Generator().manual_seed(seed)
    samples, together = len(data.train[0]), ranks * batch_size
    while True:
        order = torch.randperm(samples, generator=generator)
        for chosen in order[: samples // together * together].view(-1, ranks, batch_size)[:, rank]:
            yield [tensor[chosen] for tensor in data.train]


def evaluate(learner: Learner, held_out: tuple[Tensor, ...]) -> float | None:
    """The network's quality on all samples; None if it is not finite."""
    learner.eval()
    with torch.no_grad():
        chunks = zip(*(tensor.split(500) for tensor in held_out))
        total = sum(len(chunk[0]) * learner.quality(*chunk) for chunk in chunks)
    finite = math.isfinite(total) and all(bool(parameter.isfinite().all()) for parameter in learner.parameters())
    return total / len(held_out[0]) if finite else None


def train(row: str, seed: int, data: Data, options: Options) -> Run:
    """One training run, with its measurement."""
    make, clip = TASKS[options.task].rows[row]
    method = None if make is None else make(options)
    name = f"{BASELINE}, clip={clip}" if method is None else repr(method)
    run = Run(row, seed, None, link_bytes=0.0, ledger={}, steps=options.steps, seconds=0.0, method=name, commit=COMMIT)
    strategy: DDPStrategy = (
        DDPStrategy(start_method="fork")
        if method is None
        else SparseCommStrategy(method=method, seed=seed, start_method="fork")
    )
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=options.processes)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run.json"
        try:
            fabric.launch(learn, run, clip, data, options, path)
        except ProcessRaisedException as error:
            # Divergence is a result; every other error is not.
            if NonFiniteGradientError.__name__ not in str(error):
                raise
            return run
        return Run(**json.loads(path.read_text()))


def learn(fabric: Fabric, run: Run, clip: float | None, data: Data, options: Options, path: Path) -> None:
    """What each process does. Rank 0 writes the run to a file, since Fabric starts the processes."""
    task, rank, ranks = TASKS[options.task], fabric.global_rank, fabric.world_size
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    learner = task.learner(data.classes)
    module, optimizer = fabric.setup(learner, learner.optimizer(options.learning_rate))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    begin = time.perf_counter()
    for batch in itertools.islice(batches(data, options.batch_size, rank, ranks, run.seed), options.steps):
        optimizer.zero_grad()
        fabric.backward(module(*batch))
        if clip is not None:
            fabric.clip_gradients(module, optimizer, max_norm=clip)
        optimizer.step()
        schedule.step()
    seconds = time.perf_counter() - begin
    gradient_bytes = options.steps * sum(parameter.nbytes for parameter in learner.parameters())
    sent_bytes, purposes = link_bytes("all_reduce", gradient_bytes, ranks), {}
    if isinstance(fabric.strategy, SparseCommStrategy):
        # A collective: replicas that drifted apart become one model before it is measured.
        fabric.strategy.settle()
        ledger = fabric.strategy.ledger
        assert ledger is not None
        purposes = {purpose: ledger.link_bytes(purpose) for purpose in ledger.rows}
        sent_bytes = ledger.sent_link_bytes
    if rank == 0:
        quality = evaluate(learner, data.held_out)
        done = run._replace(quality=quality, link_bytes=sent_bytes, ledger=purposes, seconds=seconds)
        path.write_text(json.dumps(done._asdict()))


def numbers(options: Options) -> Path:
    """The file of all runs of the task."""
    return options.output / f"{options.task}.json"


def table(runs: list[Run], options: Options) -> str:
    """A line for each row, as Markdown."""
    task = TASKS[options.task]
    baseline = {run.seed: run for run in runs if run.row == BASELINE}
    perplexity = ["perplexity"] if options.task == "shakespeare" else []
    header = ["row", "seeds", f"{task.quality}, mean", "standard deviation", "least – most", *perplexity]
    header += ["MB on the link per rank", "fewer bytes", f"less ddp, {task.unit}: mean", "standard deviation"]
    lines = [f"| {' | '.join(header)} |", f"|---|{'---:|' * (len(header) - 1)}"]
    for row in options.rows:
        finished = {run.seed: run for run in runs if run.row == row}
        qualities = {seed: task.scale * run.quality for seed, run in finished.items() if run.quality is not None}
        diverged = len(finished) - len(qualities)
        seeds = f"{len(finished)}, {diverged} diverged" if diverged else f"{len(finished)}"
        if not qualities:
            lines.append(f"| {row} | {seeds} |{' — |' * (len(header) - 2)}")
            continue
        # Seed by seed, so that the seed's own effect is not in the spread of the difference.
        references = {seed: run.quality for seed, run in baseline.items() if run.quality is not None}
        differences = [qualities[seed] - task.scale * references[seed] for seed in qualities if seed in references]
        sent = [finished[seed].link_bytes for seed in qualities]
        ratios = [baseline[seed].link_bytes / finished[seed].link_bytes for seed in qualities if seed in baseline]
        values, decimals = list(qualities.values()), task.decimals
        cells = [row, seeds, f"{statistics.mean(values):.{decimals}f}", deviation(values, decimals)]
        cells.append(spread(values, decimals))
        if perplexity:
            cells.append(f"{math.exp(statistics.mean(values)):.3f}")
        cells += [f"{statistics.mean(sent) / 1e6:,.2f}", f"{statistics.mean(ratios):,.1f} x" if ratios else "—"]
        if row == BASELINE or not differences:
            cells += ["—", "—"]
        else:
            cells += [f"{statistics.mean(differences):+.{decimals}f}", deviation(differences, decimals)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def deviation(values: list[float], decimals: int) -> str:
    """The standard deviation; a dash for a single value."""
    return f"{statistics.stdev(values):.{decimals}f}" if len(values) > 1 else "—"


def parse() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    # The help says which defaults depend on the task.
    by_task: dict[str, Any] = {"default": argparse.SUPPRESS, "metavar": "N"}
    images, digits, text = TASKS["fashion-mnist"], TASKS["digits"], TASKS["shakespeare"]
    add("--task", choices=get_args(TaskName), required=True, help="task to learn")
    add(
        "--data-dir",
        type=folder,
        default=Path("data"),
        metavar="DIR",
        help="folder of Fashion-MNIST or shakespeare.txt",
    )
    add("--text", type=file, default=None, metavar="FILE", help="another text for shakespeare, in UTF-8")
    add("--seeds", type=at_least(1), default=3, metavar="N", help="runs of each row, with seeds 0 to N-1")
    add(
        "--processes", type=at_least(2), default=4, metavar="N", help="processes on this machine's CPU, one thread each"
    )
    add(
        "--steps",
        type=at_least(1),
        **by_task,
        help=f"optimizer steps (default: {images.steps}, {digits.steps} of digits, {text.steps} of text)",
    )
    sizes = f"{images.batch_size} images, {digits.batch_size} digits, {text.batch_size} windows"
    batch_size = f"samples per process and step (default: {sizes})"
    add("--batch-size", type=at_least(1), **by_task, help=batch_size)
    rate = f"initial learning rate (default: {images.learning_rate} of SGD, {text.learning_rate} of Adam)"
    add("--learning-rate", type=float, **by_task, help=rate)
    lengths = f"{images.warmup_steps}, {digits.warmup_steps}, {text.warmup_steps}"
    warmup = f"warm-up of dgc, and of rows of shakespeare (default: {lengths})"
    add("--warmup-steps", type=at_least(0), **by_task, help=warmup)
    add(
        "--density",
        type=float,
        default=0.001,
        metavar="P",
        help="fraction sent by rows of images; those of text send 1%%",
    )
    add(
        "--average-every",
        type=at_least(1),
        default=100,
        metavar="N",
        help="steps between averages, in rows of shakespeare",
    )
    add("--rows", nargs="+", default=argparse.SUPPRESS, metavar="NAME", help="rows (default: all of the task)")
    tuning = "hold out a part of the training data, and measure on that instead: for choosing settings"
    add("--tuning", action="store_true", help=tuning)
    add("--output", type=folder, default=Path("learning"), metavar="DIR", help="folder for a JSON file of all runs")
    add("--resume", action="store_true", help="skip runs that this file already has")
    arguments = vars(parser.parse_args())
    task = TASKS[arguments["task"]]
    for name in ("steps", "batch_size", "learning_rate", "warmup_steps"):
        arguments.setdefault(name, getattr(task, name))
    arguments.setdefault("rows", list(task.rows))
    for row in arguments["rows"]:
        if row not in task.rows:
            rows = ", ".join(map(repr, task.rows))
            parser.error(f"--rows of {arguments['task']} must be among {rows}; got {row!r}")
    return Options(**arguments)


def main() -> None:
    options = parse()
    # One row never averages, on purpose.
    quieten(".*average_every.*")
    torch.set_num_threads(1)
    task = TASKS[options.task]
    for row in options.rows:
        make = task.rows[row].method
        if make is not None:
            make(options)  # errors in a method show now, not after hours
    path, settings = numbers(options), options.settings()
    try:
        runs = [Run(**run) for run in load(path, settings, options.resume)]
    except (FileExistsError, ValueError) as error:
        sys.exit(str(error))
    options.output.mkdir(parents=True, exist_ok=True)
    data = task.read(options)
    parameters = sum(parameter.numel() for parameter in task.learner(data.classes).parameters())
    wanted = [(row, seed) for seed in range(options.seeds) for row in options.rows]
    for row, seed in wanted:
        if any((run.row, run.seed) == (row, seed) for run in runs):
            continue
        runs.append(train(row, seed, data, options))
        save([run._asdict() for run in runs], path, settings)
        quality = runs[-1].quality
        shown = "diverged" if quality is None else f"{task.scale * quality:.{task.decimals}f} {task.quality}"
        sent = f"{runs[-1].link_bytes / 1e6:,.2f} MB"
        print(f"seed {seed}, {row}: {shown}, {sent}, {runs[-1].seconds:.1f} s", file=sys.stderr, flush=True)
    held_out = "tuning" if options.tuning else "test"
    versions = [f"{name} {settings[name]}" for name in ("lightning_sparsecomm", "torch", "pytorch-lightning")]
    print(
        f"{options.task}: {options.processes} processes, {parameters:,} parameters, batches of {options.batch_size} per"
        f" process, {options.steps} steps, {len(data.held_out[0]):,} {held_out} samples; {', '.join(versions)}\n"
    )
    finished = [run for run in runs if (run.row, run.seed) in wanted]
    print(f"{table(finished, options)}\n\n{made_with(run.commit for run in finished)}")


if __name__ == "__main__":
    main()
