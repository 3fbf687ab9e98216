"""The table of short trainings against ddp."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def run(strategy: str, seed: int, **measured: Any) -> dict[str, Any]:
    cell = {"steps": 300, "task": "lstm", "optimizer": "sgd", "strategy": strategy, "seed": seed}
    return cell | {"link_bytes": 10.0, "ddp_bytes": 100.0} | measured


def test_a_training_that_diverged_is_a_row_and_counts_for_no_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    defaults = import_module("defaults")
    runs = [run("ddp", seed, accuracy=50.0, loss=1.5) for seed in range(3)]
    runs += [run("sbc 0.01 10", 0, diverged=4, link_bytes=0.0)]
    runs += [run("sbc 0.01 10", seed, accuracy=49.0 + seed, loss=1.5) for seed in (1, 2)]
    runs += [run("sbc 0.1 100", 0, diverged=4, link_bytes=0.0)]
    some, none = defaults.table(defaults.rows(runs)).splitlines()[2:]
    assert some.endswith(
        "| 2 | 50.00 ± 0.00 | +0.50 ± 0.50 | 1.50 ± 0.00 | +0.000 ± 0.000 | 10.0 × | diverged with 1 of 3 seeds |"
    )
    assert none.endswith("| 0 | 50.00 | – | 1.50 | – | nan × | diverged with 1 of 1 seeds |")
