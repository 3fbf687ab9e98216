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

# SHA-256 of the unpacked files: other copies may be packed differently.
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

    def standardized(self) -> "Read":
        """The same images, scaled so that the training images' pixels have mean 0 and standard deviation 1."""
        mean, std = self.train_images.mean(), self.train_images.std()
        return self._replace(train_images=(self.train_images - mean) / std, test_images=(self.test_images - mean) / std)


class Images(pl.LightningDataModule):
    """Training and test images with labels 0 to 9. Lightning gives each process its own share of them.

    Accuracy on the test set is measured after every epoch, and nothing is chosen by it.

    Args:
        data: `digits`: 1,797 images of 8x8 pixels, 360 of them the test set. `fashion-mnist`: 60,000 training images
            and 10,000 test images of 28x28 pixels.
        data_dir: Folder with the four files of Fashion-MNIST, or its parent. Missing files are downloaded into it.
        batch_size: Images per process and step.
    """

    def __init__(self, data: DataName = "digits", data_dir: Path = Path("data"), batch_size: int = 32) -> None:
        super().__init__()
        self.data = data
        self.data_dir = data_dir
        self.batch_size = batch_size

    def prepare_data(self) -> None:
        """Downloads missing files; Lightning calls it in one process per machine."""
        if self.data == "fashion-mnist":
            download_missing(self.data_dir)

    def setup(self, stage: str) -> None:
        """Reads all images into memory."""
        read = (read_digits() if self.data == "digits" else read_fashion_mnist(self.data_dir)).standardized()
        self.train = TensorDataset(read.train_images, read.train_labels)
        self.test = TensorDataset(read.test_images, read.test_labels)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Reshuffled in each epoch by the run's seed: equal seeds give equal batches."""
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
        FileNotFoundError: A file is missing.
        ValueError: A file is not the published one.
    """
    files = contents(directory)
    for path, content in files.items():
        if not is_published(path.name, content):
            raise ValueError(
                f"{path} must be the published file; its content differs. Delete it, and it is downloaded again."
            )
    return read_mnist(files)


def read_mnist(files: Mapping[Path, bytes]) -> Read:
    """Images of 28x28 pixels in the format of MNIST and Fashion-MNIST.

    Args:
        files: What `contents` returns.

    Raises:
        ValueError: A file is in another format, or does not have one label from 0 to 9 for each image.
    """
    train_images, train_labels, test_images, test_labels = (
        read_idx(path, content, (28, 28) if "images" in path.name else ()) for path, content in files.items()
    )
    for part, images, labels in (("train", train_images, train_labels), ("t10k", test_images, test_labels)):
        if len(images) != len(labels) or labels.max() > 9:
            raise ValueError(
                f"there must be one label from 0 to 9 for each image; the files {part}-* in {next(iter(files)).parent}"
                f" have {len(images):,} images and {len(labels):,} labels of 0 to {labels.max()}. Name another folder."
            )
    return Read(
        train_images.unsqueeze(1) / 255, train_labels.long(), test_images.unsqueeze(1) / 255, test_labels.long()
    )


def contents(directory: Path) -> dict[Path, bytes]:
    """The contents of MNIST's four files, unpacked: training images and labels, then test images and labels.

    Args:
        directory: Their folder, or its parent.

    Raises:
        FileNotFoundError: A file is missing.
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
                f"{path} must be a whole gzip file; it is damaged. Replace it, or delete it: missing files of"
                " Fashion-MNIST are downloaded."
            )
        files[path] = content
    return files


def read_idx(path: Path, content: bytes, shape: tuple[int, ...]) -> Tensor:
    """The array in an IDX file (MNIST's format), `[n, *shape]` uint8.

    Raises:
        ValueError: It has another format or shape.
    """
    # Big-endian numbers of 4 bytes: 0x800 (for bytes) plus the number of dimensions, and then their sizes.
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
    """The file's path in `directory` or in its folder `fashion-mnist`, packed or not; None if it is in neither."""
    folders = (directory, directory / "fashion-mnist")
    paths = (folder / each for folder in folders for each in (name, name.removesuffix(".gz")))
    return next((path for path in paths if path.is_file()), None)


def content_of(path: Path) -> bytes | None:
    """A file's content, unpacked; None if it is damaged."""
    content = path.read_bytes()
    return unpacked(content) if path.suffix == ".gz" else content


def download_missing(directory: Path) -> None:
    """Downloads the missing files of Fashion-MNIST.

    Raises:
        OSError: A file cannot be downloaded.
        ValueError: Files in the folder are of another set with the same names, such as MNIST; or a downloaded file is
            not the published one.
    """
    found = {name: find(directory, name) for name in FASHION_MNIST}
    missing = [name for name, path in found.items() if path is None]
    for name, path in found.items() if missing else ():
        if path is not None and not is_published(name, content_of(path)):
            raise ValueError(
                f"{path} is not of Fashion-MNIST, but the missing {', '.join(missing)} would be downloaded from there."
                " Add the missing files by hand, or name another folder."
            )
    for name in missing:
        download(directory, name)


def is_published(name: str, content: bytes | None) -> bool:
    """Whether an unpacked file is Fashion-MNIST's of this name, with or without `.gz`."""
    published = FASHION_MNIST[f"{name.removesuffix('.gz')}.gz"]
    return content is not None and hashlib.sha256(content).hexdigest() == published


def download(directory: Path, name: str) -> None:
    """Downloads a file of Fashion-MNIST. It appears in `directory` only once it is complete and checked.

    Raises:
        OSError: It cannot be downloaded.
        ValueError: The downloaded file is not the published one.
    """
    directory.mkdir(parents=True, exist_ok=True)
    print(f"Downloading {FASHION_MNIST_HOME}{name} to {directory}", flush=True)
    try:
        with urllib.request.urlopen(FASHION_MNIST_HOME + name, timeout=60) as response:
            packed = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise OSError(
            f"{FASHION_MNIST_HOME}{name} cannot be downloaded: {error}. Put it into {directory} by hand."
        ) from error
    content = unpacked(packed)
    if not is_published(name, content):
        raise ValueError(
            f"{FASHION_MNIST_HOME}{name} must give the published file; got {len(packed):,} other bytes. Try again."
        )
    partial = directory / f"{name}.{os.getpid()}.part"
    partial.write_bytes(packed)
    partial.replace(directory / name)


def unpacked(packed: bytes) -> bytes | None:
    """The content of gzip bytes; None if they are damaged."""
    try:
        return gzip.decompress(packed)
    except (EOFError, OSError, zlib.error):
        return None
