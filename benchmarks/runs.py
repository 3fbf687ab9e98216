"""Runs in a JSON file, written as each ends, so that a benchmark that was cut off goes on after its last one."""

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import lightning_sparsecomm


def _commit() -> str | None:
    folder = Path(lightning_sparsecomm.__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


# Read at once: the checkout may change while the benchmark runs.
COMMIT = _commit()
"""Of lightning_sparsecomm, with a + if tracked files differ from it; None outside a checkout. Belongs to each run."""


def forget_most_memory() -> None:
    """From now on, `most_memory_bytes` is of what this process has from here. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")


def most_memory_bytes() -> int:
    """The most memory that was resident in this process since `forget_most_memory`. Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def made_with(commits: Iterable[str | None]) -> str:
    """A line below a table that says with which commits its runs were made."""
    return f"Made with commit {', '.join(dict.fromkeys(commit or 'unknown' for commit in commits))}."


def versions() -> dict[str, str]:
    """What a run depends on besides its options."""
    return {
        "lightning_sparsecomm": lightning_sparsecomm.__version__,
        "torch": torch.__version__,
        "pytorch-lightning": version("pytorch-lightning"),
        "python": platform.python_version(),
        "system": platform.system(),
        "architecture": platform.machine(),
    }


def load(path: Path, settings: dict[str, Any], resume: bool) -> list[dict[str, Any]]:
    """The runs that an earlier call has finished.

    Args:
        path: Their file.
        settings: All that the result of a run depends on, as JSON would give it back.
        resume: Whether the command line says to go on from them.

    Raises:
        FileExistsError: There are some, and it does not.
        ValueError: They were made with other settings.
    """
    if not path.exists():
        return []
    if not resume:
        raise FileExistsError(f"{path} holds runs already. Go on with --resume, or name another --output.")
    stored = json.loads(path.read_text())
    differ = [name for name in settings if settings[name] != stored["settings"].get(name)]
    if differ:
        raise ValueError(f"{path} holds runs with other settings: {', '.join(differ)}. Name another --output.")
    runs: list[dict[str, Any]] = stored["runs"]
    return runs


def save(runs: list[dict[str, Any]], path: Path, settings: dict[str, Any]) -> None:
    """Writes all runs; a call that is cut off here leaves the file as it was."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_text(json.dumps({"settings": settings, "runs": runs}, indent=1) + "\n")
    partial.replace(path)
