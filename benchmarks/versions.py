"""Runs the tests with the versions of each corner of what pyproject.toml permits, oldest to newest.

A corner is a version of Python with pins. For each, this makes a virtual environment, installs a copy of the checkout
there with the extra `test`, and runs pytest as the README does. What failed is run once more, one test at a time:
tests have time limits, and a busy machine may exceed them. Each corner is stored in a JSON file as it ends. Needs
nothing but Python and pip; an environment may take 7 GB, and is deleted after its run. To try what is older than the
lower bounds, lower them first, in pyproject.toml and in lightning_sparsecomm/versions.py.

    python benchmarks/versions.py --list
    python benchmarks/versions.py --resume
    python benchmarks/versions.py oldest newest --output versions.json
    python benchmarks/versions.py --only-print
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT / "examples"))
from stored import load, save  # noqa: E402

SHOWN = "torch", "pytorch-lightning", "numpy", "numba"
"""The packages that the table has a column for."""


class Corner(NamedTuple):
    """Versions to test together.

    Attributes:
        name: What the command calls it.
        python: The version of Python, without the patch.
        pins: What pip must install besides the package. All else is the newest that fits.
        constrained: Whether constraints.txt holds, as in the README's command.
        extra: Of the package, with what its tests need.
    """

    name: str
    python: str
    pins: tuple[str, ...] = ()
    constrained: bool = False
    extra: str = "test"


def pins(torch: str, lightning: str, numpy: str, numba: str) -> tuple[str, ...]:
    """Both packages of Lightning have the same version."""
    return (
        f"torch=={torch}",
        f"pytorch-lightning=={lightning}",
        f"lightning=={lightning}",
        f"numpy=={numpy}",
        f"numba=={numba}",
    )


CORNERS = [
    Corner("oldest", "3.10", pins("2.6.0", "2.5.0.post0", "1.26.4", "0.60.0"), extra="testbase"),
    Corner("torch-2.6", "3.11", pins("2.6.0", "2.5.0.post0", "1.26.4", "0.60.0"), extra="testbase"),
    Corner("torch-2.7", "3.11", pins("2.7.1", "2.5.2", "2.0.2", "0.61.2")),
    Corner("torch-2.8", "3.11", pins("2.8.0", "2.5.5", "2.1.3", "0.61.2")),
    Corner("torch-2.9", "3.12", pins("2.9.1", "2.6.0", "2.3.5", "0.63.1")),
    Corner("constraints", "3.11", constrained=True),
    Corner("newest", "3.11"),
    Corner("newest-3.13", "3.13"),
    Corner("newest-3.14", "3.14"),
]


class Outcome(NamedTuple):
    """The names of the tests that passed, were skipped, and failed or had errors."""

    passed: list[str]
    skipped: list[str]
    failed: list[str]


class CornerError(Exception):
    """A corner whose tests could not be run at all, and why."""


def outcome_of(report: Path) -> Outcome:
    """Reads pytest's own report in JUnit's form."""
    names: dict[str, list[str]] = {"passed": [], "skipped": [], "failed": []}
    for case in ET.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        names[kind].append(f"{case.get('classname')}::{case.get('name')}")
    # A test whose teardown fails too is there twice.
    failed = list(dict.fromkeys(names["failed"]))
    return Outcome(names["passed"], names["skipped"], failed)


def interpreter(version: str, given: Sequence[str]) -> str | None:
    """An interpreter of this version, among those that are given, or on the path; None where there is none."""
    for candidate in (*given, f"python{version}", "python3", sys.executable):
        found = shutil.which(candidate)
        if found is None:
            continue
        asked = subprocess.run(
            [found, "-c", "import platform; print(platform.python_version())"], capture_output=True, text=True
        )
        # A shim may be on the path for a version that is not in use.
        if asked.returncode == 0 and asked.stdout.strip().startswith(f"{version}."):
            return found
    return None


def commit() -> str | None:
    """The checkout's commit, with a + if tracked files differ from it."""
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@contextmanager
def workplace(kept: Path | None) -> Iterator[Path]:
    """A folder for a corner's environment and its copy of the checkout; deleted unless it is to be kept."""
    if kept is not None:
        kept.mkdir(parents=True)
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="versions-") as folder:
        yield Path(folder)


def copied(folder: Path) -> Path:
    """A copy of the checkout, which may change while the tests run."""
    left_out = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", "results")
    copy = Path(shutil.copytree(CHECKOUT, folder / "checkout", ignore=left_out))
    shutil.copytree(CHECKOUT / "docs" / "results", copy / "docs" / "results")
    return copy


def run(corner: Corner, python: str, folder: Path) -> dict[str, Any]:
    """Installs a corner's versions in a folder, and runs the tests with them.

    Raises:
        CornerError: The versions cannot be installed together, or pytest ended without a report.
    """
    made_with, begin = commit(), time.monotonic()
    copy = copied(folder)
    # An environment that is active outside must not take part.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"

    def call(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=copy, env=environment, stdout=subprocess.PIPE, text=True)

    def must(*command: str) -> str:
        finished = call(*command)
        if finished.returncode:
            raise CornerError(f"{' '.join(command)} ended with {finished.returncode}")
        return finished.stdout

    must(python, "-m", "venv", str(folder / "venv"))
    own = str(folder / "venv" / "bin" / "python")
    constraints = ["-c", "constraints.txt"] if corner.constrained else []
    must(own, "-m", "pip", "install", "--quiet", *constraints, "-e", f".[{corner.extra}]", *corner.pins)
    frozen = json.loads(must(own, "-m", "pip", "list", "--format=json"))
    (version,) = must(own, "-c", "import platform; print(platform.python_version())").splitlines()
    counted = _tests(call, folder / "tests.xml", [own, "-m", "pytest", "-q"])
    left = counted.failed
    if left:
        # Those alone that have just failed. What cannot even be imported does not run again.
        again = ["--last-failed", "--last-failed-no-failures=none", "--continue-on-collection-errors", "-n", "0"]
        passed = set(_tests(call, folder / "again.xml", [own, "-m", "pytest", "-q", *again]).passed)
        left = [name for name in left if name not in passed]
    return {
        "corner": corner.name,
        "python": version,
        "pins": list(corner.pins),
        "constraints": corner.constrained,
        "versions": {each["name"]: each["version"] for each in frozen},
        "commit": made_with,
        "date": date.today().isoformat(),
        "minutes": round((time.monotonic() - begin) / 60),
        "passed": len(counted.passed),
        "skipped": len(counted.skipped),
        "failed": left,
        "passed_alone": [name for name in counted.failed if name not in left],
    }


def _tests(call: Any, report: Path, command: list[str]) -> Outcome:
    finished = call(*command, f"--junitxml={report}")
    report.with_suffix(".log").write_text(finished.stdout)
    if not report.exists():
        raise CornerError(f"pytest ended with {finished.returncode}: {finished.stdout[-2000:]}")
    return outcome_of(report)


def table(runs: Iterable[dict[str, Any]]) -> str:
    """A line for each corner that has run."""
    lines = [
        f"| corner | Python | {' | '.join(SHOWN)} | passed | passed alone | failed | skipped | commit | date |",
        f"|---|---|{len(SHOWN) * '---|'}---:|---:|---:|---:|---|---|",
    ]
    for each in runs:
        cells = [f"`{each['corner']}`", each["python"], *(each["versions"][name] for name in SHOWN)]
        cells += [f"{each['passed']:,}", *(str(len(each[name])) for name in ("passed_alone", "failed"))]
        cells += [str(each["skipped"]), each["commit"] or "unknown", each["date"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ordered(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs in the order of the corners."""
    names = [corner.name for corner in CORNERS]
    return sorted(runs, key=lambda each: names.index(each["corner"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    named = {corner.name: corner for corner in CORNERS}
    add("corners", nargs="*", metavar="CORNER", help="which to run; all by default")
    add("--list", action="store_true", help="print the corners, and the interpreter of each")
    add("--interpreters", nargs="+", default=[], metavar="FILE", help="interpreters that are not on the path")
    add("--output", type=Path, default=CHECKOUT / "docs" / "results" / "versions.json", help="JSON file of all runs")
    add("--resume", action="store_true", help="skip corners that --output has; run again those that failed there")
    add("--keep", type=Path, metavar="FOLDER", help="keep each corner's environment and logs there")
    add("--only-print", action="store_true", help="print the table of --output")
    options = parser.parse_args()
    for name in options.corners:
        if name not in named:
            parser.error(f"a corner must be one of {', '.join(named)}; got {name}. --list describes them.")
    corners = [named[name] for name in options.corners] or CORNERS
    if options.list:
        for corner in corners:
            where = interpreter(corner.python, options.interpreters) or "not on this machine"
            what = "constraints.txt" if corner.constrained else ", ".join(corner.pins) or "the newest of everything"
            print(f"{corner.name}: Python {corner.python} ({where}), {what}")
        return
    settings = {"system": platform.system(), "architecture": platform.machine()}
    runs = load(options.output, settings, options.resume or options.only_print)
    not_run: list[str] = []
    for corner in () if options.only_print else corners:
        if any(each["corner"] == corner.name and not each["failed"] for each in runs):
            continue
        python = interpreter(corner.python, options.interpreters)
        if python is None:
            not_run.append(f"{corner.name}: no Python {corner.python} on this machine; name one with --interpreters")
            continue
        try:
            with workplace(options.keep and options.keep / corner.name) as folder:
                ended = run(corner, python, folder)
        except CornerError as error:
            not_run.append(f"{corner.name}: {error}")
            continue
        runs = ordered([*(each for each in runs if each["corner"] != corner.name), ended])
        save(runs, options.output, settings)
        print(table([ended]), file=sys.stderr, flush=True)
    print(table(runs))
    for line in not_run:
        print(f"\nNot run: {line}")
    failed = [f"{each['corner']}: {name}" for each in runs for name in each["failed"]]
    if failed or not_run:
        sys.exit("\n".join(["", *failed, f"{len(failed)} tests failed, {len(not_run)} corners were not run"]))


if __name__ == "__main__":
    main()
