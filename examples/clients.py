"""The two networks of Sparse Binary Compression's experiments, and each client's own data."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pytorch_lightning as pl
import torch
from images import Images, Read, contents, is_published, read_mnist
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

Batch = tuple[Tensor, ...]
State = tuple[Tensor, Tensor]

IMAGES = 128  # per client and step
CHARACTERS = 50  # through which gradients are backpropagated
EVALUATED_CHARACTERS = 500  # at a time; the state is carried on
HELD_OUT = 0.05  # of a text
HELD_OUT_STREAMS = 20


class Network(pl.LightningModule):
    """A network whose quality can be measured on held-out data, during validation or outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def on_validation_epoch_start(self) -> None:
        """Resets the measurement."""
        self.mean.reset()

    def quality(self) -> float:
        """Quality in the validation steps since the reset, over all clients. A collective."""
        return float(self.mean.compute())

    def measure(self, loader: DataLoader[Batch]) -> float:
        """Quality by the same steps, outside of validation. A collective."""
        self.eval()
        self.on_validation_epoch_start()
        with torch.no_grad():
            for index, batch in enumerate(loader):
                self.validation_step(batch, index)
        return self.quality()


class LeNet5(Network):
    """LeNet5-Caffe: 431,080 parameters in 8 tensors. Its quality is accuracy.

    Args:
        optimizer: `adam` at 1e-3, as in the paper, or `sgd` at 0.01 with momentum 0.9, as in Caffe's solver for it.
    """

    def __init__(self, optimizer: Literal["adam", "sgd"] = "adam") -> None:
        super().__init__()
        self.optimizer = optimizer
        self.network = nn.Sequential(
            nn.Conv2d(1, 20, 5),
            nn.MaxPool2d(2),
            nn.Conv2d(20, 50, 5),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(800, 500),
            nn.ReLU(),
            nn.Linear(500, 10),
        )
        # Saves a third of the time on CPUs.
        self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Cross-entropy of one batch."""
        images, labels = batch
        return cross_entropy(self.network(images), labels)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Counts correctly classified images."""
        images, labels = batch
        self.mean.update((self.network(images).argmax(dim=1) == labels).float())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The chosen optimizer, at a constant rate."""
        if self.optimizer == "adam":
            return torch.optim.Adam(self.parameters(), lr=1e-3)
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class TextNetwork(Network):
    """Predicts each next symbol of a text. The state is carried from one window to the next (Zaremba et al. 2014)."""

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None
        self.measured_state: State | None = None

    def loss(self, windows: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Mean cross-entropy in nats of all symbols but the first of each window, and the state after them."""
        raise NotImplementedError

    def on_validation_epoch_start(self) -> None:
        """Begins the held-out text in an empty state."""
        super().on_validation_epoch_start()
        self.measured_state = None

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds up the cross-entropy of all symbols."""
        windows = batch[0]
        loss, self.measured_state = self.loss(windows, self.measured_state)
        self.mean.update(loss, weight=windows[:, 1:].numel())

    def quality(self) -> float:
        """Perplexity per symbol."""
        return float(self.mean.compute().exp())


class CharLSTM(TextNetwork):
    """An embedding, two layers of 200 LSTM units and a linear layer, without dropout. Its symbols are characters.

    The learning rate is 1 in the first half of the training, and is multiplied by 0.8 after 5, 6, 7, 8 and 9 tenths.

    Args:
        symbols: Distinct characters.
        iterations: Optimizer steps of the whole training.
    """

    def __init__(self, symbols: int, iterations: int) -> None:
        super().__init__()
        self.iterations = iterations
        self.embedding = nn.Embedding(symbols, 200)
        self.lstm = nn.LSTM(200, 200, num_layers=2, batch_first=True)
        self.output = nn.Linear(200, symbols)

    def loss(self, windows: Tensor, state: State | None) -> tuple[Tensor, State]:
        outputs, (hidden, cell) = self.lstm(self.embedding(windows[:, :-1]), state)
        loss = cross_entropy(self.output(outputs).flatten(0, 1), windows[:, 1:].flatten())
        return loss, (hidden.detach(), cell.detach())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Cross-entropy summed over a window, averaged over streams. A mean over characters would lower the rate."""
        loss, self.state = self.loss(batch[0], self.state)
        return CHARACTERS * loss

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """SGD without momentum, as in the paper."""
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.8 ** max(0, 10 * step // self.iterations - 4)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Endless(IterableDataset[Batch]):
    """Batches from a function.

    Args:
        batches: Starts from the beginning in each call.
    """

    def __init__(self, batches: Callable[[], Iterator[Batch]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()


class ClientData(pl.LightningDataModule):
    """Data in memory. Each client trains on its own part, and measures on its share.

    Args:
        seed: Seed of the parts and of their order. Equal seeds give equal batches.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def setup(self, stage: str) -> None:
        """Finds out which client this is."""
        assert self.trainer is not None
        self.client, self.clients = self.trainer.global_rank, self.trainer.world_size

    def train_batches(self) -> Iterator[Batch]:
        """One client's batches, endlessly."""
        raise NotImplementedError

    def val_batches(self) -> Iterator[Batch]:
        """One client's share of the held-out data."""
        raise NotImplementedError

    def train_dataloader(self) -> DataLoader[Batch]:
        """One client's batches."""
        return DataLoader(Endless(self.train_batches), batch_size=None)

    def val_dataloader(self) -> DataLoader[Batch]:
        """One client's share of the held-out data."""
        return DataLoader(Endless(self.val_batches), batch_size=None)


class ClientImages(ClientData):
    """Each client has an equal, random part of the training images, and reshuffles it in each epoch.

    Args:
        read: The images, standardized.
        seed: Seed of the parts and of their order.
        batch_size: Images per client and step.
    """

    def __init__(self, read: Read, seed: int, batch_size: int = IMAGES) -> None:
        super().__init__(seed)
        self.read, self.batch_size = read, batch_size

    def train_batches(self) -> Iterator[Batch]:
        """Batches of one client's part, without the last, incomplete one of each epoch."""
        generator = torch.Generator().manual_seed(self.seed)
        size = images_each(self.read, self.clients, self.batch_size)
        part = torch.randperm(len(self.read.train_images), generator=generator)[self.client * size :][:size]
        while True:
            order = torch.randperm(size, generator=generator)
            for chosen in part[order][: size // self.batch_size * self.batch_size].split(self.batch_size):
                yield self.read.train_images[chosen], self.read.train_labels[chosen]

    def val_batches(self) -> Iterator[Batch]:
        """Test images, dealt to the clients in turns."""
        share = slice(self.client, None, self.clients)
        yield from zip(self.read.test_images[share].split(500), self.read.test_labels[share].split(500), strict=True)


class Text(NamedTuple):
    """A text in memory, as numbers of its characters or words, int64.

    Attributes:
        train: The part to train on.
        held_out: `[HELD_OUT_STREAMS, n]`, the text's end, on which quality is measured.
        symbols: Number of distinct characters or words.
    """

    train: Tensor
    held_out: Tensor
    symbols: int


class ClientText(ClientData):
    """Each client has an equal part of the text, and reads it at `batch_size` places at once, over and over.

    Args:
        text: The text.
        seed: Seed of the places where reading begins.
        batch_size: Places per client.
        length: Length of the windows, through which gradients are backpropagated.
    """

    def __init__(self, text: Text, seed: int, batch_size: int = 5, length: int = CHARACTERS) -> None:
        super().__init__(seed)
        self.text, self.batch_size, self.length = text, batch_size, length

    def train_batches(self) -> Iterator[Batch]:
        """Windows of `length` + 1 symbols: the successor of the last one is predicted too."""
        size = len(self.text.train) // self.clients
        length = size // self.batch_size
        part = self.text.train[self.client * size :][: length * self.batch_size].view(self.batch_size, length)
        generator = torch.Generator().manual_seed(self.seed)
        start = int(torch.randint(length, (1,), generator=generator))
        window = torch.arange(self.length + 1)
        while True:
            yield (part[:, (start + window) % length],)
            start = (start + self.length) % length

    def val_batches(self) -> Iterator[Batch]:
        """Long, successive windows of one client's share of the held-out streams."""
        streams = self.text.held_out[self.client :: self.clients]
        for start in range(0, streams.shape[1] - 1, EVALUATED_CHARACTERS):
            yield (streams[:, start : start + EVALUATED_CHARACTERS + 1],)


def images_each(read: Read, clients: int, batch_size: int = IMAGES) -> int:
    """Number of training images of each client.

    Raises:
        ValueError: Less than a batch.
    """
    images = len(read.train_images)
    if images // clients < batch_size:
        raise ValueError(
            f"each of {clients} clients must have at least {batch_size} training images; got {images:,} in all. Use"
            f" --clients {max(1, images // batch_size)} or fewer."
        )
    return images // clients


def read_images(directory: Path) -> tuple[str, Read]:
    """The name and the standardized images of a folder: Fashion-MNIST, downloaded if missing, or others in its format.

    Raises:
        OSError: A file cannot be read or downloaded.
        ValueError: A file is damaged or in another format, or only some files are of Fashion-MNIST.
    """
    Images("fashion-mnist", directory).prepare_data()
    files = contents(directory)
    others = [str(path) for path, content in files.items() if not is_published(path.name, content)]
    if others and len(others) < len(files):
        raise ValueError(
            f"{', '.join(others)} must be of Fashion-MNIST, like the files beside them: they are damaged, or of another"
            " set. Delete them, and they are downloaded, or name another folder."
        )
    name = f"images of {directory.resolve().name}" if others else "Fashion-MNIST"
    return name, read_mnist(files).standardized()


def read_utf8(path: Path) -> str:
    """A file's characters.

    Raises:
        ValueError: It is not in UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be a text in UTF-8: {error}. Convert it, or name another.") from error


def read_text(path: Path) -> Text:
    """A text in UTF-8.

    Raises:
        ValueError: It is too short, or not in UTF-8.
    """
    code_points = np.frombuffer(read_utf8(path).encode("utf-32-le"), np.uint32)
    distinct, indices = np.unique(code_points, return_inverse=True)
    text = torch.from_numpy(indices.astype(np.int64))
    length = int(HELD_OUT * len(text)) // HELD_OUT_STREAMS
    if length < CHARACTERS:
        least = round(CHARACTERS * HELD_OUT_STREAMS / HELD_OUT)
        raise ValueError(f"{path} must have at least {least:,} characters; got {len(text):,}. Name a longer text.")
    end = len(text) - length * HELD_OUT_STREAMS
    return Text(text[:end], text[end:].view(HELD_OUT_STREAMS, length), len(distinct))
