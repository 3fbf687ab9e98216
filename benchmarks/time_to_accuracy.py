"""Seconds of training until an accuracy is reached over a slow network, with ddp and with each method.

Each rank runs on its own host in the lab of network.py, behind a cable of `--rate`; needs Linux. All runs of a
seed start from the same weights and see the same batches, with the same optimizer at a constant learning rate. Rank 0
measures accuracy on the test images every `--measure-every` steps, while the clock stands still and nothing is counted.
Each run is written to a JSON file as it ends; `--resume` skips the runs in that file. Prints a Markdown table, and
draws accuracy against seconds.
"""

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

# torch warns that the lab's hosts have no names.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from hooks import bf16_hook
from learning import BASELINE, TASKS, Data, at_least, batches, deviation, evaluate, folder, images_of, quieten
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from network import DEVICE, Counters, Lab, LabError, machine
from runs import COMMIT, load, made_with, save, spread, versions
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparsecomm import Method, NonFiniteGradientError, methods
from lightning_sparsecomm.basis import link_bytes
from lightning_sparsecomm.strategies.lightning_fabric import SparseCommStrategy

TaskName = Literal["fashion-mnist", "digits"]

# Steps of a network that is thrown away, so that compiling, first allocations and rebuilt buckets do not count.
REHEARSED_STEPS = 3

# The most that a run may take besides its counted seconds: measurements, and compiling where numba has no cache.
BESIDE_SECONDS = 900


class Options(NamedTuple):
    """What the command line asks for."""

    task: TaskName
    data_dir: Path
    rows: list[str]
    seeds: int
    ranks: int
    rate: str
    batch_size: int
    learning_rate: float
    target: float
    measure_every: int
    most_steps: int
    most_seconds: float
    output: Path
    resume: bool

    def settings(self) -> dict[str, Any]:
        """All that the result of a run depends on, besides row and seed. Equal for all runs of a file."""
        chosen = self._asdict()
        for name in ("data_dir", "rows", "seeds", "output", "resume"):
            del chosen[name]
        return chosen | machine() | versions()

    @property
    def numbers(self) -> Path:
        """The file of all runs."""
        return self.output / f"time_to_accuracy_{self.task}.json"


class Bfloat16Strategy(DDPStrategy):
    """ddp with torch's hook that rounds gradients to bfloat16, which Lightning registers on GPUs only."""

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        wrapped = super().setup_module(module)
        wrapped.register_comm_hook(None, bf16_hook)
        return wrapped


class Row(NamedTuple):
    """One way to train.

    Attributes:
        method: Makes the method; None for ddp.
        strategy: Fabric's strategy where there is no method.
        element_bytes: Bytes of a gradient's element on the wire, where there is no method and so no ledger.
    """

    method: Callable[[Options], Method] | None = None
    strategy: type[DDPStrategy] = DDPStrategy
    element_bytes: int = 4

    def make(self, options: Options, seed: int) -> DDPStrategy:
        """The strategy for one run."""
        return self.strategy() if self.method is None else SparseCommStrategy(method=self.method(options), seed=seed)


# All methods have their default arguments, except for what a row's name says, and for dgc's warm-up: short trainings
# end before its 1,000 steps. Only rows that say so clip, as in learning.py.
ROWS: dict[str, Row] = {
    BASELINE: Row(),
    "ddp, torch's bf16 hook": Row(strategy=Bfloat16Strategy, element_bytes=2),
    "dense, bfloat16": Row(lambda options: methods.dense("bfloat16")),
    "gradient_dropping": Row(lambda options: methods.gradient_dropping()),
    "gradient_dropping, partial": Row(lambda options: methods.gradient_dropping(local="partial")),
    "dgc": Row(lambda options: methods.dgc(warmup_steps=options.most_steps // 10)),
    "dgc, clip=1": Row(lambda options: methods.dgc(warmup_steps=options.most_steps // 10, clip=1.0)),
    "sketched_sgd": Row(lambda options: methods.sketched_sgd()),
    "sketched_sgd, clip=1": Row(lambda options: methods.sketched_sgd(clip=1.0)),
    "s2_reducer": Row(lambda options: methods.s2_reducer()),
    "sbc1": Row(lambda options: methods.sbc1()),
    "sbc2": Row(lambda options: methods.sbc2()),
    "sbc3": Row(lambda options: methods.sbc3()),
    "federated_averaging": Row(lambda options: methods.federated_averaging()),
    "diloco": Row(lambda options: methods.diloco()),
    "sparse_loco": Row(lambda options: methods.sparse_loco()),
}


class Point(NamedTuple):
    """Results after some steps.

    Attributes:
        steps: Optimizer steps so far.
        seconds: Seconds of training so far, until the last rank was done.
        accuracy: Accuracy of the shared model on the test images; None if it is not finite.
        sent_bytes: Bytes that a rank's network device sent in these seconds, headers included; the mean over ranks.
        link_bytes: Bytes that the method put on the link per rank, by the ledger; for ddp, by the algorithm.
        repeated: TCP segments that a rank sent again; the mean over ranks.
        processor_seconds: Processor time of a rank in these seconds; the mean over ranks.
    """

    steps: int
    seconds: float
    accuracy: float | None
    sent_bytes: float
    link_bytes: float
    repeated: float
    processor_seconds: float


class Run(NamedTuple):
    """One training run.

    Attributes:
        row: Its row's name.
        seed: Seed of the initial weights and of the order of the data.
        points: One for each measurement, until the target was reached or time was up.
        method: The method in full.
        commit: Of lightning_sparsecomm; None if unknown.
    """

    row: str
    seed: int
    points: list[Point]
    method: str
    commit: str | None = None

    def written(self) -> dict[str, Any]:
        """The run for JSON."""
        return self._asdict() | {"points": [point._asdict() for point in self.points]}

    @classmethod
    def read(cls, content: dict[str, Any]) -> "Run":
        return cls(**content | {"points": [Point(**point) for point in content["points"]]})

    def reached(self, target: float) -> bool:
        return self.points[-1].accuracy is not None and self.points[-1].accuracy >= target


class Meeting:
    """A barrier in shared memory: ranks wait for each other without sending anything.

    Args:
        ranks: Number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        context = multiprocessing.get_context("fork")
        self._barrier = context.Barrier(ranks)
        self._over = context.Value("b", False)

    def wait(self) -> None:
        """Waits until all ranks are here.

        Raises:
            threading.BrokenBarrierError: A rank has left.
        """
        self._barrier.wait()

    def leave(self) -> None:
        """Says that this rank will not come again."""
        self._barrier.abort()

    @property
    def over(self) -> bool:
        """Whether training has ended; only rank 0 writes it, while the others wait."""
        return bool(self._over.value)

    @over.setter
    def over(self, value: bool) -> None:
        self._over.value = value


class Trainee(NamedTuple):
    """A network that trains with the other ranks'."""

    fabric: Fabric
    module: nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def begin(cls, row: str, seed: int, data: Data, options: Options) -> "Trainee":
        fabric = Fabric(strategy=ROWS[row].make(options, seed), accelerator="cpu", devices=1, num_nodes=options.ranks)
        fabric.launch()
        # After launch, since Lightning takes each host for a whole machine and gives this rank all cores.
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        learner = TASKS[options.task].learner(data.classes)
        return cls(fabric, *fabric.setup(learner, learner.optimizer(options.learning_rate)))

    def step(self, batch: Sequence[torch.Tensor]) -> None:
        self.optimizer.zero_grad()
        self.fabric.backward(self.module(*batch))
        self.optimizer.step()

    def measure(self, data: Data) -> float | None:
        """The accuracy of the shared model, on rank 0. Leaves everything as it was, to the bit."""
        strategy = self.fabric.strategy
        if not isinstance(strategy, SparseCommStrategy):
            return self._measure(data)
        with strategy.shared_model():
            return self._measure(data)

    def _measure(self, data: Data) -> float | None:
        if self.fabric.global_rank != 0:
            return None
        accuracy = evaluate(self.module.module, data.held_out)
        self.module.train()
        return accuracy

    def end(self) -> None:
        """Ends the training; with a method, checks that all ranks have one model."""
        if isinstance(self.fabric.strategy, SparseCommStrategy):
            self.fabric.strategy.settle()
        self.fabric.strategy.teardown()

    def sent_link_bytes(self, row: str, steps: int) -> float:
        """Bytes put on the link so far, per rank."""
        ledger = getattr(self.fabric.strategy, "ledger", None)
        if ledger is not None:
            return float(ledger.sent_link_bytes)
        elements = sum(parameter.numel() for parameter in self.module.parameters())
        return link_bytes("all_reduce", steps * ROWS[row].element_bytes * elements, self.fabric.world_size)


def train(rank: int, row: str, seed: int, data: Data, options: Options, meeting: Meeting) -> list[Point]:
    """What each rank does. Rank 0's accuracies and seconds count."""
    rehearsal = Trainee.begin(row, seed, data, options)
    for batch in itertools.islice(batches(data, options.batch_size, rank, options.ranks, seed), REHEARSED_STEPS):
        rehearsal.step(batch)
    rehearsal.measure(data)
    rehearsal.end()

    trainee = Trainee.begin(row, seed, data, options)
    endless = batches(data, options.batch_size, rank, options.ranks, seed)
    points = [Point(0, 0.0, None, 0.0, 0.0, 0.0, 0.0)]
    measuring_bytes = 0.0
    try:
        while not meeting.over:
            last = points[-1]
            steps = min(options.measure_every, options.most_steps - last.steps)
            meeting.wait()
            begin, computed, before = time.perf_counter(), time.process_time(), Counters.read(DEVICE)
            for batch in itertools.islice(endless, steps):
                trainee.step(batch)
            # Waits for the slowest rank.
            meeting.wait()
            seconds, sent = time.perf_counter() - begin, Counters.read(DEVICE).since(before)
            computed = time.process_time() - computed
            steps += last.steps
            by_ledger = trainee.sent_link_bytes(row, steps)
            accuracy = trainee.measure(data)
            points.append(
                Point(
                    steps,
                    last.seconds + seconds,
                    accuracy,
                    last.sent_bytes + sent.sent_bytes,
                    by_ledger - measuring_bytes,
                    last.repeated + sent.repeated,
                    last.processor_seconds + computed,
                )
            )
            # Where replicas drift, measuring averages them, which sends bytes that do not count.
            measuring_bytes += trainee.sent_link_bytes(row, steps) - by_ledger
            if rank == 0:
                meeting.over = (
                    accuracy is None
                    or accuracy >= options.target
                    or steps >= options.most_steps
                    or points[-1].seconds >= options.most_seconds
                )
            meeting.wait()
        trainee.end()
    except NonFiniteGradientError:
        # Divergence is a result; every other error is not.
        meeting.leave()
        points.append(points[-1]._replace(accuracy=None))
    except threading.BrokenBarrierError:
        points.append(points[-1]._replace(accuracy=None))
    return points[1:]


def together(by_rank: list[list[Point]]) -> list[Point]:
    """Rank 0's points, with what was sent and computed averaged over ranks."""
    return [
        points[0]._replace(
            sent_bytes=statistics.mean(point.sent_bytes for point in points),
            repeated=statistics.mean(point.repeated for point in points),
            processor_seconds=statistics.mean(point.processor_seconds for point in points),
        )
        for points in zip(*by_rank)
    ]


def table(runs: list[Run], options: Options) -> str:
    """A line for each row, as Markdown."""
    header = ["row", "reached", "seconds, mean", "standard deviation", "least – most", "by ddp: faster", "least – most"]
    header += ["steps", "ms per step", "a rank's processor ms", "MB per rank, network device", "by the ledger"]
    header += ["accuracy then, %"]
    lines = [f"| {' | '.join(header)} |", f"|---|{'---:|' * (len(header) - 1)}"]
    baseline = {run.seed: run.points[-1].seconds for run in runs if run.row == BASELINE and run.reached(options.target)}
    for row in options.rows:
        finished = [run for run in runs if run.row == row]
        successful = [run for run in finished if run.reached(options.target)]
        diverged = sum(run.points[-1].accuracy is None for run in finished)
        cells = [row, f"{len(successful)} of {len(finished)}{f', {diverged} diverged' if diverged else ''}"]
        seconds = [run.points[-1].seconds for run in successful]
        if seconds:
            cells += [f"{statistics.mean(seconds):.1f}", deviation(seconds, 1), spread(seconds, 1)]
        else:
            stopped = statistics.mean(run.points[-1].seconds for run in finished)
            cells += [f"not reached in {stopped:.1f}", "—", "—"]
        ratios = [baseline[run.seed] / run.points[-1].seconds for run in successful if run.seed in baseline]
        if ratios and row != BASELINE:
            cells += [f"{statistics.mean(ratios):.2f} x", spread(ratios, 2)]
        else:
            cells += ["—", "—"]
        # Where no run reached the target, the means are over all runs.
        shown = [run.points[-1] for run in successful or finished]
        trained = [point for point in shown if point.steps]
        per_step = [1000 * point.seconds / point.steps for point in trained]
        computed = [1000 * point.processor_seconds / point.steps for point in trained]
        accuracies = [100 * point.accuracy for point in shown if point.accuracy is not None]
        cells += [f"{statistics.mean(point.steps for point in shown):,.0f}"]
        cells += [f"{statistics.mean(each):.1f}" if each else "—" for each in (per_step, computed)]
        cells += [f"{statistics.mean(point.sent_bytes for point in shown) / 1e6:,.2f}"]
        cells += [f"{statistics.mean(point.link_bytes for point in shown) / 1e6:,.2f}"]
        cells += [f"{statistics.mean(accuracies):.2f}" if accuracies else "—"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(runs: list[Run], options: Options, path: Path) -> None:
    """Draws accuracy against seconds: a colour per row, a line per seed, a dot where the target is reached."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    accuracies: list[float] = []
    for index, row in enumerate(ROWS):
        label: str | None = row
        # The two rows without a method are black and grey.
        color = ["black", "grey"][index] if ROWS[row].method is None else colormaps["tab20"].colors[index - 2]
        for run in runs:
            points = [(point.seconds, 100 * point.accuracy) for point in run.points if point.accuracy is not None]
            if run.row != row or not points:
                continue
            axes.plot(*zip(*points), "-", color=color, linewidth=1, alpha=0.8, label=label)
            if run.reached(options.target):
                axes.plot(*points[-1], "o", color=color, markersize=5)
            label = None
            accuracies += [accuracy for _, accuracy in points]
    axes.axhline(100 * options.target, color="black", linestyle=":", linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("test accuracy, %")
    if accuracies:
        # Shows what is near the target; the first steps of slow rows are far below.
        axes.set_ylim(max(min(accuracies), 100 * options.target - 25), max(*accuracies, 100 * options.target) + 1)
    axes.set_title(f"{options.task}, {options.ranks} ranks at {options.rate}, a line per seed")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center")
    figure.savefig(path, dpi=150)


def parse() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--task", choices=get_args(TaskName), default="fashion-mnist", help="task to learn; digits are for a quick try")
    data = "folder of Fashion-MNIST, downloaded if missing"
    add("--data-dir", type=folder, default=Path("data"), metavar="DIR", help=data)
    rows = f"rows of the table, among {', '.join(map(repr, ROWS))} (default: all)"
    add("--rows", nargs="+", choices=list(ROWS), default=argparse.SUPPRESS, metavar="NAME", help=rows)
    add("--seeds", type=at_least(1), default=3, metavar="N", help="runs of each row, with seeds 0 to N-1")
    add(
        "--ranks",
        type=at_least(2),
        default=4,
        metavar="N",
        help="number of ranks, each with one thread on its own host",
    )
    add("--rate", default="100mbit", help="rate of each host's cable: 100mbit, 1gbit, ..., or unlimited")
    add("--batch-size", type=at_least(1), default=32, metavar="N", help="images per rank and step")
    rate = "learning rate of all rows and steps (default: as in learning.py)"
    add("--learning-rate", type=float, default=argparse.SUPPRESS, metavar="X", help=rate)
    add("--target", type=float, default=0.85, metavar="P", help="accuracy to reach, in (0, 1)")
    add("--measure-every", type=at_least(1), default=50, metavar="N", help="steps between two measurements")
    length = "steps after which a run ends; dgc warms up for a tenth of them"
    add("--most-steps", type=at_least(1), default=3000, metavar="N", help=length)
    add("--most-seconds", type=float, default=300.0, metavar="S", help="seconds of training after which a run ends")
    add(
        "--output",
        type=folder,
        default=Path("time_to_accuracy"),
        metavar="DIR",
        help="folder for a JSON file and a plot",
    )
    add("--resume", action="store_true", help="skip runs that this file already has")
    arguments = vars(parser.parse_args())
    arguments.setdefault("rows", list(ROWS))
    arguments.setdefault("learning_rate", TASKS[arguments["task"]].learning_rate)
    options = Options(**arguments)
    if not 0 < options.target < 1:
        parser.error(f"--target must be in (0, 1), such as 0.85 for 85%; got {options.target}")
    for name, value in (("learning-rate", options.learning_rate), ("most-seconds", options.most_seconds)):
        if not value > 0:
            parser.error(f"--{name} must be positive; got {value}")
    try:
        Lab(options.ranks, options.rate)
    except ValueError as error:
        parser.error(str(error))
    return options


def main() -> None:
    options = parse()
    quieten()
    torch.set_num_threads(1)
    settings = options.settings()
    # In turns, every second time backwards: a machine that slows down slows all rows.
    wanted = [(row, seed) for seed in range(options.seeds) for row in options.rows[:: -1 if seed % 2 else 1]]
    try:
        runs = [Run.read(run) for run in load(options.numbers, settings, options.resume)]
        with Lab(options.ranks, options.rate) as lab:
            options.output.mkdir(parents=True, exist_ok=True)
            data = images_of(options.task, options.data_dir)
            for row, seed in wanted:
                if any((run.row, run.seed) == (row, seed) for run in runs):
                    continue
                strategy = ROWS[row].make(options, seed)
                method = repr(strategy.method) if isinstance(strategy, SparseCommStrategy) else type(strategy).__name__
                arguments = (row, seed, data, options, Meeting(options.ranks))
                points = together(lab.run(train, *arguments, timeout=options.most_seconds + BESIDE_SECONDS))
                run = Run(row, seed, points, method, COMMIT)
                runs.append(run)
                save([each.written() for each in runs], options.numbers, settings)
                last = run.points[-1]
                reached = "diverged" if last.accuracy is None else f"{100 * last.accuracy:.2f}%"
                progress = f"{reached} after {last.steps} steps, {last.seconds:.1f} s, {last.sent_bytes / 1e6:,.2f} MB"
                print(f"seed {seed}, {row}: {progress}", file=sys.stderr, flush=True)
    except (LabError, OSError, ValueError) as error:
        sys.exit(str(error))
    shown = [run for run in runs if (run.row, run.seed) in wanted]
    plot = options.numbers.with_suffix(".png")
    draw(shown, options, plot)
    parameters = sum(parameter.numel() for parameter in TASKS[options.task].learner(data.classes).parameters())
    names = ("lightning_sparsecomm", "torch", "pytorch-lightning")
    print(
        f"{options.task}: {options.ranks} ranks at {options.rate} on {settings['cores']} cores, {parameters:,}"
        f" parameters, batches of {options.batch_size} per rank, learning rate {options.learning_rate}; until"
        f" {100 * options.target:g}% of {len(data.held_out[0]):,} test images are recognized, measured every"
        f" {options.measure_every} steps, for {options.most_steps:,} steps or {options.most_seconds:g} s at most;"
        f" {', '.join(f'{name} {settings[name]}' for name in names)}\n"
    )
    print(f"{table(shown, options)}\n\n{made_with(run.commit for run in shown)}")
    print(f"Plot: {plot}\nNumbers: {options.numbers}")


if __name__ == "__main__":
    main()
