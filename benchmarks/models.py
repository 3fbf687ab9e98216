"""The networks of the benchmarks of training steps, of about ten million parameters each, and their data."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

# The examples are scripts, not a package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from images import Images, read_fashion_mnist
from transformer import GPT, read_characters, windows
from words import read_words

EXCERPT = Path(__file__).resolve().parent.parent / "examples" / "shakespeare-excerpt.txt"


class Trained(pl.LightningModule):
    """A network, its loss, and SGD with momentum.

    Args:
        network: Returns scores `[..., classes]`.
        learning_rate: SGD's learning rate.
    """

    def __init__(self, network: nn.Module, learning_rate: float) -> None:
        super().__init__()
        self.network = network
        self.learning_rate = learning_rate

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        scores = self.network(batch[0])
        return cross_entropy(scores.flatten(0, -2), batch[1].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.learning_rate, momentum=0.9)


class Block(nn.Module):
    """Two convolutions with batch normalization, and a shortcut (He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.path(x) + self.shortcut(x))


def resnet(classes: int) -> nn.Module:
    """ResNet-18 with a first layer for small images: 11.2 million parameters."""
    layers: list[nn.Module] = [nn.Conv2d(1, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    inputs = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(inputs, outputs, stride), Block(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def perceptron(classes: int) -> nn.Module:
    """Three linear layers: 10.7 million parameters, most in the middle layer, and little to compute."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 2900), nn.ReLU(), nn.Linear(2900, 2900), nn.ReLU(), nn.Linear(2900, classes)
    )


class WordLSTM(nn.Module):
    """512-dimensional embedding, 1,280 LSTM units, linear layer: 9.2 million parameters and 1,793 more per word."""

    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, 512)
        self.lstm = nn.LSTM(512, 1280, batch_first=True)
        self.output = nn.Linear(1280, symbols)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.output(self.lstm(self.embedding(x))[0])
        return scores


class Loaded(NamedTuple):
    """A data set in memory.

    Attributes:
        data: A pair of input and targets for each sample.
        classes: Number of classes.
    """

    data: Dataset[tuple[Tensor, ...]]
    classes: int


class Model(NamedTuple):
    """A network and its training.

    Attributes:
        load: Reads the data, given the folder of Fashion-MNIST (downloaded if missing) and a text.
        network: Makes the network, given the number of classes.
        batch_size: Samples per rank and step.
        learning_rate: Of SGD with momentum.
        samples: What a batch consists of, in words.
    """

    load: Callable[[Path, Path], Loaded]
    network: Callable[[int], nn.Module]
    batch_size: int
    learning_rate: float
    samples: str


LENGTH = 16  # words that the LSTM reads at once
CHARACTERS = 64  # that GPT reads at once


def load_images(folder: Path, text: Path) -> Loaded:
    Images("fashion-mnist", folder).prepare_data()
    read = read_fashion_mnist(folder).standardized()
    return Loaded(TensorDataset(read.train_images, read.train_labels), 10)


def load_words(folder: Path, text: Path) -> Loaded:
    words = read_words(text).text
    return Loaded(windows(words.train, LENGTH), words.symbols)


def load_characters(folder: Path, text: Path) -> Loaded:
    characters = read_characters(text)
    return Loaded(windows(characters.numbers, CHARACTERS), characters.symbols)


MODELS = {
    "resnet": Model(load_images, resnet, 4, 0.05, "images of 28×28"),
    "lstm": Model(load_words, WordLSTM, 4, 0.5, f"× {LENGTH} words"),
    "gpt": Model(load_characters, lambda symbols: GPT(symbols, CHARACTERS), 4, 0.05, f"× {CHARACTERS} characters"),
    "perceptron": Model(load_images, perceptron, 32, 0.01, "images of 28×28"),
}
