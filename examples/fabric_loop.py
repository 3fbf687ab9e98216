"""A Fabric loop with a sparsecomm strategy: `python examples/fabric_loop.py`, in two processes on the CPU.

It differs from a loop with ddp in two lines: the strategy knows the number of steps, and `settle()` ends training.
"""

import argparse
from functools import partial

import torch
from classifier import Classifier
from command_line import at_least
from images import read_digits
from lightning_fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_sparsecomm.strategies.lightning_fabric import SparseCommStrategy


def train(fabric: Fabric, strategy: SparseCommStrategy, epochs: int, steps_each: int) -> None:
    """Trains, and prints on rank 0 the accuracy and what was sent."""
    fabric.seed_everything(0, verbose=False)
    read = read_digits().standardized()
    data = TensorDataset(read.train_images, read.train_labels)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, fabric.world_size, fabric.global_rank)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    model = Classifier().network
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for _, (images, labels) in zip(range(steps_each), loader):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    strategy.settle()

    with torch.no_grad():
        correct = (model(read.test_images).argmax(1) == read.test_labels).float().mean()
    assert strategy.ledger is not None
    fabric.print(f"accuracy {correct:.1%}, {strategy.ledger.compression_ratio():.1f} times fewer bytes than ddp")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=at_least(1), default=5)
    parser.add_argument("--devices", type=at_least(1), default=2, help="processes")
    options = parser.parse_args()

    steps_each = 1437 // options.devices // 32
    strategy = SparseCommStrategy(length=options.epochs * steps_each, start_method="fork")
    run = partial(train, strategy=strategy, epochs=options.epochs, steps_each=steps_each)
    Fabric(accelerator="cpu", devices=options.devices, strategy=strategy).launch(run)
