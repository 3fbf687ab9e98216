"""What the commands have in common: kinds of arguments, and what they keep quiet."""

import argparse
import logging
import warnings
from collections.abc import Callable
from pathlib import Path


def at_least(minimum: int) -> Callable[[str], int]:
    """A type for argparse: an integer not below `minimum`."""

    def integer(text: str) -> int:
        if int(text) < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}; got {text}")
        return int(text)

    return integer


def folder(text: str) -> Path:
    """A type for argparse: a folder, or the name of one that does not exist yet."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a folder; {text} is a file")
    return path


def file(text: str) -> Path:
    """A type for argparse: a file that exists."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"must be a file; {text} {'is a folder' if path.is_dir() else 'is not there'}")
    return path


def quieten(*messages: str) -> None:
    """Leaves out what Lightning says of hardware, data loading and torch's own API, which is not what is compared.

    Args:
        messages: Patterns of more warnings to leave out.
    """
    logging.disable(logging.INFO)
    for message in (".*does not have many workers.*", ".*LeafSpec.*", *messages):
        warnings.filterwarnings("ignore", message=message)
