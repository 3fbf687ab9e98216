"""The examples run, and what they print is true."""

import argparse
import gzip
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

# Each run imports Lightning anew, which is slow on a busy machine.
pytestmark = pytest.mark.timeout(600)

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(script: str, *arguments: str, folder: Path) -> str:
    """Runs a script in `folder` as a user would; its output."""
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    finished = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


# The README's first command runs the same, and CI runs that.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("link", "said"),
    [
        ([], "Measured: each process sends through a link of 100 Mbit/s."),
        (["--link=0"], "On one machine sending is almost free"),
    ],
)
def test_compare_writes_a_table_a_plot_and_the_numbers(link: list[str], said: str, tmp_path: Path) -> None:
    # Forked, so that Lightning is imported once; .ci/run starts the processes as the README does.
    strategies = ["ddp_fork", "sparsecomm_fork"]
    arguments = ["--strategies", *strategies, "--epochs=2", "--output=out", *link]
    output = run_example("compare.py", *arguments, folder=tmp_path)
    assert said in output

    runs: dict[str, Any] = json.loads((tmp_path / "out" / "compare.json").read_text())["runs"]
    assert list(runs) == strategies
    ddp, sparsecomm = runs.values()
    # 1,437 images make 22 batches of 32 for each of two ranks; all 1,078,666 gradients are sent in float32.
    assert ddp["sent_bytes"] == 2 * 22 * 1_078_666 * 4
    assert ddp["ratio"] == 1
    assert sparsecomm["ddp_bytes"] == ddp["sent_bytes"]
    assert sparsecomm["ratio"] > 10
    for run in runs.values():
        assert run["accuracy"] > 0.5  # chance is 0.1
        assert [epoch["epoch"] for epoch in run["history"]] == [1, 2]

    table = [line.split() for line in output.splitlines() if line.startswith(tuple(f"{name} " for name in strategies))]
    assert [row[:3] for row in table] == [
        [name, f"{run['accuracy']:.1%}", f"{run['sent_bytes'] / 1e6:.2f}"] for name, run in runs.items()
    ]
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_where_no_link_can_be_set_up_its_time_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    compare = importlib.import_module("compare")
    monkeypatch.setenv("PATH", "/nowhere")
    refused = compare.enter(100, 2)
    # ip and tc may lie where an ordinary user's path does not lead: there they are found.
    assert re.fullmatch(r"commands are missing: unshare(, ip)?(, tc)? \(packages iproute2 and util-linux\)", refused)
    epoch = compare.with_link(compare.Epoch(1, 0.5, 25e6, 50e6, 3.0), 100)
    assert epoch.seconds == 3.0 + 2.0
    options = argparse.Namespace(link=100)
    assert "Computed, not measured" in compare._how_timed(options, refused)
    assert refused in compare._how_timed(options, refused)


@pytest.mark.slow
def test_sparse_binary_compression_on_images(tmp_path: Path) -> None:
    """Images in MNIST's format, of which each class has a bright bar of its own."""
    for part, count in (("train", 1280), ("t10k", 200)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = np.random.default_rng(0).integers(0, 100, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels):
            image[2 + 2 * label : 4 + 2 * label] = 255
        for name, content in (("images-idx3", images), ("labels-idx1", labels)):
            packed = tmp_path / f"{part}-{name}-ubyte.gz"
            packed.write_bytes(gzip.compress(idx(content)))
    # As torchvision leaves them, one is unpacked.
    packed.with_suffix("").write_bytes(idx(labels))
    packed.unlink()
    arguments = ["--task=lenet5", f"--data-dir={tmp_path}", "--clients=2", "--iterations=12", "--output=out"]
    output = run_example("sparse_binary_compression.py", *arguments, "--rows", "base", "fedavg", folder=tmp_path)

    base, averaged = json.loads((tmp_path / "out" / "sparse_binary_compression_lenet5.json").read_text())["runs"]
    gradient_bytes = 4 * 431_080
    assert [point["iteration"] for point in base["points"]] == [2, 4, 6, 8, 10, 12]
    assert [point["sent_bytes"] for point in base["points"]] == [n * gradient_bytes for n in (2, 4, 6, 8, 10, 12)]
    # All 12 steps are communicated at once, at the end. 8 tensors have 4 bytes of their own, and as many again for
    # whether someone has changed them since.
    assert [point["sent_bytes"] for point in averaged["points"]] == [0] * 5 + [gradient_bytes + 4 * 8 + 4 * 8]
    assert averaged["ddp_bytes"] == base["ddp_bytes"] == 12 * gradient_bytes
    assert base["points"][-1]["quality"] > 0.5  # chance is 0.1
    assert averaged["points"][-1]["quality"] > averaged["points"][-2]["quality"]
    assert [line.split("    ")[0] for line in output.splitlines() if "1.0 x" in line] == ["base (ddp)"]
    assert (tmp_path / "out" / "sparse_binary_compression_lenet5.png").read_bytes().startswith(b"\x89PNG")

    arguments[0] = "--task=lenet5_sgd"
    run_example("sparse_binary_compression.py", *arguments, "--rows", "base", folder=tmp_path)
    (by_sgd,) = json.loads((tmp_path / "out" / "sparse_binary_compression_lenet5_sgd.json").read_text())["runs"]
    ours, theirs = ([point["quality"] for point in run["points"]] for run in (by_sgd, base))
    assert ours != theirs and ours[-1] > 0.5


@pytest.mark.slow
def test_sparse_binary_compression_on_text_goes_on_where_it_was_left(tmp_path: Path) -> None:
    arguments = ["--task=charlstm", "--clients=2", "--iterations=5", "--output=out"]
    numbers = tmp_path / "out" / "sparse_binary_compression_charlstm.json"
    run_example("sparse_binary_compression.py", *arguments, "--rows", "base", folder=tmp_path)
    (base,) = json.loads(numbers.read_text())["runs"]
    rows = ["--rows", "base", "sbc1", "sbc2"]
    output = run_example("sparse_binary_compression.py", *arguments, *rows, "--resume", folder=tmp_path)

    first, *others = json.loads(numbers.read_text())["runs"]
    assert first == base
    assert [run["row"] for run in others] == ["sbc1", "sbc2"]
    # As if all of 74 symbols were equally likely.
    assert all(10 < run["points"][-1]["quality"] < 80 for run in (first, *others))
    # The paper's ratios, of positions alone, are 2,780, and 3,950 for 10 steps, of which there are 5 here.
    sbc1, sbc2 = (run["ddp_bytes"] / run["points"][-1]["sent_bytes"] for run in others)
    assert 2_000 < sbc1 < 2_780
    assert 1_500 < sbc2 < 3_950 / 2
    assert "seed 0, base" not in output
    assert "seed 0, SBC (1)" in output


@pytest.mark.slow
def test_word_language_model(tmp_path: Path) -> None:
    """Rows differ in how the embedding table is shared, whose bytes are told apart from the others."""
    numbers = tmp_path / "out" / "word_language_model.json"
    arguments = ["--clients=2", "--iterations=11", "--output=out"]
    output = run_example("word_language_model.py", *arguments, "--rows", "ddp", "dense", "none", folder=tmp_path)

    ddp, dense, none = json.loads(numbers.read_text())["runs"]
    # 1,451 words and 256 dimensions.
    table_bytes = 4 * 1451 * 256
    steps = [2, 4, 6, 8, 10, 11]
    assert [point["iteration"] for point in ddp["points"]] == [point["iteration"] for point in dense["points"]] == steps
    assert [point["table"]["handed"] for point in ddp["points"]] == [step * table_bytes for step in steps]
    # Of each of 10 tensors, the table being one, also how many clients have a gradient for it.
    assert [point["table"]["handed"] for point in dense["points"]] == [step * (table_bytes + 4) for step in steps]
    assert dense["points"][-1]["sent"]["handed"] == ddp["points"][-1]["sent"]["handed"] + 11 * 4 * 10
    assert none["points"][-1]["table"]["handed"] == 0
    assert ddp["ddp"] == dense["ddp"] == none["ddp"] == ddp["points"][-1]["sent"]
    # With two clients an all-reduce is bit-equal to ddp's.
    assert [point["quality"] for point in dense["points"]] == [point["quality"] for point in ddp["points"]]
    assert ddp["points"][-1]["quality"] != none["points"][-1]["quality"]
    assert ddp["points"][-1]["quality"] < 1451  # as if all words were equally likely
    assert [line.split("    ")[0].strip() for line in output.splitlines() if "1.0 x" in line] == [
        "ddp",
        "all-reduce of its own",
    ]
    assert numbers.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_word_language_model_with_every_row(tmp_path: Path) -> None:
    rows = ["ddp", "gather", "blocks", "s2_2", "s2_1", "s2_05"]
    run_example("word_language_model.py", "--clients=3", "--iterations=5", "--output=out", folder=tmp_path)
    runs = json.loads((tmp_path / "out" / "word_language_model.json").read_text())["runs"]
    ends = {run["row"]: run["points"][-1] for run in runs}
    assert list(ends) == rows
    for row in ("gather", "blocks"):
        assert ends[row]["quality"] == pytest.approx(ends["ddp"]["quality"], rel=1e-3)
    assert ends["s2_05"]["quality"] != pytest.approx(ends["ddp"]["quality"], rel=1e-5)
    sent = {row: end["table"]["handed"] for row, end in ends.items()}
    assert sent["s2_05"] < sent["gather"] < sent["blocks"] < sent["ddp"] / 5
    assert sent["s2_2"] == pytest.approx(2 * sent["s2_1"], rel=0.02) == pytest.approx(4 * sent["s2_05"], rel=0.04)


@pytest.mark.slow
def test_word_language_model_with_sparse_gradients_trains_as_with_dense_ones(tmp_path: Path) -> None:
    arguments = ["--clients=2", "--iterations=3", "--rows", "ddp"]
    run_example("word_language_model.py", *arguments, "--output=dense", folder=tmp_path)
    output = run_example("word_language_model.py", *arguments, "--output=sparse", "--sparse", folder=tmp_path)

    files = [tmp_path / folder / "word_language_model.json" for folder in ("dense", "sparse")]
    ((dense,), (sparse,)) = (json.loads(path.read_text())["runs"] for path in files)
    ours, theirs = (run["points"][-1] for run in (sparse, dense))
    assert ours["quality"] == pytest.approx(theirs["quality"], rel=1e-4)
    assert ours["sent"]["handed"] - ours["table"]["handed"] == theirs["sent"]["handed"] - theirs["table"]["handed"]
    # A client reads 140 words in a step, not all of them distinct.
    assert 3 * 50 * (256 * 4 + 8) < ours["table"]["handed"] < 3 * 140 * (256 * 4 + 8)
    assert "Sparse: " in output

    # What is there already is not run again.
    again = run_example("word_language_model.py", *arguments, "--output=dense", "--resume", folder=tmp_path)
    assert "seed 0, ddp" in output and "seed 0, ddp" not in again
    assert json.loads(files[0].read_text())["runs"] == [dense]


# Each takes ten seconds or more, most of them to import Lightning; what YAML may say is tested in tests/strategies.
# The one for replicas that come and go needs a lighthouse: tests/elastic.
CONFIGS = sorted({path.name for path in (EXAMPLES / "configs").glob("*.yaml")} - {"elastic.yaml"})


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
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


def idx(numbers: np.ndarray) -> bytes:
    """In MNIST's format."""
    return np.array([0x800 + numbers.ndim, *numbers.shape], ">u4").tobytes() + numbers.tobytes()


def test_files_that_cannot_be_used_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    clients, images, stored = (importlib.import_module(name) for name in ("clients", "images", "stored"))
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(ValueError, match=r"binary must be a text in UTF-8: .* Convert it, or name another"):
        clients.read_text(binary)
    for content in (b"\xff", b"{", b"{}", b"[]", b"null", b'{"runs": []}', b'{"settings": [], "runs": [1]}'):
        binary.write_bytes(content)
        with pytest.raises(ValueError, match=r"binary is damaged or holds no runs: .* Delete it, or name another --o"):
            stored.load(binary, {}, resume=True)
    binary.write_text("a few words")
    with pytest.raises(ValueError, match=r"binary must have at least 20,000 characters; got 11\. Name a longer text"):
        clients.read_text(binary)
    with pytest.raises(ValueError, match=r"binary must have at least 7,000 words; got 3\. Name a longer text"):
        importlib.import_module("words").read_words(binary)
    # MNIST's files have the names of Fashion-MNIST's, of which nothing may be put beside them.
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(bytes(20)))
    monkeypatch.setattr(images, "download", lambda *_: pytest.fail("something is downloaded"))
    with pytest.raises(
        ValueError,
        match=r"labels-idx1-ubyte\.gz is not of Fashion-MNIST, but the missing train.* would be downloaded from there",
    ):
        clients.read_images(tmp_path)
    small, large = (idx(np.zeros((20, size, size), np.uint8)) for size in (28, 32))
    for images_of, labels_of, text in (
        (large, 20, r"images-idx3-ubyte must hold images of 28x28 pixels in MNIST's format; got 20,496 bytes that beg"),
        (b"\x00", 20, r"images-idx3-ubyte must hold images of 28x28 pixels in MNIST's format; got 1 bytes that begin"),
        (small[:-1], 20, r"must hold images of 28x28 pixels in MNIST's format; got 15,695 bytes that begin with 00"),
        (small, 19, r"train-\* in .* have 20 images and 19 labels of 0 to 0\. Name another folder"),
    ):
        for part in ("train", "t10k"):
            (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.zeros(labels_of, np.uint8))))
            (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(images_of)
        with pytest.raises(ValueError, match=text):
            clients.read_images(tmp_path)

    with pytest.raises(
        ValueError, match=r"each of 3 clients must have at least 128 training images; got 300 in all\. Use --clients 2"
    ):
        clients.images_each(images.Read(*[torch.zeros(300)] * 4), clients=3)


def test_a_damaged_file_of_fashion_mnist_is_not_taken_for_another_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unpacked file has no checksum of its own."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    clients, images = (importlib.import_module(name) for name in ("clients", "images"))
    published = {}
    for part in ("train", "t10k"):
        for name, content in (("images-idx3", np.zeros((200, 28, 28), np.uint8)), ("labels-idx1", np.ones(200, "u1"))):
            path = tmp_path / f"{part}-{name}-ubyte"
            path.write_bytes(idx(content))
            published[f"{path.name}.gz"] = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(images, "FASHION_MNIST", published)
    assert clients.read_images(tmp_path)[0] == "Fashion-MNIST"
    damaged = tmp_path / "t10k-labels-idx1-ubyte"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x05")
    with pytest.raises(
        ValueError, match=r"t10k-labels-idx1-ubyte must be of Fashion-MNIST, like the files beside them"
    ):
        clients.read_images(tmp_path)
    damaged.unlink()
    damaged.with_suffix(".gz").write_bytes(gzip.compress(bytes(100))[:-9])
    with pytest.raises(ValueError, match=r"idx1-ubyte\.gz must be a whole gzip file; it is damaged\. Replace it"):
        clients.read_images(tmp_path)


def test_kinds_of_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    command_line = importlib.import_module("command_line")
    assert command_line.at_least(2)("2") == 2
    assert command_line.folder(str(tmp_path / "new")) == tmp_path / "new"
    text = tmp_path / "text"
    text.touch()
    assert command_line.file(str(text)) == text
    for kind, given, problem in (
        (command_line.at_least(2), "1", "must be at least 2; got 1"),
        (command_line.folder, text, "must be a folder; .*text is a file"),
        (command_line.file, tmp_path, "must be a file; .* is a folder"),
        (command_line.file, tmp_path / "new", "must be a file; .*new does not exist"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=problem):
            kind(str(given))


def test_runs_of_other_data_or_options_are_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    stored, words, binary = (
        importlib.import_module(name) for name in ("stored", "word_language_model", "sparse_binary_compression")
    )
    text, numbers = tmp_path / "text.txt", tmp_path / "runs.json"
    given = {"task": "charlstm", "text": text}
    of_words, of_binary = (
        kind(**{name: given.get(name, 1) for name in kind._fields}) for kind in (words.Options, binary.Options)
    )
    for described in (
        lambda: words.settings(of_words),
        lambda: binary.settings(binary.prepare_charlstm(of_binary), of_binary),
    ):
        text.write_text("a text " * 10_000)
        stored.save([{"run": 1}], numbers, described())
        assert stored.load(numbers, described(), resume=True) == [{"run": 1}]
        text.write_text("A text " * 10_000)
        with pytest.raises(ValueError, match=r"holds runs with other settings: \w+_sha256\. Name another --output"):
            stored.load(numbers, described(), resume=True)


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        ("gpt", "--every 2", "--every 2 --delay 5 with row streaming_diloco: fragments must be at most every"),
        ("gpt", "--delay 30 --rows ddp streaming_diloco", "delay must be below every, 30 steps"),
        ("gpt", "--width 200", "--width must be a multiple of its 3 heads; got 200"),
        ("compare", "--strategies ddp sparsecomm_notebook", "must all start processes in the same way"),
        ("compare", "--strategies sparsecomm_elastic", "invalid choice: 'sparsecomm_elastic'"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_trains(
    script: str, options: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [script, *options.split()])
    with pytest.raises(SystemExit):
        importlib.import_module(script).parse()
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_gpt_goes_on_with_rows_that_it_has(tmp_path: Path) -> None:
    arguments = ["--processes=2", "--link=0", "--steps=8", "--every=4", "--delay=1", "--width=32", "--layers=1"]
    arguments += ["--batch-size=2", "--output=out"]
    run_example("gpt.py", *arguments, "--rows", "streamed_sparse_loco", folder=tmp_path)
    output = run_example("gpt.py", *arguments, "--rows", "streamed_sparse_loco", "ddp", "--resume", folder=tmp_path)
    assert output.count("step     8 of 8") == 1
    streamed, ddp = json.loads((tmp_path / "out" / "gpt.json").read_text())["runs"]
    assert (streamed["row"], ddp["row"]) == ("streamed_sparse_loco", "ddp")
    for run in (streamed, ddp):
        assert [point["steps"] for point in run["points"]] == [4, 8]
        assert run["points"][1]["loss"] < run["points"][0]["loss"] < 5
    assert 1000 < 50 * streamed["points"][1]["sent_bytes"] < ddp["points"][1]["sent_bytes"]
    assert re.search(r"^ddp +8 ", output, re.MULTILINE) and (tmp_path / "out" / "gpt.png").exists()
