"""The network that the examples train: plain Lightning, without a trace of compression."""

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy


class Classifier(pl.LightningModule):
    """Two convolutions and two linear layers, trained by Adam. Logs `accuracy` on the test set.

    Args:
        learning_rate: Adam's learning rate.
        hidden: Width of the first linear layer: 151,306 parameters in all with 128, and 1,078,666 with 1,024.
    """

    def __init__(self, learning_rate: float = 1e-3, hidden: int = 128) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.network = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(4),
            nn.Flatten(),
            nn.Linear(1024, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 10),
        )
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of one batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Counts correctly classified images, over all processes."""
        images, labels = batch
        self.accuracy(self.network(images), labels)
        self.log("accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam over all parameters."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)
