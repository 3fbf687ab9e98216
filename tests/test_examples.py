"""The examples run as they stand, and what they print of themselves is true."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Each run imports Lightning anew, which is slow on a busy machine.
pytestmark = pytest.mark.timeout(300)

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_example(script: str, *arguments: str, folder: Path) -> str:
    """Runs a script in `folder` as a user would; its output."""
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    finished = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280
    )
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


def test_compare_writes_a_table_a_plot_and_the_numbers(tmp_path: Path) -> None:
    # Forked, so that Lightning is imported once; .ci/run starts the processes as the README does.
    strategies = ["ddp_fork", "sparsecomm_fork"]
    output = run_example("compare.py", "--strategies", *strategies, "--epochs=2", "--output=out", folder=tmp_path)

    runs: dict[str, Any] = json.loads((tmp_path / "out" / "compare.json").read_text())["runs"]
    assert list(runs) == strategies
    ddp, sparsecomm = runs.values()
    # 1,437 images make 22 batches of 32 for each of two ranks; all 151,306 gradients are sent in float32.
    assert ddp["sent_bytes"] == 2 * 22 * 151_306 * 4
    assert ddp["ratio"] == 1
    assert sparsecomm["ddp_bytes"] == ddp["sent_bytes"]
    assert sparsecomm["ratio"] > 20
    for run in runs.values():
        assert run["accuracy"] > 0.5  # chance is 0.1
        assert [epoch["epoch"] for epoch in run["history"]] == [1, 2]

    table = [line.split() for line in output.splitlines() if line.startswith(tuple(f"{name} " for name in strategies))]
    assert [row[:3] for row in table] == [
        [name, f"{run['accuracy']:.1%}", f"{run['sent_bytes'] / 1e6:.2f}"] for name, run in runs.items()
    ]
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("config", sorted(path.name for path in (EXAMPLES / "configs").glob("*.yaml")))
def test_config_trains(config: str, tmp_path: Path) -> None:
    arguments = ["fit", f"--config={EXAMPLES / 'configs' / config}"]
    arguments += ["--trainer.max_steps=3", "--trainer.log_every_n_steps=1"]
    if config != "sparsecomm.yaml":
        # One of the files shows that Lightning's default start method works; importing Lightning twice takes long.
        arguments += ["--trainer.strategy.init_args.start_method=fork"]
    output = run_example("cli.py", *arguments, folder=tmp_path)

    assert "compression ratio" in output
    (metrics,) = tmp_path.rglob("metrics.csv")
    header = metrics.read_text().splitlines()[0].split(",")
    assert "sparsecomm/compression_ratio" in header
