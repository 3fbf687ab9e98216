"""examples/restarts.py as torchrun's worker: a callback writes down what happens, and waits where a test acts."""

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import restarts


class Diary(pl.Callback):
    """Appends lines to a file that all workers share; waits at one step in a world of so many ranks.

    Args:
        path: The file.
        hold: The number of ranks, and the step to wait at for torchrun's signal, or to be killed; None never waits.
    """

    def __init__(self, path: Path, hold: tuple[int, int] | None) -> None:
        self.path = path
        self.hold = hold

    def write(self, trainer: pl.Trainer, event: str, **more: object) -> None:
        where = {"rank": trainer.global_rank, "world": trainer.world_size, "step": trainer.global_step}
        with self.path.open("a") as file:
            file.write(json.dumps({"event": event, **where, "pid": os.getpid(), **more}) + "\n")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.write(trainer, "start", epoch=trainer.current_epoch)

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if (trainer.world_size, trainer.global_step) == self.hold:
            self.write(trainer, "hold")
            while not trainer.received_sigterm:
                time.sleep(0.05)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        self.write(trainer, "step", loss=float(outputs["loss"]))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Buffers are each rank's own after the last forward pass, as under ddp.
        weights = b"".join(each.detach().numpy().tobytes() for each in pl_module.parameters())
        self.write(trainer, "end", weights=hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("every", type=int)
    options = parser.parse_args()
    world, _, step = os.environ.get("HOLD", "").partition(":")
    diary = Diary(options.folder / "diary", (int(world), int(step)) if step else None)
    restarts.train(options.folder / "checkpoints", options.steps, options.every, [diary])
