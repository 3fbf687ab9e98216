"""How well methods learn: final quality on real data over several seeds, beside plain ddp's.

Every run of a seed starts from the same weights and sees the same batches, whatever the method. Runs go seed by seed,
and each is written to a JSON file as it ends: `--resume` goes on after the last one. Prints a Markdown table of them.
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
from runs import COMMIT, load, made_with, save, versions
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.nn.functional import cross_entropy

from lightning_sparsecomm import Channel, GradientSync, Method, NonFiniteGradientError, methods
from lightning_sparsecomm.codecs import TopK
from lightning_sparsecomm.codecs.selectors import k_of
from lightning_sparsecomm.exchange import DenseAllReduce, Exchange, Exchanged, Outgoing
from lightning_sparsecomm.layout import SparseVector
from lightning_sparsecomm.rounds import Round
from lightning_sparsecomm.strategies.lightning_fabric import SparseCommStrategy
from lightning_sparsecomm.wire import Wire, link_bytes

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
EVALUATED_WINDOWS = 2_000  # of the held-out text, from its beginning


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
        """All that the result of a run depends on, besides row and seed. Runs go together where it is equal."""
        chosen = self._asdict()
        for name in ("data_dir", "text", "seeds", "rows", "output", "resume"):
            del chosen[name]
        return chosen | {"text": self.text.name if self.text is not None else None} | versions()


class Data(NamedTuple):
    """A task's data in memory, read once and inherited by all processes.

    Attributes:
        train: What is trained on, a row per sample.
        held_out: What quality is measured on, likewise.
        classes: Classes of images, or distinct characters.
    """

    train: tuple[Tensor, ...]
    held_out: tuple[Tensor, ...]
    classes: int


class Learner(nn.Module):
    """A network that knows what it is good for. Its forward pass gives the loss of a batch."""

    def forward(self, *batch: Tensor) -> Tensor:
        raise NotImplementedError

    def optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        """The optimizer that all methods train with."""
        raise NotImplementedError

    def quality(self, *held_out: Tensor) -> float:
        """How good the network is on some samples; the mean over samples."""
        raise NotImplementedError


class ImageNetwork(Learner):
    """A convolution and two linear layers. The convolution's large stride keeps steps short, without pooling."""

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
        """Fraction of the images that are recognized."""
        images, labels = held_out
        return float((self.network(images).argmax(dim=1) == labels).double().mean())


class DigitNetwork(ImageNetwork):
    """Two linear layers, for small images and short runs."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(8 * 8, 256), nn.ReLU(), nn.Linear(256, classes))


class CharacterModel(Learner):
    """Predicts each next character by an LSTM. Each window begins in an empty state, in training and in evaluation."""

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
    """The k elements of largest sum over ranks: what Sketched-SGD looks for, told by sending everything."""

    def __init__(self, density: float) -> None:
        self.density = density

    def run(self, outgoing: Outgoing, round: Round, wire: Wire) -> Exchanged:
        whole = DenseAllReduce().run(outgoing, round, wire)
        x, shared = self.dense(outgoing), whole.shared
        assert isinstance(shared, Tensor)
        found = TopK(self.density).select(shared, round)
        return Exchanged(
            SparseVector(found, shared[found], len(x)), SparseVector(found, x[found], len(x)), whole.present
        )


def sketched(options: Options, columns_by_k: int, candidates: int = 36, clip: float | None = 1.0) -> Method:
    """Sketched-SGD whose sketch has so many columns, and so many candidates, for each element that is shared."""
    # Without drawing the random numbers that training is to begin with.
    with torch.device("meta"):
        network = (DigitNetwork if options.task == "digits" else ImageNetwork)(10)
    weights = sum(parameter.numel() for parameter in network.parameters() if parameter.dim() > 1)
    columns = columns_by_k * k_of(options.density, weights)
    return methods.sketched_sgd(density=options.density, columns=columns, candidates=candidates, clip=clip)


def true_top_k(options: Options, clip: float | None = 1.0) -> Method:
    """Sketched-SGD without a sketch."""
    sketched, dense = methods.sketched_sgd(density=options.density, clip=clip).syncs
    assert isinstance(sketched, GradientSync)
    channel = Channel(TrueTopK(options.density), sketched.channel.memories)
    return Method([GradientSync(channel, min_dimensions=2), dense])


class Row(NamedTuple):
    """One way to train.

    Attributes:
        method: Makes the method, late: a row whose method is missing disturbs no other. None is ddp.
        clip: Largest norm of the averaged gradient, where ddp clips it.
    """

    method: Callable[[Options], Method] | None = None
    clip: float | None = None


IMAGE_ROWS = {
    # Clipped like dgc, so that all rows but two differ from it in one thing.
    BASELINE: Row(clip=1.0),
    "ddp, no clipping": Row(),
    "gradient dropping": Row(lambda options: methods.gradient_dropping(density=options.density, scope="tensor")),
    "dgc": Row(lambda options: methods.dgc(density=options.density, warmup_steps=options.warmup_steps, clip=1.0)),
    "dgc, no momentum correction": Row(
        lambda options: methods.dgc(
            density=options.density, warmup_steps=options.warmup_steps, clip=1.0, momentum_correction=False
        )
    ),
    "dgc, no masking": Row(
        lambda options: methods.dgc(
            density=options.density, warmup_steps=options.warmup_steps, clip=1.0, momentum_masking=False
        )
    ),
    "dgc, no clipping": Row(
        lambda options: methods.dgc(density=options.density, warmup_steps=options.warmup_steps, clip=None)
    ),
    "dgc, no warm-up": Row(lambda options: methods.dgc(density=options.density, warmup_steps=0, clip=1.0)),
    "true top-k": Row(true_top_k),
    "sketched_sgd": Row(lambda options: methods.sketched_sgd(density=options.density, clip=1.0)),
    # By default, there are 10 for each of the k, and 36 candidates.
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
    """Gradient dropping in which what is not sent is applied locally, in the way named `local`."""
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
    # Those that are warmed up are to be compared with each other, and those that are not.
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
    """Images; for tuning, the last training images are held out and the test images are not looked at."""
    return images_of("digits" if options.task == "digits" else "fashion-mnist", options.data_dir, options.tuning)


def images_of(name: DataName, data_dir: Path, hold_out_training: bool = False) -> Data:
    """Images to train and to measure on: the test images, or, with the test images untouched, the last training images.

    Raises:
        OSError: They are not there, and cannot be fetched.
        ValueError: They are damaged.
    """
    if name == "digits":
        read, tuning = read_digits(), TUNING_DIGITS
    else:
        Images("fashion-mnist", data_dir).prepare_data()
        read, tuning = read_fashion_mnist(data_dir), TUNING_IMAGES
    mean, std = read.train_images.mean(), read.train_images.std()
    images, labels = (read.train_images - mean) / std, read.train_labels
    test = (read.test_images - mean) / std, read.test_labels
    if hold_out_training:
        test = images[-tuning:], labels[-tuning:]
        images, labels = images[:-tuning], labels[:-tuning]
    return Data((images, labels), test, classes=10)


def read_text(options: Options) -> Data:
    """Windows of the text, side by side; its last part is held out, or for tuning, the part before the last."""
    path = options.text or options.data_dir / "shakespeare.txt"
    code_points = np.frombuffer(path.read_text(encoding="utf-8").encode("utf-32-le"), np.uint32)
    distinct, indices = np.unique(code_points, return_inverse=True)
    text = torch.from_numpy(indices.astype(np.int16))
    part = int(HELD_OUT * len(text))
    end = len(text) - part if options.tuning else len(text)
    train, held_out = text[: end - part], text[end - part : end]
    if len(held_out) <= CHARACTERS:
        raise ValueError(f"{path} is too short: {len(text):,} characters.")
    # One character more, since what follows the last one is to be predicted too.
    train_windows, windows = (some.unfold(0, CHARACTERS + 1, CHARACTERS) for some in (train, held_out))
    return Data((train_windows,), (windows[:EVALUATED_WINDOWS],), len(distinct))


class Task(NamedTuple):
    """What is learnt, and how its quality is written down.

    Attributes:
        read: Reads the data.
        learner: Makes the network for a number of classes.
        rows: The ways to train, by name.
        batch_size, steps, warmup_steps, learning_rate: Defaults of the options.
        quality: Name and unit of the quality.
        unit: Unit of a difference of qualities.
        scale: What the quality is multiplied by, to be in this unit.
        decimals: How many are printed.
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
        row: Its name.
        seed: Of the first weights and of the order of the data.
        quality: At the end, on what was held out; None where training ran out of finite numbers.
        link_bytes: Bytes that the method has put on the link, per rank.
        ledger: The same for every purpose in the ledger; empty for ddp, which has none.
        steps: Optimizer steps.
        seconds: Of all steps, on rank 0.
        method: The method in full.
        commit: With which it was made; None if that is not known.
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
    """One rank's batches without end: a new order in each epoch, cut into batches for all ranks by turns."""
    generator = torch.Generator().manual_seed(seed)
    samples, together = len(data.train[0]), ranks * batch_size
    while True:
        order = torch.randperm(samples, generator=generator)
        for chosen in order[: samples // together * together].view(-1, ranks, batch_size)[:, rank]:
            yield [tensor[chosen] for tensor in data.train]


def evaluate(learner: Learner, held_out: tuple[Tensor, ...]) -> float | None:
    """The network's quality on all samples; None where it is no number."""
    learner.eval()
    with torch.no_grad():
        chunks = zip(*(tensor.split(500) for tensor in held_out))
        total = sum(len(chunk[0]) * learner.quality(*chunk) for chunk in chunks)
    finite = math.isfinite(total) and all(bool(parameter.isfinite().all()) for parameter in learner.parameters())
    return total / len(held_out[0]) if finite else None


def train(row: str, seed: int, data: Data, options: Options) -> Run:
    """One training run from its beginning to its measurement."""
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
            # To diverge is a result; everything else is not.
            if NonFiniteGradientError.__name__ not in str(error):
                raise
            return run
        return Run(**json.loads(path.read_text()))


def learn(fabric: Fabric, run: Run, clip: float | None, data: Data, options: Options, path: Path) -> None:
    """What each process does; rank 0 writes the run to a file, since it is a process that Fabric has started."""
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
        # Collective: where replicas have gone apart, what is measured is their average.
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
        # Seed by seed: what the seed itself does to both is not in the spread of the difference.
        references = {seed: run.quality for seed, run in baseline.items() if run.quality is not None}
        differences = [qualities[seed] - task.scale * references[seed] for seed in qualities if seed in references]
        sent = [finished[seed].link_bytes for seed in qualities]
        ratios = [baseline[seed].link_bytes / finished[seed].link_bytes for seed in qualities if seed in baseline]
        values, decimals = list(qualities.values()), task.decimals
        cells = [row, seeds, f"{statistics.mean(values):.{decimals}f}", deviation(values, decimals)]
        cells.append(f"{min(values):.{decimals}f} – {max(values):.{decimals}f}")
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
    """Standard deviation; none of a single value."""
    return f"{statistics.stdev(values):.{decimals}f}" if len(values) > 1 else "—"


def parse() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    # Defaults that depend on the task are told in the help instead.
    by_task: dict[str, Any] = {"default": argparse.SUPPRESS, "metavar": "N"}
    images, digits, text = TASKS["fashion-mnist"], TASKS["digits"], TASKS["shakespeare"]
    add("--task", choices=get_args(TaskName), required=True, help="what is learnt")
    add("--data-dir", type=folder, default=Path("data"), metavar="DIR", help="of Fashion-MNIST or shakespeare.txt")
    add("--text", type=file, default=None, metavar="FILE", help="another text for shakespeare, in UTF-8")
    add("--seeds", type=at_least(1), default=3, metavar="N", help="runs of each row, with seeds 0 to N-1")
    add("--processes", type=at_least(2), default=4, metavar="N", help="on this machine's CPU, one thread each")
    add(
        "--steps",
        type=at_least(1),
        **by_task,
        help=f"(default: {images.steps}, {digits.steps} of digits, {text.steps} of text)",
    )
    sizes = f"{images.batch_size} images, {digits.batch_size} digits, {text.batch_size} windows"
    batch_size = f"samples per process and step (default: {sizes})"
    add("--batch-size", type=at_least(1), **by_task, help=batch_size)
    rate = f"at first, of all rows (default: {images.learning_rate} of SGD, {text.learning_rate} of Adam)"
    add("--learning-rate", type=float, **by_task, help=rate)
    lengths = f"{images.warmup_steps}, {digits.warmup_steps}, {text.warmup_steps}"
    warmup = f"of dgc, and of rows of shakespeare (default: {lengths})"
    add("--warmup-steps", type=at_least(0), **by_task, help=warmup)
    add("--density", type=float, default=0.001, metavar="P", help="of rows of images; those of text send 1%%")
    add("--average-every", type=at_least(1), default=100, metavar="N", help="steps, of rows of shakespeare")
    add("--rows", nargs="+", default=argparse.SUPPRESS, metavar="NAME", help="of the table (default: all of the task)")
    tuning = "measure on a part of the training data that is then not trained on, to choose settings by"
    add("--tuning", action="store_true", help=tuning)
    add("--output", type=folder, default=Path("learning"), metavar="DIR", help="for a JSON file of all runs")
    add("--resume", action="store_true", help="skip runs that are in this file already")
    arguments = vars(parser.parse_args())
    task = TASKS[arguments["task"]]
    for name in ("steps", "batch_size", "learning_rate", "warmup_steps"):
        arguments.setdefault(name, getattr(task, name))
    arguments.setdefault("rows", list(task.rows))
    for row in arguments["rows"]:
        if row not in task.rows:
            parser.error(f"--rows of {arguments['task']} are {', '.join(map(repr, task.rows))}; got {row!r}")
    return Options(**arguments)


def main() -> None:
    options = parse()
    # A row does without averaging on purpose.
    quieten(".*average_every.*")
    torch.set_num_threads(1)
    task = TASKS[options.task]
    for row in options.rows:
        make = task.rows[row].method
        if make is not None:
            make(options)  # what is wrong with a method shows now, not after hours
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
