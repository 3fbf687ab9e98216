"""Short runs of the benchmarks; in one of them, methods learn as well as ddp on real images."""

import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.network import Lab, LabError
from benchmarks.runs import COMMIT
from tests.elastic.replicas import needs_torchft

# Each run imports Lightning anew, which is slow on a busy machine.
pytestmark = pytest.mark.timeout(600)

CHECKOUT = Path(__file__).parents[2]
BENCHMARKS = CHECKOUT / "benchmarks"


def run(script: str, *arguments: str, folder: Path) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS.parent)}
    finished = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def run_in_lab(script: str, *arguments: str, folder: Path) -> str | None:
    """The output; None where the machine permits no slow network, and the script has said so."""
    refusal = ""
    try:
        with Lab(1, "unlimited"):
            pass
    except LabError as error:
        refusal = str(error)
    if not refusal:
        return run(script, *arguments, folder=folder)
    with pytest.raises(AssertionError) as refused:
        run(script, *arguments, folder=folder)
    assert refusal in str(refused.value)
    return None


@pytest.mark.slow
def test_methods_learn_real_digits(tmp_path: Path) -> None:
    """Shortened: seconds of training instead of hours."""
    arguments = ["--task=digits", "--processes=2", "--seeds=1", "--steps=400", "--density=0.01", "--output=out"]
    output = run("learning.py", *arguments, "--rows", "ddp", "dgc", folder=tmp_path)
    runs = json.loads((tmp_path / "out" / "digits.json").read_text())["runs"]
    assert [each["commit"] for each in runs] == 2 * [COMMIT]
    assert f"Made with commit {COMMIT or 'unknown'}." in output
    ddp, *others = runs
    assert ddp["quality"] > 0.9
    for each in others:
        # Two standard errors of a proportion among 360 images.
        assert each["quality"] > ddp["quality"] - 0.03
        assert each["link_bytes"] < ddp["link_bytes"] / 8
    assert len([line for line in output.splitlines() if line.startswith("| ")]) == 1 + len(runs)


@pytest.mark.slow
def test_training_on_a_slow_network(tmp_path: Path) -> None:
    """Shortened: two of 17 rows, on one of four networks."""
    arguments = ["--models=gpt", "--ranks=2", "--rates=1gbit", "--steps=2", "--batch-size=1", "--output=out"]
    arguments += ["--rows", "ddp", "dgc(0.001)"]
    output = run_in_lab("training.py", *arguments, folder=tmp_path)
    if output is None:
        return
    ddp, dgc = json.loads((tmp_path / "out" / "training.json").read_text())["runs"]
    assert (ddp["commit"], dgc["commit"]) == (COMMIT, COMMIT)
    for rank in range(2):
        assert ddp["measured"][rank]["counted_bytes"] >= 2 * 4 * ddp["parameters"]
        # Repeated segments are counted twice.
        if not dgc["measured"][rank]["repeated"]:
            sent = dgc["measured"][rank]["counted_bytes"] - dgc["measured"][rank]["framing_bytes"]
            assert sent == pytest.approx(dgc["measured"][rank]["link_bytes"], rel=0.02)
    assert len([line for line in output.splitlines() if line.startswith("| gpt |")]) == 2
    assert (tmp_path / "out" / "training.png").stat().st_size > 10_000


@pytest.mark.slow
def test_two_packages_train_in_turns(tmp_path: Path) -> None:
    """Each run imports the copy that it is for."""
    other = tmp_path / "other"
    copy = shutil.copytree(CHECKOUT / "lightning_sparsecomm", other / "lightning_sparsecomm")
    source = copy / "methods" / "__init__.py"
    source.write_text(f"{source.read_text()}\nprint('the other copy')\n")
    arguments = [f"--package={CHECKOUT}", f"--package={other}", "--models=gpt", "--ranks=2", "--rates=unlimited"]
    arguments += ["--steps=2", "--repetitions=2", "--batch-size=1", "--output=out", "--rows", "dgc(0.001)"]
    output = run_in_lab("training.py", *arguments, folder=tmp_path)
    if output is None:
        return
    runs = json.loads((tmp_path / "out" / "training.json").read_text())["runs"]
    name = CHECKOUT.name
    assert [run["package"] for run in runs] == [name, "other", "other", name]
    assert {(run["package"], run["commit"]) for run in runs} == {(name, COMMIT), ("other", None)}
    # Two ranks in each of two runs.
    assert output.count("the other copy") == 2 * 2
    *_, compared = (line.split(" | ") for line in output.splitlines() if line.startswith("| gpt |"))
    old, new, ratio = (float(compared[column].replace(",", "")) for column in (4, 6, 8))
    assert ratio == pytest.approx(new / old, rel=0.01)
    assert f"other by {name}: rows that use a package: median {ratio:.3f}, {ratio:.3f} – {ratio:.3f}." in output


@pytest.mark.slow
def test_trainings_take_turns_step_by_step(tmp_path: Path) -> None:
    """In two runs, the second one in the other order: what is slower stays so."""
    arguments = ["--models=gpt", "--steps=20", "--skipped=1", "--rate=400mbit", "--runs=2"]
    output = run_in_lab("in_turns.py", *arguments, "--rows", "ddp", "dgc(0.001)", folder=tmp_path)
    if output is None:
        return
    (row,) = (line.strip("| ").split(" | ") for line in output.splitlines() if line.startswith("| gpt |"))
    commit = f" {COMMIT}" if COMMIT else ""
    assert [row[1], row[3]] == [f"`ddp`{commit}", f"`dgc(0.001)`{commit}"]
    first, second, ratio = (float(row[column]) for column in (2, 4, 5))
    low, high = map(float, row[6].split(" – "))
    assert second < first
    assert low <= ratio <= high < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models=gpt", "--text=short.txt"], "the text must have at least 65 symbols; got 6. Name a longer text."),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                (["--package=."], "--package: a package must be a folder that holds lightning_sparsecomm; got /"),
                ([f"--package={CHECKOUT}"] * 2, "--package: give one folder, or two that differ; got"),
                (["--models=gpt", "--batch-size=999999"], "--batch-size 999999 is too large: gpt has"),
                (["--only-print", "--output=none"], "training.json does not exist. Run without --only-print first"),
            )
        ),
    ],
)
def test_training_refuses(arguments: list[str], message: str, tmp_path: Path) -> None:
    """What cannot work is refused before anything is trained or a folder is made."""
    (tmp_path / "short.txt").write_text("sonnet")
    with pytest.raises(AssertionError, match=re.escape(message)):
        run("training.py", *arguments, folder=tmp_path)
    assert os.listdir(tmp_path) == ["short.txt"]


@pytest.mark.slow
def test_profile_of_a_step(tmp_path: Path) -> None:
    arguments = ["--model=gpt", "--row=gradient_dropping(0.001)", "--steps=2", "--functions=200"]
    output = run_in_lab("profile_step.py", *arguments, folder=tmp_path)
    if output is None:
        return
    # Gloo of torch before 2.13 prints lines of its own.
    assert "\ngradient_dropping(0.001), gpt, 2 ranks, unlimited: " in "\n" + output
    lines = {line.split("`")[1]: line.split(" | ")[1:] for line in output.splitlines() if line.startswith("| `")}
    assert len(lines) == 200
    # It is called once for each stretch that is ranked by itself; here, that is the whole model.
    ((calls, own, whole),) = (line for name, line in lines.items() if name.endswith(" _apply_noting"))
    assert float(calls) == 1.0
    assert 0 < float(own) <= float(whole.rstrip(" |"))


@pytest.mark.slow
def test_memory() -> None:
    """dgc needs no more than residual, velocity and one vector above ddp, once it is warm."""
    output = run("memory.py", "--ranks=2", "--widths", "500", "1500", "--rows", "ddp", "dgc(0.001)", folder=BENCHMARKS)
    ddp, dgc = (line.split(" | ") for line in output.splitlines() if line.startswith("| `"))
    # Weights, gradients, buckets and momentum.
    assert 3.5 < float(ddp[2]) < 6
    assert float(dgc[3].rstrip(" |")) < 3


def test_selection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        "sys.argv", ["selection.py", "--elements=200000", "--rounds=2", f"--output={tmp_path}/out.json"]
    )
    runpy.run_path(str(BENCHMARKS / "selection.py"), run_name="__main__")
    assert len(json.loads((tmp_path / "out.json").read_text())["ms"]) == 9
    assert "| one tensor, momentum and residual: fused |" in capsys.readouterr().out


@pytest.mark.slow
def test_gpu_tried_out_without_one(tmp_path: Path) -> None:
    arguments = ["--device=cpu", "--elements=20000", "--rounds=1", "--gpt2", "8", "1", "--output=out.json"]
    output = run("gpu.py", *arguments, folder=tmp_path)
    written = json.loads((tmp_path / "out.json").read_text())
    # A copy, two ways to select in two shapes, a sketch's two, and four codecs in two directions.
    assert (written["device"], len(written["ms"])) == ("the CPU", 15)
    assert all(len(ways) == 2 for ways in written["payload_ms"].values())
    assert "Optimizer steps of 411,136 parameters in 16 tensors" in output
    assert all(len(rows) == 2 for rows in written["step_ms"].values()) and "| powersgd() |" in output
    assert "| 16,777,216 bytes, pinned memory and gloo |" in output


def test_gpu_says_that_there_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("sys.argv", ["gpu.py"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(BENCHMARKS / "gpu.py"), run_name="__main__")
    assert "--device cuda needs an NVIDIA GPU, and torch finds none" in capsys.readouterr().err


def test_coding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--positions=2000", "--reference-positions=300", "--rounds=2", "--densities", "0.1", "0.01"]
    monkeypatch.setattr("sys.argv", ["coding.py", *arguments, f"--output={tmp_path}/out.json"])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    runpy.run_path(str(BENCHMARKS / "coding.py"), run_name="__main__")
    written = json.loads((tmp_path / "out.json").read_text())
    # Six ways to write, and the choice, at two densities; in two directions, by two kernels.
    assert (len(written["bits"]), len(written["seconds"])) == (14, 56)
    assert "| Golomb() | 0.01 |" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["coding.py", "--payloads", "sparse_loco()", "--elements=81920", "--rounds=2"])
    runpy.run_path(str(BENCHMARKS / "coding.py"), run_name="__main__")
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| `sparse_loco()` | 1,280 |")]
    assert 9.5 < float(row.split("|")[3]) < 10.3
    monkeypatch.setattr("sys.argv", ["coding.py", "--payloads", "diloco()"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(BENCHMARKS / "coding.py"), run_name="__main__")
    assert "payloads must be methods with one sparse codec; got diloco(every=500)" in capsys.readouterr().err


def test_entropy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With selections that are there already, so nothing is trained."""
    generator = torch.Generator().manual_seed(0)
    chances = torch.tensor([0.4, 0.02]).repeat_interleave(3000)
    indices = (torch.rand(6000, generator=generator) < chances).nonzero().view(-1)
    values = torch.randn(8 * indices.numel(), generator=generator)
    values = values[values.abs() > 1.2][: indices.numel()]
    torch.save([(indices, values, 6000, [3000, 3000])] * 2, tmp_path / "teacher-0.2.pt")
    arguments = ["--tasks=teacher", "--densities=0.2", "--positions=2000", "--rounds=1", f"--data-dir={tmp_path}"]
    monkeypatch.setattr("sys.argv", ["entropy.py", *arguments, f"--folder={tmp_path}"])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    runpy.run_path(str(BENCHMARKS / "entropy.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    bits, of_values = (line.strip("| ").split(" | ") for line in lines if line.startswith("| teacher |"))
    assert float(of_values[2]) > float(of_values[3])
    assert bits[:3] == ["teacher", "0.2", f"{indices.numel():,}"]
    entropy, within, golomb, by_tensor, *_, adaptive, auto = map(float, bits[3:])
    # One code for all is longer than one for each tensor, of which no one is told.
    assert within < adaptive == auto < golomb and within < by_tensor < golomb
    assert entropy > within
    assert [line.split(" | ")[1] for line in lines if line.startswith("| 0.2 |")] == [
        "`Golomb`",
        "`AdaptiveGolomb`",
        "`Auto` without it",
        "`Auto`",
        "`ThreeBit`",
        "`ShortThreeBit`",
        "range coder",
    ]


def test_sketch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--elements=100000", "--count=2000", "--rounds=2", "--shapes", "5x10000", "2x1000"]
    monkeypatch.setattr("sys.argv", ["sketch.py", *arguments, f"--output={tmp_path}/out.json"])
    runpy.run_path(str(BENCHMARKS / "sketch.py"), run_name="__main__")
    written = json.loads((tmp_path / "out.json").read_text())
    # A copy, five steps in two shapes, and the reference in one.
    assert (len(written["ms"]), len(written["peak_bytes"])) == (13, 11)
    assert "| insert + largest | 5x10000 |" in capsys.readouterr().out


@pytest.mark.slow
def test_time_to_accuracy(tmp_path: Path) -> None:
    arguments = ["--task=digits", "--ranks=2", "--seeds=1", "--target=0.8", "--measure-every=20", "--most-steps=100"]
    arguments += ["--output=out", "--rows", "ddp", "federated_averaging"]
    output = run_in_lab("time_to_accuracy.py", *arguments, folder=tmp_path)
    if output is None:
        return
    ddp, averaging = json.loads((tmp_path / "out" / "time_to_accuracy_digits.json").read_text())["runs"]
    assert (ddp["commit"], averaging["commit"]) == (COMMIT, COMMIT)
    for each in (ddp, averaging):
        # It ends with the first measurement that reaches the target.
        assert [point["accuracy"] >= 0.8 for point in each["points"]] == [False] * (len(each["points"]) - 1) + [True]
    # The ledger has no headers.
    last = ddp["points"][-1]
    assert last["link_bytes"] < last["sent_bytes"] < 1.1 * last["link_bytes"]
    # The first exchange is after 100 steps: nothing but it was counted, also of what was sent to measure.
    assert averaging["points"][-1]["steps"] == 100
    assert averaging["points"][-2]["link_bytes"] == 0 and averaging["points"][-2]["sent_bytes"] < 2000
    assert "| ddp | 1 of 1 |" in output and "| federated_averaging | 1 of 1 |" in output
    assert (tmp_path / "out" / "time_to_accuracy_digits.png").stat().st_size > 10_000


def test_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--elements=20000", "--worlds=2x1", "--to=16", "--rate=loopback", "--repetitions=2"]
    names = ["dgc(0.01)", "dgc(0.01, exchange='gather')", "sketched_sgd()", "s2_reducer()", "sbc(0.01, every=10)"]
    arguments += ["--methods", *names]
    monkeypatch.setattr(
        "sys.argv", ["scale.py", *arguments, f"--output={tmp_path}/out.json", f"--plot={tmp_path}/a.png"]
    )
    runpy.run_path(str(BENCHMARKS / "scale.py"), run_name="__main__")
    written = json.loads((tmp_path / "out.json").read_text())
    rows = {(row["method"], row["machines"]): row for row in written["rows"]}
    # ddp and five methods, with 2, 4, 8 and 16 ranks.
    assert len(rows) == 24 and (tmp_path / "a.png").exists()
    for (method, ranks), row in rows.items():
        assert (len(row["seconds"]) == 2) == (row["here"] is not None) == (ranks == 2)
        assert min(row["predicted"].values()) >= 0
        rehearsed = written["rehearsals"][f"{method}, {ranks}x1"]
        if ranks == 2 and rehearsed is not None and method != "s2_reducer()":
            # What was rehearsed alone is what two ranks send.
            steps = 10 if method.startswith("sbc") else 1
            handed = sum(
                size * often * (ranks if kind == "all_gather" else 2) / 2 for kind, size, often in rehearsed["calls"]
            )
            assert row["link_bytes"] == pytest.approx(handed / steps, rel=0.5)

    def grows(method: str) -> float:
        return rows[method, 16]["link_bytes"] / rows[method, 4]["link_bytes"]

    assert rows["ddp", 2]["link_bytes"] == 4 * written["elements"]
    for method in ("ddp", "sketched_sgd()"):
        assert grows(method) == pytest.approx((15 / 16) / (3 / 4), rel=0.01)
    assert grows("dgc(0.01, exchange='gather')") > 3
    output = capsys.readouterr().out
    assert "| `dgc(0.01)` | 16x1 |" in output and "- `s2_reducer()` " in output


@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_torchft
def test_replicas_that_are_killed_lose_little(tmp_path: Path) -> None:
    """Three minutes, with a kill in each half: none hangs, all have equal weights, and nobody else loses a step."""
    ours = ["sparse_loco(every=30)", "diloco(every=30)", "gradient_dropping(density=0.01)"]
    arguments = ["--minutes=3", "--kill-every=30", "--task=digits", "--data-dir=.", "--seeds=0", "--step-ms=300"]
    run("churn.py", *arguments, "--at-once", "--methods", *ours, "--output=churn.json", folder=tmp_path)
    runs = json.loads((tmp_path / "churn.json").read_text())["runs"]
    killed = [each for each in runs if each["kills"]]
    assert [each["method"] for each in killed] == ours
    # Those that are left alone, beside them.
    assert [each["method"] for each in runs if not each["kills"]] == ours
    for each in killed:
        assert each["kills"] == 4 and each["ended"] == 4 and len(each["back"]) == 4
        assert each["compared"] > 10 and each["differed"] == 0
        # All end with the same weights, which have learnt: ten classes.
        assert len(each["losses"]) == 4 and len(set(each["losses"])) == 1 and each["losses"][0] < math.log(10) / 2
        assert max(each["repeated"]) <= 1
        of_round = 30 if "every" in each["method"] else 1
        assert each["made"] - each["counted"] <= each["kills"] * of_round


def test_estimates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--noise=0", "--densities", "0.1", "--steps=200", "--seeds=2", f"--output={tmp_path}/out.json"]
    monkeypatch.setattr("sys.argv", ["estimates.py", *arguments])
    runpy.run_path(str(BENCHMARKS / "estimates.py"), run_name="__main__")
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    # Without noise, estimates lead where the mean gradient does, and a residual not as near.
    found = {name: max(distances) for name, distances in row["distances"].items()}
    assert found["ef21, literal"] == pytest.approx(found["dense"], rel=0.1)
    assert found["residual"] > 1.1 * found["dense"]
    assert "| 0 | 10% |" in capsys.readouterr().out
