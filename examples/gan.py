"""A GAN: two optimizers, stepped by hand, whose gradients are shared apart. `python examples/gan.py`, in two processes.

The generator's backward pass also leaves gradients in the discriminator. They are thrown away, and so must not enter
what the discriminator's optimizer sends: each optimizer's gradients are shared at its own step.
"""

import argparse

import pytorch_lightning as pl
import torch
from command_line import at_least, quieten
from images import Images
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import lightning_sparsecomm


class GAN(pl.LightningModule):
    """Draws digits of 8x8 pixels. Both networks are perceptrons, trained by Adam with learning rate 2e-4."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 64))
        self.discriminator = nn.Sequential(nn.Linear(64, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))

    def judge(self, images: Tensor, real: bool) -> Tensor:
        """The discriminator's loss if these images are to be taken for real ones, or for drawn ones."""
        logits = self.discriminator(images)
        return binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """One step of each network."""
        images = batch[0].flatten(1)
        optimizers = self.optimizers()
        assert isinstance(optimizers, list)
        for_generator, for_discriminator = optimizers
        drawn = self.generator(torch.randn(len(images), 32))

        for_generator.zero_grad()
        generator_loss = self.judge(drawn, real=True)
        self.manual_backward(generator_loss)
        for_generator.step()

        for_discriminator.zero_grad()
        discriminator_loss = (self.judge(images, real=True) + self.judge(drawn.detach(), real=False)) / 2
        self.manual_backward(discriminator_loss)
        for_discriminator.step()
        self.log_dict({"generator": generator_loss, "discriminator": discriminator_loss}, prog_bar=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Adam for each network."""
        parts = (self.generator, self.discriminator)
        return [torch.optim.Adam(part.parameters(), lr=2e-4, betas=(0.5, 0.999)) for part in parts]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=at_least(1), default=20)
    parser.add_argument("--strategy", default="sparsecomm_local_adam_fork")
    options = parser.parse_args()

    quieten()
    pl.seed_everything(0)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=options.strategy,
        callbacks=[lightning_sparsecomm.CompressionMonitor()],
        max_epochs=options.epochs,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(GAN(), Images())
    metrics = trainer.callback_metrics
    print(f"generator's loss {metrics['generator']:.3f}, discriminator's {metrics['discriminator']:.3f}")
