"""torchvision's ResNet-18 with SGD and dgc: `python examples/resnet.py`, in two processes. Needs torchvision.

It trains on scikit-learn's digits, enlarged to 32x32 pixels. With other images, change the data module alone.
"""

import argparse

import pytorch_lightning as pl
import torch
from command_line import at_least, quieten
from images import Images
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

import lightning_sparsecomm
from lightning_sparsecomm import SparseCommStrategy, methods


def resnet18(classes: int) -> nn.Module:
    """torchvision's ResNet-18, untrained.

    Raises:
        SystemExit: torchvision is missing, or was built for another torch.
    """
    try:
        from torchvision.models import resnet18
    except (ImportError, RuntimeError) as error:
        raise SystemExit(
            f"examples/resnet.py needs a torchvision that fits torch {torch.__version__}; importing it failed: {error}."
            " Install both from the same index, as https://pytorch.org/get-started says."
        ) from error
    model: nn.Module = resnet18(num_classes=classes)
    return model


class ResNet(pl.LightningModule):
    """ResNet-18, trained by SGD with momentum, whose learning rate falls to 0."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        super().__init__()
        self.model = model
        self.learning_rate = learning_rate
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Logits for images of one channel."""
        images = nn.functional.interpolate(images, size=32).expand(-1, 3, -1, -1)
        logits: Tensor = self.model(images)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of one batch."""
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Counts correctly classified images, over all processes."""
        self.accuracy(self(batch[0]), batch[1])
        self.log("accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> pl.utilities.types.OptimizerLRScheduler:
        """SGD and a cosine schedule over all steps."""
        optimizer = torch.optim.SGD(self.parameters(), self.learning_rate, momentum=0.9, weight_decay=5e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(model: nn.Module, steps: int) -> float:
    """Trains in two processes; the accuracy on 360 other images."""
    pl.seed_everything(0, verbose=False)
    # A tenth of the steps for the warm-up: by default it takes 1,000.
    method = methods.dgc(density=0.01, warmup_steps=steps // 10)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SparseCommStrategy(method, start_method="fork"),
        callbacks=[lightning_sparsecomm.CompressionMonitor()],
        max_steps=steps,
        val_check_interval=min(steps, 22),  # of 22 batches in an epoch
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(ResNet(model, learning_rate=0.02), Images())
    return float(trainer.callback_metrics["accuracy"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=at_least(1), default=60)
    options = parser.parse_args()

    quieten()
    print(f"accuracy {train(resnet18(classes=10), options.steps):.1%}")
