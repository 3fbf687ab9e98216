"""`sparsecomm report FOLDER`: the page of the runs that CompressionReport has recorded in a folder."""

import argparse
from pathlib import Path
from typing import Any

from lightning_sparsecomm.report import write_report


def add_to(subparsers: Any) -> None:
    """Adds the command to a parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "report", help="write a page that compares recorded runs", description=__doc__
    )
    parser.add_argument("folder", type=Path, help="where the callback CompressionReport has written runs")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Writes the page, and prints its path."""
    print(write_report(options.folder))
