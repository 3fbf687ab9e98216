"""`strategy="sparsecomm"` against ddp, in short trainings: the same LightningModule, with one string changed.

All strategies of a seed start from the same weights and see the same batches. Each learning rate suits ddp: `--tune`
measures several on held-out training data, and nothing else is tuned. Each run is written to a JSON file as it ends;
`--resume` skips the runs in that file. Prints a Markdown table.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from learning import images_of
from pytorch_lightning.strategies import DDPStrategy
from runs import COMMIT, load, made_with, save, versions
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsecomm import SparseCommStrategy
from lightning_sparsecomm.basis import link_bytes
from lightning_sparsecomm.basis.ledger import OURS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from command_line import at_least, folder, quieten

BASELINE = "ddp"
STRATEGIES = (BASELINE, "bf16", "powersgd 4", "powersgd 1", "sparsecomm")
CHARACTERS = 32


def convolution() -> nn.Module:
    """Two convolutions and two linear layers, 56,714 parameters; for Fashion-MNIST."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


class Residual(nn.Module):
    """Two convolutions with batch norm, and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the shortcut and the convolutions, rectified."""
        return (x + self.body(x)).relu()


def residual_network() -> nn.Module:
    """Three residual blocks of width 16, with batch norm, 15,066 parameters; for Fashion-MNIST."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(Residual(16), nn.MaxPool2d(2), Residual(16), Residual(16)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
    )


def perceptron() -> nn.Module:
    """Three linear layers, 669,706 parameters; for Fashion-MNIST."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


class Task(NamedTuple):
    """A network, its data, and learning rates that suit ddp.

    Attributes:
        network: Makes the network.
        data: "fashion-mnist" or "digits".
        rates: For "sgd" and "adamw".
    """

    network: Callable[[], nn.Module]
    data: str
    rates: dict[str, float]


def digit_convolution() -> nn.Module:
    """A convolution and two linear layers, 19,018 parameters; for the 8 × 8 digits."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


TASKS = {
    "convolution": Task(convolution, "fashion-mnist", {"sgd": 0.1, "adamw": 8e-3}),
    "batch norm": Task(residual_network, "fashion-mnist", {"sgd": 0.1, "adamw": 8e-3}),
    "perceptron": Task(perceptron, "fashion-mnist", {"sgd": 0.1, "adamw": 2e-3}),
    "digits": Task(digit_convolution, "digits", {"sgd": 0.1, "adamw": 8e-3}),
}


class Learner(pl.LightningModule):
    """Plain Lightning: nothing in it knows of compression."""

    def __init__(self, network: nn.Module, optimizer: str, rate: float, steps: int) -> None:
        super().__init__()
        self.network, self.optimizer, self.rate, self.steps = network, optimizer, rate, steps

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of one batch."""
        images, labels = batch
        return cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> Any:
        """SGD with momentum, or AdamW; the learning rate falls along a cosine to 0."""
        optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(self.parameters(), self.rate, momentum=0.9, weight_decay=1e-4)
            if self.optimizer == "sgd"
            else torch.optim.AdamW(self.parameters(), self.rate)
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Measure(pl.Callback):
    """Writes what rank 0 ends with: processes that a Trainer has forked return nothing."""

    def __init__(self, path: Path, held_out: tuple[Tensor, Tensor]) -> None:
        self.path, self.held_out = path, held_out

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Evaluates the model on the held-out data."""
        if not trainer.is_global_zero:
            return
        images, labels = self.held_out
        pl_module.eval()
        with torch.no_grad():
            logits = torch.cat([pl_module.network(some) for some in images.split(2000)])
        ledger = getattr(trainer.strategy, "ledger", None)
        powersgd = getattr(trainer.strategy, "_ddp_comm_state", None)
        measured = {
            "accuracy": float((logits.argmax(1) == labels).double().mean() * 100),
            "loss": float(cross_entropy(logits, labels)),
            "link_bytes": None if ledger is None else sum(map(ledger.link_bytes, OURS)),
            "ratio": None if powersgd is None else float(powersgd.compression_stats()[0]),
        }
        self.path.write_text(json.dumps(measured))


class Hooked(DDPStrategy):
    """DDP with a communication hook, which Lightning itself registers on GPUs only."""

    def _register_ddp_hooks(self) -> None:
        self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)  # type: ignore[union-attr]


def strategy_of(name: str) -> Any:
    """The strategy of a row."""
    if name == BASELINE:
        return "ddp_fork"
    if name == "sparsecomm":
        return SparseCommStrategy(start_method="fork")
    if name == "bf16":
        return Hooked(start_method="fork", ddp_comm_hook=default_hooks.bf16_compress_hook)
    state = powerSGD_hook.PowerSGDState(None, int(name.split()[1]), start_powerSGD_iter=2)
    return Hooked(start_method="fork", ddp_comm_state=state, ddp_comm_hook=powerSGD_hook.powerSGD_hook)


def run(strategy: str, task: str, optimizer: str, steps: int, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One training."""
    network, data_name, rates = TASKS[task]
    rate = options.rate or rates[optimizer]
    data = images_of(data_name, options.data_dir, hold_out_training=options.tune)  # type: ignore[arg-type]
    pl.seed_everything(seed, verbose=False)
    learner = Learner(network(), optimizer, rate, steps)
    loader = DataLoader(TensorDataset(*data.train), options.batch_size, shuffle=True)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run.json"
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=options.processes,
            strategy=strategy_of(strategy),
            max_steps=steps,
            callbacks=[Measure(path, data.held_out)],  # type: ignore[arg-type]
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(learner, loader)
        measured = json.loads(path.read_text())
    ddp_bytes = steps * link_bytes("all_reduce", sum(p.nbytes for p in learner.parameters()), options.processes)
    if measured["link_bytes"] is None:
        # As torch counts for PowerSGD.
        measured["link_bytes"] = ddp_bytes / {BASELINE: 1.0, "bf16": 2.0}.get(strategy, measured["ratio"])
    named = {"strategy": strategy, "task": task, "optimizer": optimizer, "steps": steps, "seed": seed, "rate": rate}
    return {**named, **measured, "ddp_bytes": ddp_bytes, "commit": COMMIT}


def table(runs: list[dict[str, Any]]) -> str:
    """A row for each cell, ddp's accuracy and the others' differences from it, seed by seed."""
    cells = list(dict.fromkeys((each["task"], each["optimizer"], each["steps"]) for each in runs))
    others = [name for name in STRATEGIES[1:] if any(each["strategy"] == name for each in runs)]
    lines = ["| network | optimizer | steps | seeds | ddp, % |" + "".join(f" {name} | bytes |" for name in others)]
    lines += ["|---|---|---:|---:|---:|" + "---:|---:|" * len(others)]
    for cell in cells:
        mine = [each for each in runs if (each["task"], each["optimizer"], each["steps"]) == cell]
        base = {each["seed"]: each for each in mine if each["strategy"] == BASELINE}
        if not base:
            continue
        line = (
            f"| {cell[0]} | {cell[1]} | {cell[2]:,} | {len(base)} | {spread([b['accuracy'] for b in base.values()])} |"
        )
        for name in others:
            pairs = [(each, base[each["seed"]]) for each in mine if each["strategy"] == name and each["seed"] in base]
            if not pairs:
                line += " | |"
                continue
            differences = [own["accuracy"] - theirs["accuracy"] for own, theirs in pairs]
            sizes = [own["ddp_bytes"] / own["link_bytes"] for own, _ in pairs if own["link_bytes"]]
            fewer = f"{statistics.mean(sizes):.1f}×" if sizes else ""
            line += f" {spread(differences, sign=True)} | {fewer} |"
        lines.append(line)
    return "\n".join(lines)


def spread(values: list[float], sign: bool = False) -> str:
    """The mean and its standard error."""
    mean = f"{statistics.mean(values):{'+' if sign else ''}.2f}"
    return f"{mean} ± {statistics.stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else mean


def main() -> None:
    """Runs what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=folder, default=Path("data"), help="folder of Fashion-MNIST")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--optimizers", nargs="+", choices=["sgd", "adamw"], default=["sgd", "adamw"])
    parser.add_argument("--steps", nargs="+", type=at_least(1), default=[300, 1000, 4000])
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--seeds", type=at_least(1), default=5)
    parser.add_argument("--processes", type=at_least(1), default=4)
    parser.add_argument("--batch-size", type=at_least(1), default=32, help="of each process")
    parser.add_argument("--rate", type=float, help="learning rate, instead of the task's; with --tune")
    parser.add_argument("--tune", action="store_true", help="hold out training data, and leave the test data alone")
    parser.add_argument("--output", type=Path, default=Path("defaults.json"))
    parser.add_argument("--resume", action="store_true", help="keep the runs in --output")
    parser.add_argument("--only-print", action="store_true", help="print the table of --output")
    options = parser.parse_args()
    quieten()
    warnings.filterwarnings("ignore", message=".*does not end before.*|.*sync_dist.*|.*num_workers.*")
    torch.set_num_threads(1)
    settings = {"processes": options.processes, "batch_size": options.batch_size, "tune": options.tune} | versions()
    runs = load(options.output, settings, options.resume or options.only_print)
    cells = itertools.product(
        range(options.seeds), options.steps, options.tasks, options.optimizers, options.strategies
    )
    names = ("seed", "steps", "task", "optimizer", "strategy")
    for cell in () if options.only_print else cells:
        if any(all(each[name] == value for name, value in zip(names, cell)) for each in runs):
            continue
        seed, steps, task, optimizer, strategy = cell
        runs.append(run(strategy, task, optimizer, steps, seed, options))
        save(runs, options.output, settings)
        shown = ("strategy", "task", "optimizer", "steps", "seed", "accuracy", "loss")
        print({name: runs[-1][name] for name in shown}, file=sys.stderr, flush=True)
    print(table(runs))
    print(f"\n{made_with(each['commit'] for each in runs)}")


if __name__ == "__main__":
    main()
