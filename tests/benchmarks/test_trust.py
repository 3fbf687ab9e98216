"""The command that runs attacks as often as asked; the attacks' short forms are tests of their own."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.test_commands import run

# Each run imports Lightning anew, which is slow on a busy machine.
pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
def test_attacks_are_counted(tmp_path: Path) -> None:
    """Shortened: 2 attacks of 1,000, on one method of ten."""
    output = run("trust.py", "collectives", "--count=2", "--names", "sbc", "ddp", "--output=out", folder=tmp_path)
    found = json.loads((tmp_path / "out" / "trust-collectives.json").read_text())
    assert found["count"] == 2
    assert {name: sum(outcomes.values()) for name, outcomes in found["outcomes"].items()} == {"sbc": 2, "ddp": 2}
    assert set(found["outcomes"]["sbc"]) <= {"stopped", "no effect"}
    assert found["outcomes"]["ddp"]["silent"]
    assert "| ddp | 1 | silent |" in output
