"""Small networks with their data and learning rates, of which a training takes minutes: the battery of `defaults.py`.

`RATES` are ddp's: of those in `TRIED`, the one with the least loss on held-out training data (never the test data)
after 300 steps:

    python benchmarks/defaults.py --data-dir DIR --tune --processes 1 --batch-size 128 --strategies ddp \\
        --steps 300 --seeds 1
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from learning import images_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from transformer import Layer

CHARACTERS = 32
"""Of a window of text; each is predicted from those before it."""

HELD_OUT_WINDOWS, HELD_OUT_SAMPLES, TRAINING_SAMPLES, INPUTS = 2_000, 10_000, 50_000, 64

USERS, ITEMS = 20_000, 5_000

NOISE = 0.3
"""Of images to denoise: its standard deviation, where that of their pixels is 1."""


class Data(NamedTuple):
    """A pair of inputs and targets to train on, another to measure on, and the number of classes."""

    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    classes: int


def convolution(classes: int) -> nn.Module:
    """Two convolutions and two linear layers, 56,714 parameters; for Fashion-MNIST."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 64), nn.ReLU(), nn.Linear(64, classes)),
    )


def digit_convolution(classes: int) -> nn.Module:
    """A convolution and two linear layers, 17,258 parameters; for the 8 × 8 digits."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, classes)),
    )


def autoencoder(classes: int) -> nn.Module:
    """Three convolutions and three that undo them, 19,593 parameters; removes noise from 28 × 28 images."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 8, 3, 1, 1)),
        *(nn.ReLU(), nn.ConvTranspose2d(8, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 16, 4, 2, 1)),
        *(nn.ReLU(), nn.Conv2d(16, 1, 3, 1, 1)),
    )


class Residual(nn.Module):
    """Two convolutions with batch norm, and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the shortcut and the convolutions, rectified."""
        return (x + self.body(x)).relu()


def residual_network(classes: int) -> nn.Module:
    """A residual block of width 32 and one of width 64, with batch norm, 112,000 parameters; for Fashion-MNIST."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, stride=4, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), Residual(32)),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), Residual(64)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)),
    )


def student(classes: int) -> nn.Module:
    """Three linear layers, 126,730 parameters; learns what a random network of two layers says."""
    return nn.Sequential(
        *(nn.Linear(INPUTS, 320), nn.ReLU(), nn.Linear(320, 320), nn.ReLU(), nn.Linear(320, classes)),
    )


class CharacterGPT(nn.Module):
    """Two layers of causal attention, 4 heads, 64 dimensions, about 113,000 parameters."""

    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.symbols, self.positions = nn.Embedding(symbols, 64), nn.Embedding(CHARACTERS, 64)
        self.layers = nn.Sequential(Layer(64, 4), Layer(64, 4), nn.LayerNorm(64))
        self.output = nn.Linear(64, symbols)

    def forward(self, x: Tensor) -> Tensor:
        """Scores `[batch, CHARACTERS, symbols]` of the next character, given characters `[batch, CHARACTERS]`."""
        scores: Tensor = self.output(self.layers(self.symbols(x) + self.positions.weight))
        return scores


class CharacterLSTM(nn.Module):
    """An embedding of 48 dimensions, 128 LSTM units and a linear layer, about 106,000 parameters."""

    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, 48)
        self.lstm = nn.LSTM(48, 128, batch_first=True)
        self.output = nn.Linear(128, symbols)

    def forward(self, x: Tensor) -> Tensor:
        """Scores `[batch, CHARACTERS, symbols]` of the next character, given characters `[batch, CHARACTERS]`."""
        scores: Tensor = self.output(self.lstm(self.embedding(x))[0])
        return scores


class Recommender(nn.Module):
    """Tables of 20,000 users and 5,000 items, 8 numbers each, and two linear layers, 200,161 parameters."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, 8), nn.Embedding(ITEMS, 8)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        """Ratings `[batch]`, given users and items `[batch, 2]`."""
        product = self.users(x[:, 0]) * self.items(x[:, 1])
        ratings: Tensor = product.sum(1) + self.layers(product)[:, 0]
        return ratings


@cache
def fashion(data_dir: Path, tune: bool) -> Data:
    """Fashion-MNIST, standardized."""
    return _images("fashion-mnist", data_dir, tune)


@cache
def noisy(data_dir: Path, tune: bool) -> Data:
    """Fashion-MNIST, standardized: images with noise, and without as targets."""
    generator = torch.Generator().manual_seed(0)
    (images, _), (held_out, _), classes = fashion(data_dir, tune)
    train, others = ((each + NOISE * torch.randn(each.shape, generator=generator), each) for each in (images, held_out))
    return Data(train, others, classes)


@cache
def digits(data_dir: Path, tune: bool) -> Data:
    """scikit-learn's digits, standardized."""
    return _images("digits", data_dir, tune)


def _images(name: Literal["fashion-mnist", "digits"], data_dir: Path, tune: bool) -> Data:
    read = images_of(name, data_dir, hold_out_training=tune)
    (images, labels), (held_out, held_out_labels) = read.train, read.held_out
    return Data((images, labels), (held_out, held_out_labels), read.classes)


@cache
def text(data_dir: Path, tune: bool) -> Data:
    """Windows of `shakespeare.txt`, each with its successor as targets.

    The last twentieth is the test data; for tuning the twentieth before it. Our tables have 42 of Shakespeare's works
    from Project Gutenberg, as collected by Open Shakespeare: 5,057,198 characters.

    Raises:
        FileNotFoundError: `data_dir` has no such file.
    """
    file = data_dir / "shakespeare.txt"
    if not file.exists():
        raise FileNotFoundError(f"--data-dir must hold shakespeare.txt, a text in UTF-8; found none in {data_dir}.")
    characters = file.read_text(encoding="utf-8")
    points = np.frombuffer(characters.encode("utf-32-le"), np.uint32)
    distinct, numbers = np.unique(points, return_inverse=True)
    symbols, part = torch.from_numpy(numbers.astype(np.int64)), len(numbers) // 20
    end = len(symbols) - part if tune else len(symbols)
    train, held_out = (
        some.unfold(0, CHARACTERS + 1, CHARACTERS) for some in (symbols[: end - part], symbols[end - part : end])
    )
    held_out = held_out[:HELD_OUT_WINDOWS]
    return Data((train[:, :-1], train[:, 1:]), (held_out[:, :-1], held_out[:, 1:]), len(distinct))


@cache
def taught(data_dir: Path, tune: bool) -> Data:
    """Random inputs, with the class that a fixed random network of two layers gives them."""
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(INPUTS, 128, generator=generator), torch.randn(128, 10, generator=generator)
    inputs = torch.randn(TRAINING_SAMPLES + 2 * HELD_OUT_SAMPLES, INPUTS, generator=generator)
    targets = ((inputs @ first / INPUTS**0.5).tanh() @ second).argmax(1)
    parts = [(inputs[some], targets[some]) for some in torch.arange(len(inputs)).tensor_split((50_000, 60_000))]
    return Data(parts[0], parts[1 if tune else 2], 10)


@cache
def rated(data_dir: Path, tune: bool) -> Data:
    """Users and items, the n-th by popularity as often as n^-0.9, with a rating: a random bilinear form, and noise."""
    generator = torch.Generator().manual_seed(0)
    samples, pairs = 120_000 + 2 * HELD_OUT_SAMPLES, []
    for count in (USERS, ITEMS):
        popularity = torch.arange(1, count + 1).double() ** -0.9
        chosen = torch.multinomial(popularity, samples, replacement=True, generator=generator)
        pairs.append((chosen, torch.randn(count, 8, generator=generator)[chosen]))
    (users, tastes), (items, traits) = pairs
    ratings = (tastes * traits).sum(1) / 8**0.5 + 0.5 * torch.randn(samples, generator=generator)
    inputs, ends = torch.stack([users, items], 1), (120_000, 120_000 + HELD_OUT_SAMPLES)
    parts = list(zip(inputs.tensor_split(ends), ratings.tensor_split(ends)))
    return Data(parts[0], parts[1 if tune else 2], 1)


def entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of classes, in nats."""
    return cross_entropy(outputs.flatten(0, -2), targets.flatten())


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """The part of targets that were recognized."""
    return float((outputs.argmax(-1) == targets).double().mean())


def explained(outputs: Tensor, targets: Tensor) -> float:
    """The part of the targets' variance that is explained."""
    return 1 - float(mse_loss(outputs, targets) / targets.var())


class Task(NamedTuple):
    """A network and its data.

    Attributes:
        network: Makes the network, given the number of classes.
        read: Reads the data, given its folder and whether to leave the test data alone.
        loss: Of outputs and targets.
        accuracy: The part that is right, likewise.
    """

    network: Callable[[int], nn.Module]
    read: Callable[[Path, bool], Data]
    loss: Callable[[Tensor, Tensor], Tensor] = entropy
    accuracy: Callable[[Tensor, Tensor], float] = accuracy


TASKS = {
    "convolution": Task(convolution, fashion),
    "batch norm": Task(residual_network, fashion),
    "teacher": Task(student, taught),
    "lstm": Task(CharacterLSTM, text),
    "gpt": Task(CharacterGPT, text),
    "digits": Task(digit_convolution, digits),
    "autoencoder": Task(autoencoder, noisy, mse_loss, explained),
    "recommender": Task(Recommender, rated, mse_loss, explained),
}

TRIED = {
    "sgd": {
        "batch norm": (0.025, 0.05, 0.1, 0.2),
        "teacher": (0.03, 0.1, 0.3),
        "lstm": (0.3, 1.0, 3.0, 6.0),
        "gpt": (0.1, 0.3, 1.0),
        "autoencoder": (0.01, 0.03, 0.1, 0.3),
        "recommender": (0.3, 1.0, 3.0, 10.0),
    },
    "adamw": {
        "batch norm": (2e-3, 4e-3, 8e-3, 1.6e-2),
        "teacher": (2e-3, 4e-3, 8e-3),
        "lstm": (5e-3, 1e-2, 2e-2, 4e-2),
        "gpt": (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2),
        "autoencoder": (2e-3, 4e-3, 8e-3, 1.6e-2),
        "recommender": (5e-3, 1e-2, 2e-2, 4e-2, 8e-2),
    },
    "amsgrad": {"convolution": (2e-3, 4e-3, 8e-3, 1.6e-2), "teacher": (2e-3, 4e-3, 8e-3)},
    "rmsprop": {"convolution": (5e-4, 1e-3, 2e-3, 4e-3), "teacher": (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)},
    "nadam": {"convolution": (2e-3, 4e-3, 8e-3, 1.6e-2), "teacher": (2e-3, 4e-3, 8e-3)},
    "adamax": {"convolution": (4e-3, 8e-3, 1.6e-2, 3.2e-2), "teacher": (4e-3, 8e-3, 1.6e-2)},
}
"""Learning rates that `--tune` tries with ddp."""

RATES = {
    "sgd": {
        "convolution": 0.1,
        "digits": 0.1,
        "batch norm": 0.05,
        "teacher": 0.1,
        "lstm": 3.0,
        "gpt": 0.3,
        "autoencoder": 0.03,
        "recommender": 1.0,
    },
    "adamw": {
        "convolution": 8e-3,
        "digits": 8e-3,
        "batch norm": 4e-3,
        "teacher": 4e-3,
        "lstm": 2e-2,
        "gpt": 2e-2,
        "autoencoder": 8e-3,
        "recommender": 4e-2,
    },
    "amsgrad": {"convolution": 8e-3, "teacher": 4e-3},
    "rmsprop": {"convolution": 2e-3, "teacher": 2e-3},
    "nadam": {"convolution": 8e-3, "teacher": 4e-3},
    "adamax": {"convolution": 8e-3, "teacher": 8e-3},
}
"""What trains ddp. Those of convolution and digits were chosen before, likewise; what was tried is not recorded."""
