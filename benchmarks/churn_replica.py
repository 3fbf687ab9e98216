"""A replica for `churn.py`: trains, and prints a line of JSON for all that happens to it."""

import argparse
import hashlib
import json
import time
from typing import Any

import pytorch_lightning as pl
import torch
import torchft_diloco
from defaults import Learner, method_of
from tasks import RATES, TASKS, Data, Task
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsecomm.strategies.pytorch_lightning import ElasticSparseCommStrategy

TORCHFT = "torchft"
"""The row that is not ours: torchft's own `DiLoCo`."""

EVERY = 30
"""Its steps between two exchanges."""


def say(**line: Any) -> None:
    """Prints a line, with the time."""
    print(json.dumps({"time": time.time(), **line}), flush=True)


class PacedLearner(Learner):
    """Its steps take at least as long as told: after the forward pass, it sleeps for the rest."""

    def __init__(self, *args: Any, step_seconds: float) -> None:
        super().__init__(*args)
        self.step_seconds = step_seconds

    def training_step(self, batch: list[Tensor], batch_idx: int = 0) -> Tensor:
        """Cross-entropy of one batch."""
        begin = time.monotonic()
        loss = super().training_step(batch, batch_idx)
        time.sleep(max(0.0, self.step_seconds - (time.monotonic() - begin)))
        return loss


class Progress:
    """Says how many steps this process has made, and how many of them are in the weights that all share.

    Args:
        network: Whose weights are compared with those of others.
        compare_every: Rounds between two comparisons.
    """

    def __init__(self, network: nn.Module, compare_every: int) -> None:
        self._network, self._compare_every = network, compare_every
        self._made = self._counted = 0
        self._round: int | None = None

    def begin(self, round_: int) -> None:
        """It has the weights of the others, and goes on from there."""
        self._round = round_
        say(begin=round_)

    def step(self, round_: int, repeated: int, more: int | None = None) -> None:
        """It has made a step. `round_` are the rounds that lead to its weights, `more` the steps that count now,
        `repeated` the exchanges that have failed; without `more`, all count that it has made before a new round."""
        self._made += 1
        new = round_ != self._round
        self._round = round_
        if more is not None:
            self._counted += more
        elif new:
            self._counted = self._made
        line: dict[str, Any] = {"made": self._made, "counted": self._counted, "round": round_, "repeated": repeated}
        if new and round_ % self._compare_every == 0:
            weights = b"".join(each.detach().numpy().tobytes() for each in self._network.parameters())
            line["digest"] = hashlib.sha256(weights).hexdigest()[:16]
        say(**line)


class Told(pl.Callback):
    """Progress of a Trainer."""

    def __init__(self, strategy: ElasticSparseCommStrategy, progress: Progress) -> None:
        self._strategy, self._progress, self._begun = strategy, progress, False

    def on_train_batch_start(self, *_: Any) -> None:
        """The first one."""
        if not self._begun and self._strategy.turns is not None:
            self._begun = True
            self._progress.begin(self._strategy.turns.round)

    def on_train_batch_end(self, *_: Any) -> None:
        """Each one."""
        turns = self._strategy.turns
        assert turns is not None
        self._progress.step(turns.round, turns.membership.failures)


def ours(options: argparse.Namespace, learner: PacedLearner, data: Data) -> None:
    """Trains with `ElasticSparseCommStrategy`."""
    strategy = ElasticSparseCommStrategy(
        method_of(options.method),
        lighthouse=options.lighthouse,
        replica=options.replica,
        local_state_dir=options.local_state_dir,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=options.steps,
        callbacks=[Told(strategy, Progress(learner.network, options.compare_every))],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(learner, DataLoader(TensorDataset(*data.train), options.batch_size, shuffle=True))


def torchft(options: argparse.Namespace, learner: PacedLearner, data: Data) -> None:
    """Trains with torchft's `DiLoCo`."""
    loader = DataLoader(TensorDataset(*data.train), options.batch_size, shuffle=True)
    progress = Progress(learner.network, options.compare_every)
    failed, local, before = 0, 0, 0
    progress.begin(before)
    for now in torchft_diloco.steps(learner, loader, options.lighthouse, options.replica, EVERY):
        local += 1
        # One that is behind gets weights in its first exchange: its steps before it are in nothing.
        if now > before + 1:
            progress.begin(now)
        exchanged = local == EVERY
        failed += exchanged and now == before
        progress.step(now, failed, EVERY if now == before + 1 else 0)
        local, before = 0 if exchanged else local, now
        if now * EVERY >= options.steps:
            break


def held_out(network: nn.Module, task: Task, data: Data) -> dict[str, float]:
    """The loss and the accuracy, in %, on data that nobody trains on."""
    inputs, targets = data.held_out
    network.eval()
    with torch.no_grad():
        outputs = torch.cat([network(some) for some in inputs.split(500)])
    return {"loss": float(task.loss(outputs, targets)), "accuracy": 100 * task.accuracy(outputs, targets)}


def main(options: argparse.Namespace) -> None:
    """Trains, and says how it ends."""
    torch.set_num_threads(1)
    task = TASKS[options.task]
    data = task.read(options.data_dir, False)
    pl.seed_everything(options.seed, verbose=False)
    learner = PacedLearner(
        task.network(data.classes),
        options.optimizer,
        RATES[options.optimizer][options.task],
        options.steps,
        task.loss,
        step_seconds=options.step_ms / 1000,
    )
    (torchft if options.method == TORCHFT else ours)(options, learner, data)
    say(end=True)
    say(**held_out(learner.network, task, data))
