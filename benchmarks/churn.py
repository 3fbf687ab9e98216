"""Replicas that are killed and started again while they train, beside the same training left alone.

    python benchmarks/churn.py --data-dir DIR --minutes 30 --kill-every 60

Each method trains with so many replicas on this machine, twice: first undisturbed, for as many steps as fit into
`--minutes`; then as many steps again, while a replica, in turn, is killed by SIGKILL every so many seconds, and started
again at once. A lighthouse of `sparsecomm lighthouse` serves both. Prints, for each run, the time, the rounds that were
repeated for each kill, whether replicas end with equal bits, and the loss on held-out data.

"Pace" is the undisturbed run's time by the disturbed one's. All replicas share this machine: what a killed one leaves
of it, the others have, and what it needs to start, Python and its imports, they lack.
"""

import argparse
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from defaults import Learner, method_of
from runs import versions
from tasks import RATES, TASKS
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsecomm.strategies.pytorch_lightning import ElasticSparseCommStrategy

METHODS = ["sparse_loco(every=30)", "diloco(every=30)", "gradient_dropping(density=0.01)"]
HEARTBEAT = "2s"


def replica(options: argparse.Namespace) -> None:
    """One replica's training; prints a line of JSON when it ends."""
    torch.set_num_threads(1)
    data = TASKS[options.task].read(options.data_dir, False)
    pl.seed_everything(options.seed, verbose=False)
    learner = Learner(
        TASKS[options.task].network(data.classes),
        options.optimizer,
        RATES[options.optimizer][options.task],
        options.steps,
    )
    strategy = ElasticSparseCommStrategy(
        method_of(options.methods[0]), lighthouse=options.lighthouse, replica=options.replica
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=options.steps,
        callbacks=[Begun()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(learner, DataLoader(TensorDataset(*data.train), options.batch_size, shuffle=True))
    inputs, targets = data.held_out
    learner.eval()
    with torch.no_grad():
        logits = torch.cat([learner.network(some) for some in inputs.split(1000)]).flatten(0, -2)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in learner.parameters())
    assert strategy.turns is not None
    print(
        json.dumps(
            {
                "end": time.time(),
                "steps": trainer.global_step,
                "rounds": strategy.turns.round,
                "repeated": strategy.turns.membership.failures,
                "digest": hashlib.sha256(weights).hexdigest()[:16],
                "loss": float(cross_entropy(logits, targets.flatten())),
                "accuracy": float((logits.argmax(1) == targets.flatten()).double().mean() * 100),
            }
        ),
        flush=True,
    )


class Begun(pl.Callback):
    """Says when a replica takes its first step."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Prints a line before the first batch."""
        if not getattr(self, "told", False):
            self.told = True
            print(json.dumps({"begin": time.time(), "at": trainer.global_step}), flush=True)


@contextmanager
def lighthouse() -> Iterator[str]:
    """The address of one that serves until the context ends."""
    command = [sys.executable, "-m", "lightning_sparsecomm", "lighthouse", "--bind", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*command, "--heartbeat-timeout", HEARTBEAT], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[2].rstrip(",")
    finally:
        process.kill()
        process.wait()


class Fleet:
    """Replicas of one run, each a process of its own, which may be killed and started again."""

    def __init__(self, options: argparse.Namespace, method: str, seed: int, steps: int, address: str) -> None:
        self._options, self._method, self._seed = options, method, seed
        self._steps, self._address = steps, address
        self._numbers = itertools.count()
        self._outputs: list[Path] = []
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.folder = Path(options.output).with_suffix("") / f"{method.partition('(')[0]}-{seed}-{int(time.time())}"
        self.folder.mkdir(parents=True)

    def start(self, name: str) -> None:
        """Starts a replica, or starts it again."""
        number, options = next(self._numbers), self._options
        path = self.folder / f"{name}-{number}.jsonl"
        self._outputs.append(path)
        command = [
            sys.executable,
            __file__,
            "--replica",
            name,
            "--lighthouse",
            self._address,
            "--methods",
            self._method,
        ]
        command += ["--seed", str(1000 * self._seed + number), "--steps", str(self._steps), "--task", options.task]
        command += ["--optimizer", options.optimizer, "--batch-size", str(options.batch_size)]
        with path.open("wb") as out, path.with_suffix(".log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [*command, "--data-dir", str(options.data_dir)], stdout=out, stderr=log
            )

    def kill(self, name: str) -> None:
        """Kills a replica, without a word to the others."""
        os.kill(self.processes[name].pid, signal.SIGKILL)
        self.processes[name].wait()

    def said(self) -> list[dict[str, Any]]:
        """All lines so far."""
        return [json.loads(line) for path in self._outputs for line in path.read_text().splitlines() if line[:1] == "{"]

    @property
    def begun(self) -> int:
        return sum("begin" in line for line in self.said())

    @property
    def ended(self) -> bool:
        return any(process.poll() is not None for process in self.processes.values())


def train(options: argparse.Namespace, method: str, seed: int, steps: int, kill_every: float | None) -> dict[str, Any]:
    """One run of all replicas, from the first step of the last one that begins."""
    names = [f"replica-{number}" for number in range(options.replicas)]
    with lighthouse() as address:
        fleet = Fleet(options, method, seed, steps, address)
        for name in names:
            fleet.start(name)
        while fleet.begun < len(names) and not fleet.ended:
            time.sleep(0.2)
        begin, kills = time.time(), 0
        victims = itertools.cycle(names)
        while not fleet.ended:
            time.sleep(0.2)
            if kill_every is not None and time.time() - begin > kill_every * (kills + 1) and not fleet.ended:
                victim = next(victims)
                fleet.kill(victim)
                fleet.start(victim)
                kills += 1
        for name, process in fleet.processes.items():
            if process.wait(options.hang) != 0:
                raise RuntimeError(f"{name} has failed; see {fleet.folder}")
    ends = [line for line in fleet.said() if "end" in line]
    first = ends[0]
    return {
        "method": method,
        "seed": seed,
        "steps": steps,
        "kill_every": kill_every,
        "kills": kills,
        "seconds": max(line["end"] for line in ends) - begin,
        "rounds": max(line["rounds"] for line in ends),
        "repeated": max(line["repeated"] for line in ends),
        "equal": len({line["digest"] for line in ends}) == 1 and len(ends) == len(names),
        "loss": first["loss"],
        "accuracy": first["accuracy"],
    }


def table(runs: list[dict[str, Any]]) -> str:
    """Each disturbed run beside the undisturbed one of its method and seed."""
    alone = {(run["method"], run["seed"]): run for run in runs if run["kill_every"] is None}
    lines = [
        "| method | seed | steps | kills | s, undisturbed | s | pace | rounds repeated | equal bits | loss, undisturbed"
        " | loss |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|---:|---:|",
    ]
    for run in runs:
        if run["kill_every"] is not None:
            other = alone[run["method"], run["seed"]]
            lines.append(
                f"| `{run['method']}` | {run['seed']} | {run['steps']:,} | {run['kills']} | {other['seconds']:,.0f} |"
                f" {run['seconds']:,.0f} | {other['seconds'] / run['seconds']:.2f} | {run['repeated']} |"
                f" {'yes' if run['equal'] and other['equal'] else 'no'} | {other['loss']:.4f} | {run['loss']:.4f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Runs all that is asked for, or one replica of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data-dir", type=Path, default=Path("data"), help="Fashion-MNIST and shakespeare.txt")
    add("--methods", nargs="+", default=METHODS, help="as in Python")
    add("--replicas", type=int, default=4)
    add("--seeds", type=int, default=1)
    add("--minutes", type=float, default=30.0, help="of the undisturbed run, nearly")
    add("--kill-every", type=float, default=60.0, help="seconds between two kills")
    add("--task", choices=TASKS, default="convolution")
    add("--optimizer", choices=["sgd", "adamw"], default="adamw")
    add("--batch-size", type=int, default=32, help="of each replica")
    add("--hang", type=float, default=300.0, help="seconds after which replicas that do not end count as hanging")
    add("--output", type=Path, default=Path("churn.json"))
    add("--only-print", action="store_true", help="print the table of --output")
    for name in ("--replica", "--lighthouse"):
        add(name, help=argparse.SUPPRESS)
    for name in ("--steps", "--seed"):
        add(name, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replica is not None:
        return replica(options)
    runs: list[dict[str, Any]] = []
    if options.only_print:
        runs = json.loads(options.output.read_text())["runs"]
    else:
        for method, seed in itertools.product(options.methods, range(options.seeds)):
            trial = train(options, method, seed, 200, None)
            steps = round(200 * 60 * options.minutes / trial["seconds"] / 100) * 100
            for kill_every in (None, options.kill_every):
                runs.append(train(options, method, seed, steps, kill_every))
                print(json.dumps(runs[-1]), flush=True)
                options.output.write_text(json.dumps({"settings": versions(), "runs": runs}, indent=1))
    print(table(runs))
    return None


if __name__ == "__main__":
    main()
