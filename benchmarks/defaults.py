"""`strategy="sparsecomm"` against ddp, in short trainings: the same LightningModule, with one string changed.

All strategies of a seed start from the same weights and see the same batches. Each learning rate suits ddp: `--tune`
measures those of `tasks.py` on held-out training data, and nothing else is tuned. Each run is written to a JSON file as
it ends; `--resume` skips the runs in that file. Prints a Markdown table, and plots it with `--plot`.

A strategy is `ddp`, `bf16`, `powersgd RANK` (torch's hooks), `sparsecomm`, `sparsecomm_late` (with delay=1),
`sparsecomm_stale` (the same, but nothing stands in for what is in flight), `sparsecomm_powersgd RANK`,
`sbc DENSITY EVERY`, or any method as in Python, such as `ok_topk(density=0.08)` and `default(every=2)`. With
`on 2 nodes` behind it, ranks are divided among so many nodes, which share whole gradients inside; bytes are then those
of rank 0 between nodes. Torch's PowerSGD sends its first two steps whole; ours the first one, and in the end what
waits.
"""

import argparse
import ast
import itertools
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from hooks import bf16_hook
from pytorch_lightning.strategies import DDPStrategy
from runs import COMMIT, load, made_with, save, versions
from tasks import RATES, TASKS, TRIED, Task, entropy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsecomm import NonFiniteGradientError, SparseCommStrategy, methods
from lightning_sparsecomm.basis import link_bytes
from lightning_sparsecomm.basis.ledger import OURS, Ledger
from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.channel import ErrorFeedback
from lightning_sparsecomm.sharing import Method

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from command_line import at_least, folder, quieten

Loss = Callable[[Tensor, Tensor], Tensor]

BASELINE = "ddp"
STRATEGIES = (BASELINE, "sparsecomm", "bf16", "powersgd 4", "powersgd 1")
DENSE_STEPS = 2  # of torch's PowerSGD, which needs them
WARM_STEPS = 10  # whose time does not count: kernels are loaded in them


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, momentum=0.9, weight_decay=1e-4),
    "plain": partial(torch.optim.SGD, weight_decay=1e-4),
    "adamw": torch.optim.AdamW,
    "amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "rmsprop": torch.optim.RMSprop,
    "nadam": torch.optim.NAdam,
    "adamax": torch.optim.Adamax,
}


class Learner(pl.LightningModule):
    """Plain Lightning: nothing in it knows of compression."""

    def __init__(self, network: nn.Module, optimizer: str, rate: float, steps: int, loss: Loss = entropy) -> None:
        super().__init__()
        self.network, self.optimizer, self.rate, self.steps, self.loss = network, optimizer, rate, steps, loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss of one batch."""
        inputs, targets = batch
        return self.loss(self.network(inputs), targets)

    def configure_optimizers(self) -> Any:
        """The optimizer; its learning rate falls along a cosine to 0."""
        optimizer = OPTIMIZERS[self.optimizer](self.parameters(), self.rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class DivergedError(Exception):
    """A training ended early, as a gradient was not finite.

    Attributes:
        steps: The optimizer steps made before.
        link_bytes: Bytes on the link in them.
    """

    def __init__(self, steps: int, link_bytes: float) -> None:
        super().__init__(f"a gradient was not finite after {steps} steps; lower the learning rate")
        self.steps, self.link_bytes = steps, link_bytes


class Measure(pl.Callback):
    """Writes what rank 0 ends with: processes that a Trainer has forked return nothing."""

    def __init__(self, path: Path, task: Task, held_out: tuple[Tensor, Tensor]) -> None:
        self.path, self.task, self.held_out = path, task, held_out
        self.marks: list[float] = []
        # Steps and bytes so far: an error in a fork calls no hook there.
        self.progress = torch.zeros(2, dtype=torch.float64).share_memory_()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Notes the CPU time of this process, which does not count waiting."""
        if trainer.global_step <= WARM_STEPS:
            self.marks = [time.process_time()]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Notes it for each step that counts, and what has been sent."""
        if trainer.global_step > WARM_STEPS:
            self.marks.append(time.process_time())
        if trainer.is_global_zero and (ledger := getattr(trainer.strategy, "ledger", None)) is not None:
            self.progress[0], self.progress[1] = trainer.global_step, sent_bytes(ledger)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Evaluates the model on the held-out data."""
        if not trainer.is_global_zero:
            return
        inputs, targets = self.held_out
        pl_module.eval()
        with torch.no_grad():
            outputs = torch.cat([pl_module.network(some) for some in inputs.split(1000)])  # type: ignore[operator]
        ledger = getattr(trainer.strategy, "ledger", None)
        powersgd = getattr(trainer.strategy, "_ddp_comm_state", None)
        measured = {
            "accuracy": 100 * self.task.accuracy(outputs, targets),
            "loss": float(self.task.loss(outputs, targets)),
            "link_bytes": None if ledger is None else sent_bytes(ledger),
            "ratio": None if powersgd is None else float(powersgd.compression_stats()[0]),
            "cpu_ms": 1000 * (self.marks[-1] - self.marks[0]) / max(1, len(self.marks) - 1),
        }
        self.path.write_text(json.dumps(measured))


def sent_bytes(ledger: Ledger) -> float:
    """Bytes on the link; of one process, which sends nothing, those that it hands over."""
    return sum(map(ledger.link_bytes if ledger.world_size > 1 else ledger.handed_bytes, OURS))


class Hooked(DDPStrategy):
    """DDP with a communication hook, which Lightning itself registers on GPUs only."""

    def _register_ddp_hooks(self) -> None:
        self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)  # type: ignore[union-attr]


class Silent(ErrorFeedback):
    """A residual that does not tell what it takes in, so that nothing stands in for an exchange in flight."""

    def entering(self) -> list[Tensor | None]:
        return []


def stale(method: Method) -> Method:
    """The method, with exchanges in flight for which nothing stands in; for comparison."""
    for residual in parts_in(method, ErrorFeedback):
        residual.__class__ = Silent
    return method


def method_of(text: str) -> Method:
    """The method of a call with literal arguments. Raises `ValueError` for anything else."""
    try:
        call = ast.parse(text, mode="eval").body
    except SyntaxError:
        raise ValueError(f"no call: {text!r}") from None
    names = {*methods.RECIPES, "default"}
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in names:
        raise ValueError(f"no call of a method: {text!r}")
    arguments = [ast.literal_eval(each) for each in call.args]
    options = {each.arg or "": ast.literal_eval(each.value) for each in call.keywords}
    method: Method = getattr(methods, call.func.id)(*arguments, **options)
    return method


def on_nodes(method: Method, nodes: int, processes: int) -> Any:
    """A strategy at two levels. Raises `ValueError` unless nodes have equally many processes."""
    if nodes < 1 or processes % nodes:
        raise ValueError(f"{processes} processes are not {nodes} equal nodes")
    size = processes // nodes
    groups = [list(range(first, first + size)) for first in range(0, processes, size)]
    return SparseCommStrategy(method, nodes=groups, start_method="fork")


def strategy_of(name: str, processes: int = 4) -> Any:
    """The strategy of a row."""
    method, found, count = name.removesuffix(" nodes").rpartition(" on ")
    if found and name.endswith(" nodes"):
        return on_nodes(methods.default() if method == "sparsecomm" else method_of(method), int(count), processes)
    kind, *numbers = name.split()
    if kind == BASELINE:
        return "ddp_fork"
    if kind == "sparsecomm":
        return SparseCommStrategy(start_method="fork")
    if kind == "sparsecomm_late":
        return SparseCommStrategy(methods.default(delay=1), start_method="fork")
    if kind == "sparsecomm_stale":
        return SparseCommStrategy(stale(methods.default(delay=1)), start_method="fork")
    if kind == "sparsecomm_powersgd":
        return SparseCommStrategy(methods.powersgd(int(numbers[0]), DENSE_STEPS - 1), start_method="fork")
    if kind == "sbc":
        density, every = float(numbers[0]), int(numbers[1])
        return SparseCommStrategy(methods.sbc(density=density, every=every), start_method="fork")
    if "(" in name:
        return SparseCommStrategy(method_of(name), start_method="fork")
    if kind == "bf16":
        return Hooked(start_method="fork", ddp_comm_hook=bf16_hook)
    state = powerSGD_hook.PowerSGDState(None, int(numbers[0]), start_powerSGD_iter=DENSE_STEPS)
    return Hooked(start_method="fork", ddp_comm_state=state, ddp_comm_hook=powerSGD_hook.powerSGD_hook)


def known_strategy(text: str) -> str:
    """A type for argparse."""
    try:
        strategy_of(text)
    except (ValueError, IndexError, TypeError) as error:
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join(STRATEGIES)}, sparsecomm_late, 'sparsecomm_powersgd 1', 'sbc 0.01 10',"
            f" 'ok_topk(density=0.08)'; got {text!r} ({error})"
        ) from None
    return text


def run(
    strategy: str,
    task: str,
    optimizer: str,
    steps: int,
    seed: int,
    rate: float,
    options: argparse.Namespace,
    prepare: Callable[[nn.Module], None] | None = None,
    held_out: int | None = None,
) -> dict[str, Any]:
    """One training; `prepare` may freeze parameters of its network, and `held_out` samples suffice to evaluate it.

    Raises:
        DivergedError: A gradient was not finite.
    """
    chosen = TASKS[task]
    data = chosen.read(options.data_dir, options.held_out)
    pl.seed_everything(seed, verbose=False)
    learner = Learner(chosen.network(data.classes), optimizer, rate, steps, chosen.loss)
    if prepare is not None:
        prepare(learner.network)
    loader = DataLoader(TensorDataset(*data.train), options.batch_size, shuffle=True)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run.json"
        measure = Measure(path, chosen, (data.held_out[0][:held_out], data.held_out[1][:held_out]))
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=options.processes,
            strategy=strategy_of(strategy, options.processes),
            max_steps=steps,
            callbacks=[measure],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        try:
            trainer.fit(learner, loader)
        except Exception as error:
            if NonFiniteGradientError.__name__ not in str(error):
                raise
            steps_made, sent = measure.progress.tolist()
            raise DivergedError(int(steps_made), sent) from error
        measured = json.loads(path.read_text())
    of_step = bytes_of_step(learner, options.processes)
    ratio = measured.pop("ratio")
    if measured["link_bytes"] is None:
        # As torch counts for PowerSGD.
        fewer = {BASELINE: 1.0, "bf16": 2.0}.get(strategy, ratio)
        dense_steps = min(steps, DENSE_STEPS) if strategy.startswith("powersgd") else 0
        measured["link_bytes"] = of_step * (dense_steps + (steps - dense_steps) / fewer)
    named = {"strategy": strategy, "task": task, "optimizer": optimizer, "steps": steps, "seed": seed, "rate": rate}
    return {**named, **measured, "ddp_bytes": steps * of_step, "commit": COMMIT}


def bytes_of_step(learner: Learner, processes: int) -> float:
    """What ddp sends for a step, on the link."""
    whole = float(sum(p.nbytes for p in learner.parameters() if p.requires_grad))
    return link_bytes("all_reduce", whole, processes) if processes > 1 else whole


def run_or_diverge(
    strategy: str, task: str, optimizer: str, steps: int, seed: int, rate: float, options: argparse.Namespace
) -> dict[str, Any]:
    """As `run`; of a training that diverges, after how many steps, and the bytes up to there."""
    try:
        return run(strategy, task, optimizer, steps, seed, rate, options)
    except DivergedError as error:
        named = {"strategy": strategy, "task": task, "optimizer": optimizer, "steps": steps, "seed": seed, "rate": rate}
        found = {"diverged": error.steps, "link_bytes": error.link_bytes, "commit": COMMIT}
        network = TASKS[task].network(TASKS[task].read(options.data_dir, options.held_out).classes)
        of_step = bytes_of_step(Learner(network, optimizer, rate, steps), options.processes)
        return {**named, **found, "ddp_bytes": error.steps * of_step}


class Row(NamedTuple):
    """A strategy in a cell, against ddp at the same seeds.

    Attributes:
        cell: Network, optimizer and steps.
        strategy: Its name.
        accuracies: Differences from ddp's, in points.
        losses: Differences from ddp's.
        baseline: ddp's runs.
        fewer: How many times fewer bytes than ddp.
        diverged: Seeds that have no end to compare, since a gradient was not finite.
    """

    cell: tuple[str, str, int]
    strategy: str
    accuracies: list[float]
    losses: list[float]
    baseline: list[dict[str, Any]]
    fewer: float
    diverged: int = 0

    @property
    def verdict(self) -> str:
        """In what the mean is within one standard error of ddp's, or better."""
        if self.diverged:
            return f"diverged with {self.diverged} of {self.diverged + len(self.losses)} seeds"
        if len(self.losses) < 2:
            return ""
        held = [
            name for name, worse in (("accuracy", [-a for a in self.accuracies]), ("loss", self.losses)) if holds(worse)
        ]
        return {0: "neither", 1: held[0] if held else "", 2: "both"}[len(held)]


def holds(worse: list[float]) -> bool:
    """Whether the mean of these differences is within one standard error of 0, or below."""
    return statistics.mean(worse) <= statistics.stdev(worse) / len(worse) ** 0.5


def rows(runs: list[dict[str, Any]]) -> list[Row]:
    """A row for each cell and strategy but ddp."""
    found = []
    cells = list(dict.fromkeys((each["steps"], each["task"], each["optimizer"]) for each in runs))
    tasks = list(TASKS)
    for steps, task, optimizer in sorted(cells, key=lambda cell: (cell[0], tasks.index(cell[1]), cell[2])):
        mine = [r for r in runs if (r["steps"], r["task"], r["optimizer"]) == (steps, task, optimizer)]
        base = {each["seed"]: each for each in mine if each["strategy"] == BASELINE}
        for name in dict.fromkeys(each["strategy"] for each in mine if each["strategy"] != BASELINE):
            pairs = [(each, base[each["seed"]]) for each in mine if each["strategy"] == name and each["seed"] in base]
            if not pairs:
                continue
            ended = [(own, theirs) for own, theirs in pairs if "diverged" not in own]
            accuracies = [own["accuracy"] - theirs["accuracy"] for own, theirs in ended]
            losses = [own["loss"] - theirs["loss"] for own, theirs in ended]
            # One that diverged may have sent nothing before.
            counted = [own for own, _ in ended or pairs if own["link_bytes"]]
            ratios = [own["ddp_bytes"] / own["link_bytes"] for own in counted]
            fewer = statistics.mean(ratios) if ratios else float("nan")
            lost, theirs = len(pairs) - len(ended), [their for _, their in pairs]
            found.append(Row((task, optimizer, steps), name, accuracies, losses, theirs, fewer, lost))
    return found


def table(found: list[Row]) -> str:
    """ddp's accuracy and loss, and the differences from them: means and standard errors over seeds."""
    lines = [
        "| network | optimizer | steps | strategy | seeds | ddp, % | points from ddp | ddp, loss | loss from ddp"
        " | fewer bytes | as good as ddp in |",
        "|---|---|---:|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in found:
        task, optimizer, steps = row.cell
        accuracy, loss = (spread([each[name] for each in row.baseline]) for name in ("accuracy", "loss"))
        lines.append(
            f"| {task} | {optimizer} | {steps:,} | {row.strategy} | {len(row.losses)} | {accuracy}"
            f" | {spread(row.accuracies, '+')} | {loss} | {spread(row.losses, '+', 3)} | {row.fewer:.1f} ×"
            f" | {row.verdict} |"
        )
    return "\n".join(lines)


def summary(found: list[Row], strategy: str) -> str:
    """Loss and accuracy of one strategy, a line for each network and optimizer; bold where it is behind ddp in both."""
    mine = [row for row in found if row.strategy == strategy]
    lengths = sorted({row.cell[2] for row in mine})
    header = ["network", "optimizer"]
    for steps in lengths:
        fewer = [row.fewer for row in mine if row.cell[2] == steps]
        header += [f"{steps:,} steps, {min(fewer):.0f} – {max(fewer):.0f} × fewer bytes: loss", "points"]
    lines = [f"| {' | '.join(header)} |", f"|---|---|{'---:|' * (len(header) - 2)}"]
    for task, optimizer in dict.fromkeys(row.cell[:2] for row in mine):
        cells = [task, optimizer]
        for steps in lengths:
            row = next((row for row in mine if row.cell == (task, optimizer, steps)), None)
            if row is None:
                cells += ["", ""]
                continue
            whole = statistics.mean(each["loss"] for each in row.baseline) / 100
            loss, points = spread([loss / whole for loss in row.losses], "+", 1), spread(row.accuracies, "+")
            mark = "**" if row.verdict == "neither" else ""
            cells += [f"{mark}{loss}%{mark}", f"{mark}{points}{mark}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: list[float], sign: str = "", decimals: int = 2) -> str:
    """The mean and its standard error."""
    if not values:
        return "–"
    mean = f"{statistics.mean(values):{sign}.{decimals}f}"
    return f"{mean} ± {statistics.stdev(values) / len(values) ** 0.5:.{decimals}f}" if len(values) > 1 else mean


def plot(found: list[Row], path: Path) -> None:
    """Loss by ddp's and by bytes, a panel for each optimizer and number of steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = sorted({(row.cell[2], row.cell[1]) for row in found})
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 4), squeeze=False, sharey=True)
    tasks = [task for task in TASKS if any(row.cell[0] == task for row in found)]
    names = list(dict.fromkeys(row.strategy for row in found))
    for axis, (steps, optimizer) in zip(axes[0], panels):
        axis.axhline(0, color="0.6", linewidth=1, label=BASELINE)
        for row in found:
            if (row.cell[2], row.cell[1]) != (steps, optimizer) or not row.losses:
                continue
            # Of their own seeds' mean loss with ddp.
            whole = statistics.mean(each["loss"] for each in row.baseline) / 100
            errors = statistics.stdev(row.losses) / len(row.losses) ** 0.5 / whole if len(row.losses) > 1 else 0
            color, marker = f"C{tasks.index(row.cell[0])}", "osD^vP*X<>"[names.index(row.strategy) % 10]
            mean = statistics.mean(row.losses) / whole
            axis.errorbar(row.fewer, mean, errors, color=color, marker=marker, capsize=3)
        axis.set(xscale="log", title=f"{optimizer}, {steps:,} steps", xlabel="times fewer bytes than ddp, whole run")
        axis.set_xticks([1, 2, 5, 10, 20, 50, 100], minor=False)
        axis.minorticks_off()
        axis.xaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("held-out loss, % from ddp's")
    shown = [plt.Line2D([], [], color=f"C{number}", label=task) for number, task in enumerate(tasks)]
    shown += [
        plt.Line2D([], [], color="0.3", linestyle="", marker="osD^vP*X<>"[number % 10], label=name)
        for number, name in enumerate(names)
    ]
    figure.legend(handles=shown, loc="outside right upper", fontsize=8)
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Runs what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=folder, default=Path("data"), help="Fashion-MNIST and shakespeare.txt")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--optimizers", nargs="+", choices=TRIED, default=["sgd", "adamw"])
    parser.add_argument("--steps", nargs="+", type=at_least(1), default=[300, 1000, 4000])
    parser.add_argument("--strategies", nargs="+", type=known_strategy, default=list(STRATEGIES))
    parser.add_argument("--seeds", type=at_least(1), default=5)
    parser.add_argument("--processes", type=at_least(1), default=4)
    parser.add_argument("--batch-size", type=at_least(1), default=32, help="of each process")
    parser.add_argument("--first-seed", type=at_least(0), default=0)
    parser.add_argument("--held-out", action="store_true", help="measure on held-out training data, not on test data")
    parser.add_argument("--tune", action="store_true", help="the same, at all rates of tasks.py")
    parser.add_argument("--output", type=Path, default=Path("defaults.json"))
    parser.add_argument("--resume", action="store_true", help="keep the runs in --output")
    parser.add_argument("--plot", type=Path, help="file for a plot of --strategies and --steps")
    parser.add_argument("--only-print", action="store_true", help="print the table of --output")
    parser.add_argument("--summary", metavar="STRATEGY", help="print a short table of this strategy alone")
    options = parser.parse_args()
    for task, optimizer in itertools.product(options.tasks, options.optimizers):
        if task not in RATES[optimizer]:
            known = ", ".join(RATES[optimizer])
            parser.error(f"--optimizers {optimizer} has learning rates for {known}; got {task}. Name these as --tasks.")
    options.held_out |= options.tune
    quieten()
    warnings.filterwarnings("ignore", message=".*does not end before.*|.*sync_dist.*|.*num_workers.*")
    torch.set_num_threads(1)
    measured = {"processes": options.processes, "batch_size": options.batch_size, "held_out": options.held_out}
    settings = measured | versions()
    runs = load(options.output, settings, options.resume or options.only_print)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    cells = itertools.product(options.steps, seeds, options.tasks, options.optimizers, options.strategies)
    names = ("steps", "seed", "task", "optimizer", "strategy", "rate")
    for steps, seed, task, optimizer, strategy in () if options.only_print else cells:
        tried = TRIED[optimizer].get(task, ()) if options.tune else ()
        for rate in tried or (RATES[optimizer][task],):
            cell = (steps, seed, task, optimizer, strategy, rate)
            if any(all(each[name] == value for name, value in zip(names, cell)) for each in runs):
                continue
            runs.append(run_or_diverge(strategy, task, optimizer, steps, seed, rate, options))
            save(runs, options.output, settings)
            shown = {name: runs[-1].get(name) for name in (*names, "accuracy", "loss", "diverged")}
            print(shown, file=sys.stderr, flush=True)
    if options.tune:
        print("| network | optimizer | rate | accuracy, % | loss |\n|---|---|---:|---:|---:|")
        for each in runs:
            named = " | ".join(str(each[name]) for name in ("task", "optimizer", "rate"))
            measured = "diverged |" if "diverged" in each else f"{each['accuracy']:.2f} | {each['loss']:.4f}"
            print(f"| {named} | {measured} |")
    else:
        found = rows(runs)
        print(table(found) if options.summary is None else summary(found, options.summary))
        if options.plot is not None:
            chosen = [row for row in found if row.strategy in options.strategies and row.cell[2] in options.steps]
            plot(chosen, options.plot)
    print(f"\n{made_with(each['commit'] for each in runs)}")


if __name__ == "__main__":
    main()
