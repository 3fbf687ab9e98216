"""The command `sparsecomm`."""

import argparse
from collections.abc import Sequence

from lightning_sparsecomm.commands import doctor, lighthouse, plan, probe, report, warm


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a subcommand; errors of the user's are one line, and exit with 2."""
    parser = argparse.ArgumentParser(prog="sparsecomm", description="Tools for training over slow networks.")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (plan, probe, doctor, report, warm, lighthouse):
        command.add_to(subparsers)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        parser.exit(2, f"sparsecomm: error: {error}\n")
