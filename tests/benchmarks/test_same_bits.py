"""`benchmarks/same_bits.py` finds equal trainings equal, and an altered one not."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "same_bits.py"


def ran(*arguments: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True, timeout=110, check=False
    )


def test_equal_trainings_are_equal(tmp_path: Path) -> None:
    """Also what ranks say when they save, and of a stop, which differs from run to run."""
    for name in ("one", "two"):
        done = ran("record", tmp_path / f"{name}.json", "--only", "dgc")
        assert done.returncode == 0, done.stderr
    compared = ran("compare", tmp_path / "one.json", tmp_path / "two.json")
    assert (compared.returncode, compared.stdout) == (0, "dgc: equal\n1 of 1 equal\n")

    found = json.loads((tmp_path / "two.json").read_text())
    rank = found["configurations"]["dgc"]["rank 1"]
    rank["losses"][3] = "0" * len(rank["losses"][3])
    (tmp_path / "two.json").write_text(json.dumps(found))
    compared = ran("compare", tmp_path / "one.json", tmp_path / "two.json")
    assert compared.returncode == 1
    assert "dgc: rank 1: losses" in compared.stdout and "0 of 1 equal" in compared.stdout
