"""The benchmarks run, in short; and methods learn as well as ddp on real images."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

# Each run imports Lightning anew, which is slow on a busy machine.
pytestmark = pytest.mark.timeout(300)

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(script: str, *arguments: str, folder: Path) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS.parent)}
    finished = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_methods_learn_real_digits(tmp_path: Path) -> None:
    """Shortened: 10 seconds of training where the benchmark has hours."""
    arguments = ["--task=digits", "--processes=2", "--seeds=1", "--steps=400", "--density=0.01", "--output=out"]
    output = run("learning.py", *arguments, "--rows", "ddp", "dgc", folder=tmp_path)
    runs = json.loads((tmp_path / "out" / "digits.json").read_text())["runs"]
    ddp, *others = runs
    assert ddp["quality"] > 0.9
    for each in others:
        # Two standard errors of a proportion among 360 images.
        assert each["quality"] > ddp["quality"] - 0.03
        assert each["link_bytes"] < ddp["link_bytes"] / 8
    assert len([line for line in output.splitlines() if line.startswith("| ")]) == 1 + len(runs)


def test_selection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        "sys.argv", ["selection.py", "--elements=200000", "--rounds=2", f"--output={tmp_path}/out.json"]
    )
    runpy.run_path(str(BENCHMARKS / "selection.py"), run_name="__main__")
    assert len(json.loads((tmp_path / "out.json").read_text())["ms"]) == 9
    assert "| one tensor, momentum and residual: fused |" in capsys.readouterr().out


def test_coding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--positions=2000", "--reference-positions=300", "--rounds=2", "--densities", "0.1", "0.01"]
    monkeypatch.setattr("sys.argv", ["coding.py", *arguments, f"--output={tmp_path}/out.json"])
    runpy.run_path(str(BENCHMARKS / "coding.py"), run_name="__main__")
    written = json.loads((tmp_path / "out.json").read_text())
    # Five ways to write, at two densities; in two directions, by two kernels.
    assert (len(written["bits"]), len(written["seconds"])) == (12, 48)
    assert "| Golomb() | 0.01 |" in capsys.readouterr().out


def test_sketch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--elements=100000", "--count=2000", "--rounds=2", "--shapes", "5x10000", "2x1000"]
    monkeypatch.setattr("sys.argv", ["sketch.py", *arguments, f"--output={tmp_path}/out.json"])
    runpy.run_path(str(BENCHMARKS / "sketch.py"), run_name="__main__")
    written = json.loads((tmp_path / "out.json").read_text())
    # A copy, five steps in two shapes, and the reference in one.
    assert (len(written["ms"]), len(written["peak_bytes"])) == (13, 11)
    assert "| insert + largest | 5x10000 |" in capsys.readouterr().out
