"""The images that the examples train on: digits that come with scikit-learn, or Fashion-MNIST."""

import gzip
import hashlib
import http.client
import math
import os
import urllib.request
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

DataName = Literal["digits", "fashion-mnist"]

TEST_IMAGES: dict[DataName, int] = {"digits": 360, "fashion-mnist": 10_000}

FASHION_MNIST_HOME = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"

# SHA-256 of the unpacked files: the same images are also handed round in other gzip wrappings.
FASHION_MNIST = {
    "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


class Read(NamedTuple):
    """A data set in memory: images `[n, 1, height, width]` float32 in [0, 1], labels `[n]` int64."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


class Images(pl.LightningDataModule):
    """Training and test images with labels 0 to 9. Lightning gives each process its own share of them.

    The test set is looked at after every epoch, and nothing is chosen by it.

    Args:
        data: `digits` are 1,797 images of 8x8 pixels, of which 360 are the test set. `fashion-mnist` are 60,000 images
            of 28x28 to train on and 10,000 for the test.
        data_dir: Folder of the four files of Fashion-MNIST, or the one above it. What is missing is downloaded to it.
        batch_size: Images per process and step.
    """

    def __init__(self, data: DataName = "digits", data_dir: Path = Path("data"), batch_size: int = 32) -> None:
        super().__init__()
        self.data = data
        self.data_dir = data_dir
        self.batch_size = batch_size

    def prepare_data(self) -> None:
        """Downloads what is missing; Lightning calls it in one process per machine."""
        if self.data == "fashion-mnist":
            download_missing(self.data_dir)

    def setup(self, stage: str) -> None:
        """Reads all images into memory."""
        read = read_digits() if self.data == "digits" else read_fashion_mnist(self.data_dir)
        mean, std = read.train_images.mean(), read.train_images.std()
        self.train = TensorDataset((read.train_images - mean) / std, read.train_labels)
        self.test = TensorDataset((read.test_images - mean) / std, read.test_labels)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Shuffled anew in each epoch by the run's seed: equal seeds give equal batches."""
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """The test set."""
        return DataLoader(self.test, batch_size=500)


def read_digits() -> Read:
    """scikit-learn's digits, split by a fixed permutation."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[: TEST_IMAGES["digits"]], order[TEST_IMAGES["digits"] :]
    return Read(images[train], labels[train], images[test], labels[test])


def read_fashion_mnist(directory: Path) -> Read:
    """The four files of Fashion-MNIST.

    Raises:
        FileNotFoundError: A file is not there.
        ValueError: A file is not what was published.
    """
    files = contents(directory)
    for path, content in files.items():
        if not is_published(path.name, content):
            raise ValueError(f"{path} must be the published file, and is another. Delete it; it is downloaded again.")
    return read_mnist(files)


def read_mnist(files: Mapping[Path, bytes]) -> Read:
    """Images of 28x28 pixels in MNIST's format, which Fashion-MNIST has too.

    Args:
        files: As `contents` gives them.

    Raises:
        ValueError: A file is in another format, or has other labels than one of 0 to 9 for each image.
    """
    train_images, train_labels, test_images, test_labels = (
        read_idx(path, content, (28, 28) if "images" in path.name else ()) for path, content in files.items()
    )
    for part, images, labels in (("train", train_images, train_labels), ("t10k", test_images, test_labels)):
        if len(images) != len(labels) or labels.max() > 9:
            raise ValueError(
                f"there must be one label of 0 to 9 for each image; the files {part}-* in {next(iter(files)).parent}"
                f" have {len(images):,} images and {len(labels):,} labels of 0 to {labels.max()}. Name another folder."
            )
    return Read(
        train_images.unsqueeze(1) / 255, train_labels.long(), test_images.unsqueeze(1) / 255, test_labels.long()
    )


def contents(directory: Path) -> dict[Path, bytes]:
    """Four files under MNIST's names, unpacked: images and labels to train on, then those of the test.

    Args:
        directory: Their folder, or the one above it.

    Raises:
        FileNotFoundError: A file is not there.
        ValueError: A file cannot be unpacked.
    """
    files = {}
    for name in FASHION_MNIST:
        path = find(directory, name)
        if path is None:
            raise FileNotFoundError(f"{name} is neither in {directory} nor in {directory / 'fashion-mnist'}.")
        content = content_of(path)
        if content is None:
            raise ValueError(
                f"{path} must be a whole gzip file, and is damaged. Put a whole one in its place; of Fashion-MNIST,"
                " what is missing is downloaded."
            )
        files[path] = content
    return files


def read_idx(path: Path, content: bytes, shape: tuple[int, ...]) -> Tensor:
    """The bytes of an IDX file, MNIST's format: `[n, *shape]` uint8.

    Raises:
        ValueError: It is in another format, or of another shape.
    """
    # Big-endian numbers of 4 bytes: 0x800, for bytes, plus how many dimensions there are; then their sizes.
    dimensions = 1 + len(shape)
    begin = 4 + 4 * dimensions
    kind, count, *sizes = np.frombuffer(content[:begin].ljust(begin, b"\0"), ">u4").tolist()
    if (
        kind != 0x800 + dimensions
        or (*sizes,) != shape
        or not count
        or len(content) != begin + count * math.prod(shape)
    ):
        each = "images of 28x28 pixels" if shape else "labels"
        raise ValueError(
            f"{path} must hold {each} in MNIST's format; got {len(content):,} bytes that begin with"
            f" {content[:begin].hex()}. Name another folder."
        )
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=begin).copy()).view(count, *shape)


def find(directory: Path, name: str) -> Path | None:
    """The file of Fashion-MNIST in `directory` or in its folder `fashion-mnist`, packed or not; None where it is in
    neither."""
    folders = (directory, directory / "fashion-mnist")
    paths = (folder / each for folder in folders for each in (name, name.removesuffix(".gz")))
    return next((path for path in paths if path.is_file()), None)


def content_of(path: Path) -> bytes | None:
    """A file's content, unpacked; None where it is cut off or altered."""
    content = path.read_bytes()
    return unpacked(content) if path.suffix == ".gz" else content


def download_missing(directory: Path) -> None:
    """Fetches those files of Fashion-MNIST that are not there.

    Raises:
        OSError: One cannot be fetched.
        ValueError: Those that are there are others, such as MNIST's, which have the same names; or what came is not
            the published file.
    """
    found = {name: find(directory, name) for name in FASHION_MNIST}
    missing = [name for name, path in found.items() if path is None]
    for name, path in found.items() if missing else ():
        if path is not None and not is_published(name, content_of(path)):
            raise ValueError(
                f"{path} is not Fashion-MNIST's, and what is missing beside it, {', '.join(missing)}, would be"
                " downloaded from there. Add it by hand, or name another folder."
            )
    for name in missing:
        download(directory, name)


def is_published(name: str, content: bytes | None) -> bool:
    """Whether an unpacked file is the one of Fashion-MNIST of this name, which may lack its `.gz`."""
    published = FASHION_MNIST[f"{name.removesuffix('.gz')}.gz"]
    return content is not None and hashlib.sha256(content).hexdigest() == published


def download(directory: Path, name: str) -> None:
    """Fetches a file of Fashion-MNIST; a file of this name appears in `directory` only when it is whole and right.

    Raises:
        OSError: It cannot be fetched.
        ValueError: What came is not the published file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    print(f"Downloading {FASHION_MNIST_HOME}{name} to {directory}", flush=True)
    try:
        with urllib.request.urlopen(FASHION_MNIST_HOME + name, timeout=60) as response:
            packed = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise OSError(
            f"{FASHION_MNIST_HOME}{name} cannot be fetched: {error}. Put it into {directory} by hand."
        ) from error
    content = unpacked(packed)
    if not is_published(name, content):
        raise ValueError(
            f"{FASHION_MNIST_HOME}{name} did not give the published file ({len(packed):,} bytes came). Try again."
        )
    partial = directory / f"{name}.{os.getpid()}.part"
    partial.write_bytes(packed)
    partial.replace(directory / name)


def unpacked(packed: bytes) -> bytes | None:
    """The content of gzip bytes; None where they are cut off or altered."""
    try:
        return gzip.decompress(packed)
    except (EOFError, OSError, zlib.error):
        return None
