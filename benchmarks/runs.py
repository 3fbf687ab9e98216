"""What benchmarks say of a run besides its result, and how runs are kept in a file."""

import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import torch

import lightning_sparsecomm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from stored import load as load
from stored import save as save


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
