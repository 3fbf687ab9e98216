"""What the commands share: types of arguments, and warnings to silence."""

import argparse
import logging
import warnings
from collections.abc import Callable
from pathlib import Path


def at_least(minimum: int) -> Callable[[str], int]:
    """A type for argparse: an integer of at least `minimum`."""

    def integer(text: str) -> int:
        if int(text) < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}; got {text}")
        return int(text)

    return integer


def folder(text: str) -> Path:
    """A type for argparse: a folder, or a path where nothing exists yet."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a folder; {text} is a file")
    return path


def file(text: str) -> Path:
    """A type for argparse: a file that exists."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(
            f"must be a file; {text} {'is a folder' if path.is_dir() else 'does not exist'}"
        )
    return path


def quieten(*messages: str) -> None:
    """Silences Lightning's messages about hardware, data loading and torch's API.

    Args:
        messages: Patterns of more warnings to silence.
    """
    logging.disable(logging.INFO)
    for message in (".*does not have many workers.*", ".*LeafSpec.*", *messages):
        warnings.filterwarnings("ignore", message=message)
