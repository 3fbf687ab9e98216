"""What the pages of results print of stored runs is what is stored."""

import argparse
import json
import statistics
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"


def lines_of(page: str) -> list[str]:
    """The lines of a page of results."""
    return (RESULTS / f"{page}.md").read_text().splitlines()


@pytest.mark.parametrize(("task", "seeds"), [("lenet5", 3), ("lenet5_ahead", 3), ("lenet5_sgd", 3), ("charlstm", 2)])
def test_tables_of_sparse_binary_compression(task: str, seeds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = import_module("sparse_binary_compression")
    lines = lines_of("quality")
    stored = json.loads((RESULTS / f"sparse_binary_compression_{task}.json").read_text())["runs"]
    task = task.removesuffix("_ahead")
    for row in dict.fromkeys(run["row"] for run in stored):
        runs = [example.read(run) for run in stored if run["row"] == row]
        assert sorted(run.seed for run in runs) == list(range(seeds))
        scale, decimals = example.TASKS[task].scale, example.TASKS[task].decimals
        qualities = [scale * run.quality for run in runs]
        ratio = statistics.mean(run.ddp_bytes / run.points[-1].sent_bytes for run in runs)
        title = example.ROWS[row].title.removeprefix("SBC, ")
        quality = f"{statistics.mean(qualities):.{decimals}f} ± {statistics.stdev(qualities):.{decimals}f}"
        assert any(line.startswith(f"| {title} | {quality} |") and f"| {ratio:,.0f} x |" in line for line in lines), (
            f"no line of {title} with {quality} and {ratio:,.0f} x"
        )


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("battery", "battery"),
        ("battery-gathered", "default_choices"),
        ("battery-two-bit", "default_choices"),
        ("battery-held-out", "default_choices"),
        ("battery-autoencoder", "defaults"),
        ("battery-recommender", "defaults"),
        ("battery-short", "battery"),
        ("powersgd", "quality"),
        ("sums", "quality"),
        ("sparse_loco", "quality"),
        ("sbc-grid", "quality"),
        ("nodes", "steps"),
        ("streaming", "overlap"),
        ("streaming-held-out", "overlap"),
    ],
)
def test_table_of_the_battery(name: str, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    battery = import_module("defaults")
    runs = json.loads((RESULTS / f"{name}.json").read_text())["runs"]
    lines = lines_of(page)
    printed = battery.table(battery.rows(runs)).splitlines()
    assert len(printed) > 2
    assert [line for line in printed if line not in lines] == []


def test_summary_of_the_battery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    battery = import_module("defaults")
    runs = json.loads((RESULTS / "battery.json").read_text())["runs"]
    printed = battery.summary(battery.rows(runs), "sparsecomm").splitlines()
    assert len(printed) == 2 + 12
    assert [line for line in printed if line not in lines_of("defaults")] == []


def test_table_of_dgc_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    learning = import_module("learning")
    stored = json.loads((RESULTS / "learning-dgc-fashion-mnist.json").read_text())
    options = argparse.Namespace(task=stored["settings"]["task"], rows=["ddp", "dgc"])
    printed = learning.table([learning.Run(**run) for run in stored["runs"]], options).splitlines()
    assert len(printed) == 4
    assert [line for line in printed if line not in lines_of("quality")] == []


@pytest.mark.parametrize(("script", "name"), [("auto", "auto"), ("two_levels", "two-levels")])
def test_tables_of_steps(script: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    benchmark = import_module(script)
    runs = json.loads((RESULTS / f"{name}.json").read_text())["runs"]
    lines = lines_of("steps")
    printed = benchmark.table([benchmark.Run(**run) for run in runs]).splitlines()
    assert len(printed) > 2
    assert [line for line in printed if line not in lines] == []


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("churn", "faults"),
        ("utilization", "overlap"),
    ],
)
def test_tables_of_replicas(name: str, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    runs = json.loads((RESULTS / f"{name}.json").read_text())["runs"]
    lines = lines_of(page)
    printed = import_module(name.partition("-")[0]).table(runs).splitlines()
    assert len(printed) > 2
    assert [line for line in printed if line not in lines] == []


def test_table_of_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    runs = json.loads((RESULTS / "collectives.json").read_text())["runs"]
    lines = (ROOT / "docs" / "network.md").read_text().splitlines()
    printed = import_module("collectives").table(runs).splitlines()
    assert len(printed) > 2
    assert [line for line in printed if line not in lines] == []


def test_table_of_the_gallery(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page has the whole table and its plot as soon as the runs are stored, and every recipe has a row."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    gallery = import_module("gallery")
    stored, lines = RESULTS / "gallery.json", lines_of("quality")
    assert stored.exists() == ("[results/gallery.json](gallery.json) has all runs." in lines)
    assert stored.exists() == (RESULTS / "gallery.png").exists()
    printed = gallery.table(json.loads(stored.read_text())["runs"]).splitlines() if stored.exists() else []
    assert [line for line in printed if line and line not in lines] == []
    assert not printed or gallery.GALLERY.keys() == {line.split("`")[1] for line in printed if line.startswith("| `")}


def test_tables_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = import_module("gpu")
    stored = json.loads((RESULTS / "gpu.json").read_text())
    lines = lines_of("parts")
    steps = benchmark.report_steps(stored["step_ms"], stored["peak_bytes"], stored["parameters"])
    printed = [*benchmark.report(stored["ms"], "copy_"), *steps]
    assert len(printed) == 25
    assert [line for line in printed if line not in lines] == []


def test_table_of_what_auto_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    auto = import_module("auto")
    stored = json.loads((RESULTS / "auto.json").read_text())
    printed = auto.table([auto.Run(**run) for run in stored["runs"]]).splitlines()
    lines = lines_of("steps")
    assert len(printed) > 20
    assert [line for line in printed if line not in lines] == []


def test_how_much_faster_the_default_is_by_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table in choosing.md, and the README's row, are of the steps of two ranks."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    auto = import_module("auto")
    stored = json.loads((RESULTS / "auto.json").read_text())
    found: dict[str, list[float]] = {}
    for row in auto.table([auto.Run(**run) for run in stored["runs"]]).splitlines()[2:]:
        _, ranks, network, *milliseconds = [cell.strip().replace(",", "") for cell in row.strip("|").split(" | ")[:6]]
        network = network.replace(" rtt", ", rtt")
        ddp, rounded, ours = map(float, milliseconds)
        if ranks == "2":
            found.setdefault(network, []).append(min(ddp, rounded) / ours)
    lines = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8").splitlines()
    names = {"10 Mbit/s": "10mbit", "100 Mbit/s": "100mbit", "1 Gbit/s": "1gbit", "no limit": "unlimited"}
    for name, rate in names.items():
        (line,) = [line for line in lines if line.startswith(f"| {name} |")]
        cells = line.strip("| ").split(" | ")[1:]
        for cell, network in zip(cells, [rate, f"{rate}, rtt 20ms", f"{rate}, rtt 100ms"], strict=True):
            gains = found.get(network)
            assert cell == (f"{min(gains):.1f} – {max(gains):.1f} ×" if gains else "–"), network
    whole, fast = found["100mbit"], found["1gbit"]
    said = f"is {min(whole):.1f} to {max(whole):.1f} times faster than ddp's in bfloat16; at 1 Gbit {min(fast):.1f} to"
    assert f"{said} {max(fast):.1f} times" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_table_of_a_gpt_over_a_slow_link() -> None:
    """The last points, and when a row has reached what ddp ends with."""
    runs = json.loads((RESULTS / "gpt.json").read_text())["runs"]
    lines = lines_of("overlap")
    per_step = {run["row"]: run["points"][-1]["sent_bytes"] / run["points"][-1]["steps"] for run in runs}
    goal = next(run for run in runs if run["row"] == "ddp")["points"][-1]["loss"]
    for run in runs:
        last = run["points"][-1]
        reached = next(point for point in run["points"] if point["loss"] <= goal)
        sent, seconds = reached["sent_bytes"] / 1e6, last["seconds"] / last["steps"]
        cells = [run["row"], last["steps"], last["loss"], seconds, last["sent_bytes"] / 1e6]
        line = "| `{}` | {} | {:.3f} | {:.2f} | {:,.3f} |".format(*cells)
        line += f" {per_step['ddp'] / per_step[run['row']]:,.0f} x |"
        line += f" {reached['seconds']:.0f} s, {sent:,.{1 if sent < 10 else 0}f} MB |"
        assert line in lines
