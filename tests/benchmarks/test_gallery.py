"""The gallery of methods: how a knob meets a budget, and what the table says; without training."""

import json
import math
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lightning_sparsecomm import methods
from tests.benchmarks.test_commands import CHECKOUT, run

STEPS = 300


@pytest.fixture
def gallery(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(CHECKOUT / "benchmarks"))
    monkeypatch.syspath_prepend(str(CHECKOUT / "examples"))
    return import_module("gallery")


def test_each_recipe_has_a_line(gallery: Any) -> None:
    defaults = import_module("defaults")
    assert gallery.GALLERY.keys() == methods.RECIPES.keys() | {"sparsecomm"}
    for name, method in gallery.GALLERY.items():
        for value in (method.knob.fewest, method.knob.most) if method.knob else (None,):
            for optimizer in method.optimizers:
                call = method.strategy(value, optimizer)
                assert name == "sparsecomm" or repr(defaults.method_of(call)).startswith(f"{name}(")


@pytest.mark.parametrize(
    ("fewest", "most", "values", "fewer"),
    [
        (1e-6, 1.0, (), lambda density: 1 / (2 * density)),
        (1e-6, 1.0, (), lambda density: 1 / (1e-4 + 3 * density**0.9)),
        (300, 1, (), lambda every: every),
        (10.0, 1e-6, (), lambda threshold: math.exp(threshold / 0.02)),
        (1, 64, (), lambda rank: 200 / rank),
        (1, 255, (), lambda levels: 25 / (1 + math.log2(levels))),
        (2, 8, (2, 4, 8), lambda bits: 32 / bits),
    ],
)
def test_the_search_finds_the_nearest_value(
    gallery: Any, fewest: float, most: float, values: tuple[int, ...], fewer: Any
) -> None:
    knob, tried = gallery.Knob(fewest, most, values), {}
    for budget in gallery.BUDGETS:
        while (value := knob.next(budget, tried)) is not None:
            tried[value] = fewer(value)
            assert len(tried) <= gallery.TRIES
        off = [abs(math.log(each / budget)) for each in tried.values()]
        steps = values or (range(min(fewest, most), max(fewest, most) + 1) if knob.whole else ())
        nearest = min((abs(math.log(fewer(step) / budget)) for step in steps), default=0)
        assert min(off) <= max(nearest, math.log(gallery.CLOSE)) + 1e-9


def trained(gallery: Any, name: str, following: Any, task: str, seed: int) -> dict[str, Any]:
    """A run by laws instead of training."""
    knob, dry = following.knob, following.dry
    fewer = {
        "ddp": lambda: 1.0,
        "dgc": lambda: 0.4 / knob,
        "quantized": lambda: 29 / knob,
        "terngrad": lambda: 13.0,
        # Dry runs send a sixth, so none of the values that they find stands at a thousandth.
        "random_k": lambda: (3.0 if dry else 0.5) / knob,
        "federated_averaging": lambda: float(knob),
        "muloco": lambda: float(knob),
    }[name]()
    found: dict[str, Any] = {"loss": 1 + seed + math.log10(fewer), "cpu_ms": 5 + (name != "ddp")}
    if name == "terngrad" and seed == 1:
        found = {"diverged": 12, "loss": None}
    if name == "muloco" and not dry:
        # In its first steps, before it sent anything.
        fewer, found = math.inf, {"diverged": 3, "loss": None}
    return {
        **{"method": name, "knob": knob, "task": task, "seed": seed, "dry": dry, "link_bytes": 6e6 / fewer},
        **{"optimizer": gallery.OPTIMIZERS[task], "commit": None, **found},
    }


def all_runs(gallery: Any, task: str) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    for seed in range(3):
        for name in ("ddp", "dgc", "quantized", "terngrad", "random_k", "federated_averaging", "muloco"):
            while (following := gallery.missing(name, task, seed, runs, STEPS)) is not None:
                runs.append(trained(gallery, name, following, task, seed))
                assert len(runs) < 200
    return runs


def test_every_method_stands_where_its_bytes_are(gallery: Any) -> None:
    runs = all_runs(gallery, "convolution")
    lines = [line.removesuffix(" |").split(" | ") for line in gallery.table(runs).splitlines() if "`" in line]
    rows = {first.strip("| `"): texts for first, _, *texts in lines}
    assert rows["dgc"] == ["+1.000 ± 0.000", "+2.000 ± 0.000", "+3.000 ± 0.000"]
    assert rows["quantized"] == ["+0.860 ± 0.000 at 1/7.2", *2 * ["least 1/14, knob at 2"]]
    assert rows["terngrad"][0].endswith(", 1 of 3 diverged at 1/13")
    assert rows["terngrad"][1:] == 2 * ["least 1/13, no knob"]
    assert rows["federated_averaging"] == ["+1.000 ± 0.000", "+2.000 ± 0.000", "least 1/300, knob at 300"]
    assert rows["muloco"] == [*2 * ["3 of 3 diverged"], "least 1/300, knob at 300"]
    # What dry runs said was wrong: the search went on with runs.
    assert all(text.startswith(f"+{place}.0") for place, text in enumerate(rows["random_k"], 1))
    base, own = ([each for each in runs if each["method"] == name] for name in ("ddp", "random_k"))
    assert [each["dry"] for each in base] == 3 * [False]
    assert {each["seed"] for each in own if each["dry"]} == {0}
    # Seeds after the first have no searches.
    assert len([each for each in own if each["seed"] == 1]) == 3


def test_what_is_not_defined_for_an_optimizer_is_not_run(gallery: Any) -> None:
    assert gallery.missing("local_adam", "convolution", 0, [], STEPS) is None
    assert gallery.missing("local_adam", "gpt", 0, [], STEPS).dry
    assert str(gallery.cell_of("local_adam", "convolution", 10, [])) == "for adamw only"


def test_a_training_that_diverges_is_a_run(gallery: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverges(*_: Any) -> dict[str, Any]:
        raise gallery.DivergedError(steps=30, link_bytes=50.0)

    options = Namespace(steps=STEPS, batch_size=32)
    monkeypatch.setattr(gallery, "run", diverges)
    found = gallery.measured("dgc", 0.1, "gpt", 0, False, options)
    assert (found["diverged"], found["link_bytes"]) == (30, 500.0)
    assert "momentum_correction=False" in found["strategy"]
    monkeypatch.setattr(gallery, "run", lambda *_: {"loss": math.nan, "link_bytes": 7.0})
    found = gallery.measured("dgc", 0.1, "gpt", 0, False, options)
    assert (found["diverged"], found["loss"], found["link_bytes"]) == (STEPS, None, 7.0)


def test_front(gallery: Any) -> None:
    points = {"a": (10.0, 0.1), "beaten": (9.0, 0.2), "b": (100.0, 0.5), "c": (1000.0, 0.6), "worse": (500.0, 0.7)}
    assert gallery.front(points) == ["a", "b", "c"]


@pytest.mark.slow
def test_gallery(tmp_path: Path) -> None:
    """Shortened: three methods, one network, 20 steps."""
    arguments = ["--tasks=digits", "--steps=20", "--seeds=1", "--processes=2", "--output=out.json"]
    arguments += ["--methods", "sparsecomm", "signsgd", "federated_averaging"]
    output = run("gallery.py", *arguments, f"--plot={tmp_path}/out.png", folder=tmp_path)
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    ddp, ours, signs, *averaging = runs
    assert not any("failed" in each or "diverged" in each for each in runs)
    # Biases take no part.
    assert ddp["link_bytes"] == ddp["ddp_bytes"] == 20 * 4 * 17_168
    assert signs["link_bytes"] == pytest.approx(ddp["link_bytes"] / 20, rel=0.02)
    assert 5 < ddp["link_bytes"] / ours["link_bytes"] < 15
    assert [each["knob"] for each in averaging if not each["dry"]] == [10]
    assert ", knob at 20 |" in output and (tmp_path / "out.png").stat().st_size > 10_000
    # Nothing is missing, so nothing is run.
    again = run("gallery.py", *arguments, "--resume", folder=tmp_path)
    assert again == output and json.loads((tmp_path / "out.json").read_text())["runs"] == runs
