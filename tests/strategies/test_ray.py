"""Ray Train on a real cluster of two nodes on this machine: a run that lost a worker ends with the bits of one that did
not.

It takes some minutes, and needs the extra `ray`, which the tests do not install:

    pip install -c constraints.txt -e '.[dev,ray]'
    pytest -m slow tests/strategies/test_ray.py
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="needs Ray, which the test environment leaves out: pip install 'ray[train]'",
    ),
]

ROOT = Path(__file__).parents[2]

# Without asking other machines, and without a token in the user's home.
ENVIRONMENT = {
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "OMP_NUM_THREADS": "1",
}

RUNS: list[dict[str, Any]] = [
    {"name": "dgc", "method": "dgc"},
    # Ray starts the workers again.
    {"name": "dgc, restarted", "method": "dgc", "vanishes": True, "max_failures": 1},
    {"name": "diloco", "method": "diloco"},
    # Ray gives up, and is asked for the same run once more.
    {"name": "diloco, stopped", "method": "diloco", "vanishes": True, "by_hand": True},
    {"name": "diloco, again", "method": "diloco", "continues": "diloco, stopped", "by_hand": True},
    {"name": "nodes", "method": "dgc", "nodes": "auto", "workers": 4},
]


class Runs(NamedTuple):
    """What `ray_training.py` has left in its folder."""

    folder: Path

    def outcome(self, name: str) -> str:
        return (self.folder / f"{name}.outcome").read_text()

    def ends(self, name: str, ranks: int = 2) -> list[dict[str, Any]]:
        assert self.outcome(name) == "ended"
        return [json.loads((self.folder / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]

    def weights(self, name: str, ranks: int = 2) -> list[bytes]:
        return [np.load(self.folder / f"{name}-{rank}.npy").tobytes() for rank in range(ranks)]

    def reported(self, name: str, rank: int) -> list[list[str]]:
        """The files of each folder that a rank has handed to Ray, without the numbers of saves."""
        lines = (self.folder / f"{name}-{rank}.reported").read_text().splitlines()
        return [[file.split(".pt")[0].rsplit("of_", 1)[0] for file in json.loads(line)] for line in lines]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("ray")
    finished = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ray_training.py")), str(folder), json.dumps(RUNS)],
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout
    return Runs(folder)


@pytest.mark.parametrize("name", ["dgc", "diloco"])
def test_workers_on_two_nodes_train_together(name: str, runs: Runs) -> None:
    ends = runs.ends(name)
    assert [(end["world"], end["node"], end["step"], end["resumed"]) for end in ends] == [
        (2, 0, 32, False),
        (2, 1, 32, False),
    ]
    assert all(end["ratio"] > 3 for end in ends)
    assert len(set(runs.weights(name))) == 1


@pytest.mark.parametrize(
    ("whole", "again"), [("dgc", "dgc, restarted"), ("diloco", "diloco, again")], ids=["restarted", "run again"]
)
def test_a_run_that_lost_a_worker_ends_with_the_same_bits(whole: str, again: str, runs: Runs) -> None:
    for end in runs.ends(again):
        assert end["resumed"] and not end["lost"]
        # Not from the beginning.
        assert 0 < end["begun"] < end["step"] == 32
    assert runs.weights(again) == runs.weights(whole)


def test_the_worker_was_lost_indeed(runs: Runs) -> None:
    assert "health check failed" in runs.outcome("diloco, stopped")


@pytest.mark.parametrize("name", ["dgc", "diloco, again"])
def test_each_rank_hands_its_own_file_to_ray(name: str, runs: Runs) -> None:
    """So it works where nodes have no folder in common but Ray's storage."""
    for folder in runs.reported(name, 0):
        assert folder == ["checkpoint.ckpt", "checkpoint.ckpt.sparsecomm/rank_0_"]
    for folder in runs.reported(name, 1):
        assert folder == ["checkpoint.ckpt.sparsecomm/rank_1_"]


def test_rays_nodes_are_those_of_the_strategy(runs: Runs) -> None:
    ends = runs.ends("nodes", 4)
    assert [end["node"] for end in ends] == [0, 0, 1, 1]
    assert all("inside nodes" in end["rows"] for end in ends)
    assert len(set(runs.weights("nodes", 4))) == 1


def test_ray_is_imported_only_when_its_strategy_is_used() -> None:
    code = """
import sys, lightning_sparsecomm as ours
ours.SparseCommStrategy()
print('ray' in sys.modules)
from ray.train.lightning import RayDDPStrategy
print(isinstance(ours.RaySparseCommStrategy(), RayDDPStrategy))
"""
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    finished = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    assert finished.stdout.split() == ["False", "True"]


def test_the_example(tmp_path: Path) -> None:
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)}

    def run(epochs: int) -> list[str]:
        command = [sys.executable, str(ROOT / "examples" / "ray_train.py"), f"--epochs={epochs}"]
        finished = subprocess.run(
            command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert finished.returncode == 0, finished.stdout
        assert ("sparsecomm: resumed from " in finished.stdout) == (epochs > 8)
        return finished.stdout[finished.stdout.rindex("accuracy ") :].split()

    # 1,438 images are 22 batches of 32 for each of two workers; chance is 10%.
    for epochs in (8, 9):
        words = run(epochs)
        assert float(words[1].removesuffix("%")) > 80
        assert words[3] == str(22 * epochs)
        files = tmp_path.glob("ray_results/digits/checkpoint_*/checkpoint.ckpt.sparsecomm/rank_1_*")
        assert len(list(files)) == 2
