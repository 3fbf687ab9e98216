"""Ray Train on a cluster of two nodes on this machine, with what each worker did written into a folder.

    python ray_training.py FOLDER RUNS

RUNS is a JSON list of runs, which `train` describes. The cluster has a CPU on each node, or more where a run has more
workers than two.
"""

import json
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train
import torch
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_sparsecomm
from lightning_sparsecomm import methods
from lightning_sparsecomm.frontends.packages import TRAINERS

# Ray takes `lightning` where it is installed.
if "lightning.pytorch" in TRAINERS:
    import lightning.pytorch as pl
else:
    import pytorch_lightning as pl

EPOCHS = 4


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.network(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)}


class Begins(pl.Callback):
    """Notes the step that this run begins with."""

    step = -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.step = trainer.global_step


class Vanishes(pl.Callback):
    """Kills this worker in the third epoch, amid its batches."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (2, 3):
            os.kill(os.getpid(), signal.SIGKILL)


class ByHand(pl.Callback):
    """What Ray's guide shows for a callback of one's own: each worker saves into a temporary folder."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(os.path.join(folder, "checkpoint.ckpt"))
            ray.train.report({"epoch": trainer.current_epoch}, ray.train.Checkpoint.from_directory(folder))


def method_of(name: str) -> Any:
    return {"dgc": methods.dgc(density=0.05, warmup_steps=0), "diloco": methods.diloco(every=5)}[name]


@contextmanager
def writing_down(path: Path) -> Iterator[None]:
    """Notes what this worker hands to Ray: the files of each folder that it reports."""
    report = ray.train.report

    def noting(*args: Any, **kwargs: Any) -> None:
        folder = Path((kwargs.get("checkpoint") or args[1]).path)
        found = sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file())
        with path.open("a") as file:
            file.write(json.dumps(found) + "\n")
        report(*args, **kwargs)

    ray.train.report = noting
    try:
        yield
    finally:
        ray.train.report = report


def train(run: dict[str, Any]) -> None:
    """On each worker: trains, from Ray's checkpoint where there is one, and writes down how it ended.

    Args:
        run: `name` of its files; `folder`; `method`; `nodes`, as the strategy takes it; `by_hand`, whether a callback
            of ours reports; `vanishes`, whether rank 1 is killed on its first try.
    """
    context = ray.train.get_context()
    rank, before = context.get_world_rank(), ray.train.get_checkpoint()
    vanishes = run.get("vanishes") and rank == 1 and before is None
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(64, 8, generator=generator)
    data = TensorDataset(x, x[:, :1] * x[:, 1:2] + 0.1 * torch.randn(64, 1, generator=generator))
    pl.seed_everything(0)
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        strategy=lightning_sparsecomm.RaySparseCommStrategy(method_of(run["method"]), nodes=run.get("nodes")),
        plugins=[RayLightningEnvironment()],
        callbacks=[
            ByHand() if run.get("by_hand") else RayTrainReportCallback(),
            *([Vanishes()] if vanishes else []),
        ],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, begins = Model(), Begins()
    trainer.callbacks.append(begins)
    files = Path(run["folder"], f"{run['name']}-{rank}")
    with writing_down(files.with_suffix(".reported")), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = prepare_trainer(trainer).fit
        loader = DataLoader(data, 4, shuffle=True)
        if before is None:
            fit(model, loader)
        else:
            with before.as_directory() as folder:
                fit(model, loader, ckpt_path=os.path.join(folder, "checkpoint.ckpt"))
    weights = np.concatenate([each.detach().numpy().ravel() for each in model.parameters()])
    end = {
        "world": trainer.world_size,
        "node": context.get_node_rank(),
        "step": trainer.global_step,
        "begun": begins.step,
        "resumed": before is not None,
        "ratio": trainer.strategy.ledger.compression_ratio(),
        "rows": sorted(trainer.strategy.ledger.state_dict()["rows"]),
        "lost": [str(each.message) for each in caught if "empty memories" in str(each.message)],
    }
    np.save(files.with_suffix(".npy"), weights)
    files.with_suffix(".json").write_text(json.dumps(end))


def main(folder: Path, runs: list[dict[str, Any]]) -> None:
    """Starts a cluster, and has Ray make one run after the other."""
    workers = max(run.get("workers", 2) for run in runs)
    # By their addresses, Ray Train tells which workers are on one node.
    head = {"num_cpus": workers // 2, "node_ip_address": "127.0.0.2", "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=workers // 2, node_ip_address="127.0.0.3")
        cluster.connect()
        for run in runs:
            trainer = TorchTrainer(
                train,
                train_loop_config={**run, "folder": str(folder)},
                scaling_config=ScalingConfig(num_workers=run.get("workers", 2), placement_strategy="SPREAD"),
                run_config=RunConfig(
                    name=run.get("continues", run["name"]),
                    storage_path=str(folder / "storage"),
                    failure_config=FailureConfig(max_failures=run.get("max_failures", 0)),
                ),
            )
            try:
                trainer.fit()
                outcome = "ended"
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"
            (folder / f"{run['name']}.outcome").write_text(outcome)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
