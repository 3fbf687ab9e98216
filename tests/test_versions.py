"""Which versions of other packages are refused, and that pip refuses the same."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_sparsecomm import versions

ROOT = Path(__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def install(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    """Makes packages look as if these were all that is installed."""

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize("name", versions.OLDEST)
def test_pip_has_the_same_bounds(name: str) -> None:
    (wanted,) = re.findall(rf'^    "{name}(>=[^"]*)"', PROJECT, re.MULTILINE)
    refused = [f"!={each}" for each in versions.COMPROMISED.get(name, ())]
    assert wanted.split(",") == [f">={versions.OLDEST[name]}", *refused]


@pytest.mark.parametrize(("name", "oldest"), versions.OLDEST.items())
def test_an_older_version_is_refused_by_name(name: str, oldest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _, last = oldest.rpartition(".")
    older = f"{first}.{int(last) - 1}+cpu"
    install(monkeypatch, {name: older})
    message = f"lightning_sparsecomm needs {name} {oldest} or newer; got {older}. Run: pip install '{name}>={oldest}'"
    with pytest.raises(ImportError, match=re.escape(message)):
        versions.check()


@pytest.mark.parametrize(("name", "oldest"), versions.OLDEST.items())
@pytest.mark.parametrize("rest", ["", ".0", ".1.post0", "1.0a0+git1234567", ".0rc1"])
def test_that_version_and_newer_ones_are_not(
    name: str, oldest: str, rest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, {name: oldest + rest})
    versions.check()


@pytest.mark.parametrize("name", versions.COMPROMISED)
def test_compromised_releases_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in versions.COMPROMISED[name]:
        install(monkeypatch, {name: version})
        with pytest.raises(ImportError, match=f"{name} must not be {version}, a release that was compromised"):
            versions.check()
    install(monkeypatch, {name: "2.6.4"})
    versions.check()


def test_what_is_not_installed_or_has_no_numbers_is_no_concern(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {})
    versions.check()
    assert versions._numbers("2.13.0a1+cpu") == (2, 13, 0)
    assert versions._numbers("unknown") == ()


def test_the_package_refuses_before_it_imports_anything(tmp_path: Path) -> None:
    """torch itself would stop the import."""
    (tmp_path / "torch-1.0.dist-info").mkdir()
    (tmp_path / "torch-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", "import lightning_sparsecomm"]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert finished.stderr.splitlines()[-1].startswith("ImportError: lightning_sparsecomm needs torch ")
