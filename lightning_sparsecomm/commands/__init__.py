"""The command `sparsecomm`."""

import argparse
import sys
from collections.abc import Sequence

from lightning_sparsecomm import __version__
from lightning_sparsecomm.basis.arguments import did_you_mean
from lightning_sparsecomm.commands import doctor, lighthouse, plan, probe, replay, report, warm


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a subcommand; errors of the user's are one line, and exit with 2."""
    parser = argparse.ArgumentParser(prog="sparsecomm", description="Tools for training over slow networks.")
    parser.add_argument("--version", action="version", version=f"lightning_sparsecomm {__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (plan, probe, doctor, report, warm, lighthouse, replay):
        command.add_to(subparsers)
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in subparsers.choices:
        hint = did_you_mean(arguments[0], subparsers.choices)
        parser.error(f"{arguments[0]!r} is no command.{hint} Commands: {', '.join(subparsers.choices)}.")
    # What follows "--" is a command of the user's, with options of its own.
    end = arguments.index("--") if "--" in arguments and arguments[0] == "replay" else len(arguments)
    options = parser.parse_args(arguments[:end], argparse.Namespace(after=arguments[end + 1 :]))
    try:
        options.run(options)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        parser.exit(2, f"sparsecomm: error: {error}\n")
