"""What benchmarks record about a run besides its result, and how they keep runs in a file."""

import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from stored import load as load
from stored import save as save


class Package(NamedTuple):
    """A copy of lightning_sparsecomm, which need not be imported.

    Attributes:
        folder: The folder that holds `lightning_sparsecomm`.
        commit: Its commit, with a + if tracked files differ from it; None outside a checkout.
        version: Its version.
    """

    folder: Path
    commit: str | None
    version: str

    @classmethod
    def at(cls, folder: Path) -> "Package":
        """Reads the commit at once: the checkout may change while the benchmark runs.

        Raises:
            ValueError: The folder does not hold the package.
        """
        folder = folder.resolve()
        source = folder / "lightning_sparsecomm" / "__init__.py"
        found = re.search(r'^__version__ = "(.*)"', source.read_text(), re.MULTILINE) if source.is_file() else None
        if found is None:
            raise ValueError(f"a package must be a folder that holds lightning_sparsecomm; got {folder}.")
        command = ["git", "-C", str(source.parent), "describe", "--always", "--exclude=*", "--dirty=+"]
        try:
            commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            commit = None
        return cls(folder, commit, found[1])

    def use(self) -> None:
        """Imports this copy, in a process that has imported none.

        Raises:
            RuntimeError: Another copy is imported instead.
        """
        sys.path.insert(0, str(self.folder))
        import lightning_sparsecomm

        imported = Path(lightning_sparsecomm.__file__).resolve().parent.parent
        if imported != self.folder:
            raise RuntimeError(f"lightning_sparsecomm must be imported from {self.folder}; got the one in {imported}.")


def _importable() -> Package:
    spec = find_spec("lightning_sparsecomm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("lightning_sparsecomm must be installed: run pip install -e . in its checkout.")
    return Package.at(Path(spec.origin).parent.parent)


IMPORTABLE = _importable()
"""The copy that `import lightning_sparsecomm` finds."""

COMMIT = IMPORTABLE.commit
"""Its commit. Stored with each run."""


def forget_most_memory() -> None:
    """Restarts what `most_memory_bytes` measures. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")


def most_memory_bytes() -> int:
    """Peak resident memory of this process since `forget_most_memory`. Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def made_with(commits: Iterable[str | None]) -> str:
    """The line below a table that names the commits of its runs."""
    return f"Made with commit {', '.join(dict.fromkeys(commit or 'unknown' for commit in commits))}."


def spread(values: Sequence[float], decimals: int) -> str:
    """The least and the most of some values, for a table."""
    return f"{min(values):,.{decimals}f} – {max(values):,.{decimals}f}"


def versions(packages: Sequence[Package] = (IMPORTABLE,)) -> dict[str, str]:
    """What a run depends on besides its options."""
    return {
        "lightning_sparsecomm": ", ".join(dict.fromkeys(package.version for package in packages)),
        "torch": torch.__version__,
        "pytorch-lightning": version("pytorch-lightning"),
        "python": platform.python_version(),
        "system": platform.system(),
        "architecture": platform.machine(),
    }
