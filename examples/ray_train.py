"""A training on the workers of Ray Train, on this machine or, with RAY_ADDRESS set, on a cluster:

    pip install 'lightning-sparsecomm[examples,lightning,ray]'
    python examples/ray_train.py --workers 2

Ray collects what all ranks hold in one checkpoint after each epoch. If a worker is lost, Ray starts all of them again,
and they resume from there. If the whole run is lost, the same command resumes it.
"""

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_sparsecomm import RaySparseCommStrategy


class Digits(pl.LightningModule):
    """A small network for images of 8x8 pixels. Logs the accuracy on images that it was not trained with."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of one batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Counts correctly classified images, over all workers."""
        images, labels = batch
        self.log("accuracy", (self.network(images).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam over all parameters."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def train(options: dict[str, Any]) -> None:
    """What each worker does."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    training, test = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))

    pl.seed_everything(0, verbose=False)
    trainer = prepare_trainer(
        pl.Trainer(
            max_epochs=options["epochs"],
            accelerator="cpu",
            strategy=RaySparseCommStrategy(),
            plugins=[RayLightningEnvironment()],
            # Saves into a folder of each worker's own, and reports it to Ray.
            callbacks=[RayTrainReportCallback()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    )
    model, loaders = Digits(), (DataLoader(training, 32, shuffle=True, drop_last=True), DataLoader(test, 32))
    reported = ray.train.get_checkpoint()
    if reported is None:
        trainer.fit(model, *loaders)
    else:
        # Here, the checkpoint is with the files of all ranks.
        with reported.as_directory() as folder:
            trainer.fit(model, *loaders, ckpt_path=Path(folder, RayTrainReportCallback.CHECKPOINT_NAME))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="each takes a CPU")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--storage", default="ray_results", help="a folder or address that all machines can write to")
    parser.add_argument("--name", default="digits", help="of the run; the same one resumes it")
    options = parser.parse_args()

    result = TorchTrainer(
        train,
        train_loop_config={"epochs": options.epochs},
        scaling_config=ScalingConfig(num_workers=options.workers),
        run_config=RunConfig(
            name=options.name,
            storage_path=options.storage if "://" in options.storage else str(Path(options.storage).absolute()),
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    assert result.metrics is not None and result.checkpoint is not None
    print(f"accuracy {result.metrics['accuracy']:.1%} after {result.metrics['step']} steps; {result.checkpoint.path}")
