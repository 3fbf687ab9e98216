"""The page of recorded runs, and the callback and the command that write it."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sparsecomm import CompressionReport, methods
from lightning_sparsecomm.basis.ledger import OURS
from lightning_sparsecomm.commands import main
from lightning_sparsecomm.report import Point, Run, page, write_report
from lightning_sparsecomm.report.chart import Axis, Line, _Scale, chart, plain, size
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy

VOID = {"meta", "br"}


class Strict(HTMLParser):
    """Every tag is closed in order, and nothing is loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(text: str) -> Strict:
    parser = Strict()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    for drawing in re.findall(r"<svg.*?</svg>", text):
        ElementTree.fromstring(drawing)
    return parser


def a_run(name: str, points: int = 3) -> Run:
    values = {"density": 0.1, "residual_norm": 2.0, "bytes_sent": 50.0, "exchange_share": 0.5, "seconds_wait": 0.25}
    return Run(
        name,
        "SGD by dgc(density=0.1)",
        4,
        [Point(step, step / 10, 1 / step, 1000.0 * step, values) for step in range(1, points + 1)],
        {"gradients": (3, 1000.0, 3000.0), "DDP set-up": (1, 10.0, 5.0)},
        9000.0,
        {"accuracy": 0.75},
    )


def test_a_page_of_two_runs() -> None:
    text = page([a_run("ddp"), a_run("a <b> & 'c'")])
    tags = checked(text).tags
    assert tags.count("svg") == 6
    assert tags.count("polyline") == 12
    assert "a &lt;b&gt; &amp; &#x27;c&#x27;" in text
    assert "<b>" not in text
    for shown in ("0.75", "3 kB", "3.0 ×", "0.3 s", "250.00", "gradients", "DDP set-up", "SGD by dgc(density=0.1)"):
        assert shown in text


@pytest.mark.parametrize("points", [0, 1, 2, 500])
def test_a_page_of_any_number_of_points(points: int) -> None:
    checked(page([a_run("run", points)]))


def test_a_line_is_where_its_numbers_are() -> None:
    x, y = Axis("x", plain, logarithmic=True), Axis("y", plain)
    text = chart(
        "title", x, y, [Line("line", "#000", [(1, 0), (10, 5), (100, 10), (None, 3), (-1, 3), (5, float("nan"))])]
    )
    (found,) = re.findall(r'<polyline points="([^"]*)"', text)
    places = [tuple(map(float, pair.split(","))) for pair in found.split()]
    # From left to right in equal steps, and from the bottom upwards.
    assert [place[0] for place in places] == [62, (62 + 446) / 2, 446]
    assert [place[1] for place in places] == [236, (236 + 12) / 2, 12]
    assert re.findall(r">([\d.]+)</text>", text) == [
        *("0", "2", "4", "6", "8", "10"),
        *("1", "2", "5", "10", "20", "50", "100"),
    ]


def test_a_chart_of_one_number_and_of_none() -> None:
    axis = Axis("x", plain)
    assert "polyline" in chart("title", axis, axis, [Line("line", "#000", [(3, 3)])])
    assert "Nothing was recorded." in chart("title", axis, axis, [Line("line", "#000", [(None, None)])])


def test_numbers() -> None:
    assert [plain(value) for value in (0, 0.00012345, 12.345, 4567.8)] == ["0", "0.000123", "12.3", "4,568"]
    assert [size(value) for value in (0, 999, 1_234, 5.6e7, 7e9, 8e12)] == [
        "0 B",
        "999 B",
        "1.23 kB",
        "56 MB",
        "7 GB",
        "8 TB",
    ]


def test_runs_are_read_as_they_were_written(tmp_path: Path) -> None:
    run = a_run("run")
    run.points.append(Point(4, 0.4, float("nan"), 4000.0, {"density": float("inf")}))
    path = run.save(tmp_path / "new")
    loaded = Run.load(path)
    assert loaded.points[-1] == Point(4, 0.4, None, 4000.0, {"density": None})
    loaded.points[-1] = run.points[-1]
    assert loaded == run
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["run.run.json"]


def test_bytes_after_the_last_point_count() -> None:
    run = a_run("run")
    run.rows["weight updates"] = (1, 500.0, 1500.0)
    assert "<td>4.5 kB</td><td>2.0 ×</td>" in page([run])


def test_a_metric_that_is_not_finite_is_left_out(tmp_path: Path) -> None:
    run = a_run("run")
    run.metrics |= {"perplexity": float("inf"), "size": float("nan")}
    run.save(tmp_path)
    text = write_report(tmp_path).read_text()
    checked(text)
    assert "<td>0.75</td><td>–</td><td>–</td>" in text


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "another"}', '{"format": "lightning_sparsecomm run"}'])
def test_a_damaged_run_is_named(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.run.json").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"sparsecomm: error: {tmp_path / 'broken.run.json'} holds no run that CompressionReport")
    assert said.endswith("Remove it, or name another folder.\n")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run("one").save(tmp_path)
    main(["report", str(tmp_path)])
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    checked((tmp_path / "report.html").read_text())
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "none")])
    assert "none holds no run: no file ends with .run.json. Train with the callback" in capsys.readouterr().err


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.network = nn.Sequential(nn.Linear(6, 80), nn.Tanh(), nn.Linear(80, 4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.current_epoch == 7:
            raise RuntimeError("stopped")
        return self.network(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("size", self.network(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(
    strategy: Any, report: CompressionReport, epochs: int = 2, resume: Path | None = None, **options: Any
) -> None:
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=epochs,
        callbacks=[report],
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"logger": False, "enable_checkpointing": False, **options},
    )
    batches = torch.randn(4 * 2 * 10, 6, generator=torch.Generator().manual_seed(3))
    trainer.fit(Model(), DataLoader(batches, batch_size=4), DataLoader(batches, batch_size=8), ckpt_path=resume)


def test_two_trainings_in_one_folder(tmp_path: Path) -> None:
    for strategy in ("ddp_fork", "sparsecomm_sbc_fork"):
        train(strategy, CompressionReport(tmp_path, every=2))
    checked((tmp_path / "report.html").read_text())
    ddp, sbc = (Run.load(next(tmp_path.glob(f"{name}*.run.json"))) for name in ("ddp", "sbc"))
    assert [point.step for point in ddp.points] == list(range(2, 21, 2))
    # It exchanges every ten steps.
    assert [point.step for point in sbc.points] == [10, 20]
    elements = 6 * 80 + 80 + 80 * 4 + 4
    assert ddp.points[-1].sent_bytes == 20 * 4 * elements == ddp.ddp_link_bytes == sbc.ddp_link_bytes
    assert 0 < sbc.points[-1].sent_bytes < ddp.ddp_link_bytes / 20
    assert ddp.rows["gradients"][0] == 20
    losses = [point.loss for run in (ddp, sbc) for point in run.points]
    assert all(loss is not None and 0 < loss < 1 for loss in losses)
    assert ddp.points[0].loss > ddp.points[-1].loss  # type: ignore[operator]
    assert ddp.metrics.keys() == sbc.metrics.keys() == {"size"}
    assert sbc.strategy.startswith("2 ranks, SGD by sbc(")


def test_the_last_batches_are_a_point(tmp_path: Path) -> None:
    train("ddp_fork", CompressionReport(tmp_path, every=7), epochs=1)
    assert [point.step for point in Run.load(tmp_path / "ddp.run.json").points] == [7, 10]
    assert "<td>1.0 ×</td>" in (tmp_path / "report.html").read_text()


@pytest.mark.few(3)
@pytest.mark.parametrize("strategy", ["ddp_fork", "sparsecomm_fork"])
@pytest.mark.parametrize("logs", [False, True])
def test_by_default_it_writes_where_lightning_does(tmp_path: Path, strategy: str, logs: bool) -> None:
    """Lightning's log_dir is a collective: all ranks ask for it."""
    logger = CSVLogger(tmp_path, name="run") if logs else False
    train(strategy, CompressionReport(), epochs=1, logger=logger, default_root_dir=tmp_path, log_every_n_steps=5)
    folder = tmp_path / "run" / "version_0" if logs else tmp_path
    checked((folder / "report.html").read_text())
    assert Run.load(folder / f"{strategy.removesuffix('_fork')}.run.json").world_size == 2


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("later", ["sparsecomm_fork", "ddp_fork"])
def test_a_run_that_was_resumed_is_one_of_its_own(tmp_path: Path, later: str) -> None:
    """Its steps go on; its bytes, calls and time are those since it was resumed, whatever the earlier run was."""
    options = {"enable_checkpointing": True, "default_root_dir": tmp_path / "saved"}
    train("sparsecomm_fork", CompressionReport(tmp_path, every=5), **options)
    (saved,) = (tmp_path / "saved").rglob("*.ckpt")
    train(later, CompressionReport(tmp_path, every=5), epochs=5, resume=saved, **options)
    name = f"{later.removesuffix('_fork')} from step 20"
    first, second = Run.load(tmp_path / "sparsecomm.run.json"), Run.load(tmp_path / f"{name}.run.json")
    assert (first.resumed_at, second.resumed_at) == (0, 20)
    assert [point.step for point in second.points] == list(range(25, 51, 5))
    # It makes 30 steps, and the earlier one made 20.
    assert second.ddp_link_bytes == 1.5 * first.ddp_link_bytes
    sent = sum(link for row, (_, _, link) in second.rows.items() if row in OURS)
    assert second.points[-1].sent_bytes == pytest.approx(sent)
    if later == "ddp_fork":
        assert sent == second.ddp_link_bytes
    else:
        assert sent < 2.5 * first.rows["gradients"][2]
    page = (tmp_path / "report.html").read_text()
    assert "<td>20 to 50</td>" in page
    assert "resumed after step 20; its bytes and time begin there" in page


def test_runs_of_one_method_stand_side_by_side(tmp_path: Path) -> None:
    for density in (0.1, 0.5, 0.5):
        method = methods.dgc(density, warmup_steps=0)
        train(SparseCommStrategy(method, start_method="fork"), CompressionReport(tmp_path), epochs=1)
    names = {path.name for path in tmp_path.glob("*.run.json")}
    call = "dgc(density={}, warmup_steps=0){}.run.json"
    assert names == {call.format(*each) for each in ((0.1, ""), (0.5, ""), (0.5, " 2"))}
    page = (tmp_path / "report.html").read_text()
    checked(page)
    assert "dgc(density=0.5, warmup_steps=0) 2" in page


def test_a_name_that_the_user_gives_twice_is_replaced_with_a_warning(tmp_path: Path) -> None:
    train("sparsecomm_fork", CompressionReport(tmp_path, "mine"), epochs=1)
    with pytest.raises(Exception, match=r"UserWarning: .*mine\.run\.json is replaced by this run\. To keep both"):
        train("sparsecomm_fork", CompressionReport(tmp_path, "mine"), epochs=1)


def test_a_run_that_fails_is_written_up_to_the_last_epoch(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="stopped"):
        train("sparsecomm_fork", CompressionReport(tmp_path, "failed"), epochs=9)
    assert Run.load(tmp_path / "failed.run.json").points[-1].step == 70
    assert json.loads((tmp_path / "failed.run.json").read_text())["world_size"] == 2


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_first_batch(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Exception, match=r"folder must be one that .* can write to; .*Give another\."):
        train("sparsecomm_fork", CompressionReport(tmp_path / "file"))


def test_a_damaged_neighbour_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "other.run.json").touch()
    with pytest.raises(Exception, match=r"UserWarning: the report was not written: .*other.run.json holds no run"):
        train("sparsecomm_fork", CompressionReport(tmp_path))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"name": "a/b"}, "name must be letters, .* as it names a file; got 'a/b'"),
        ({"every": 0}, "every must be a whole number of batches, at least 1; got 0"),
    ],
)
def test_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        CompressionReport(**options)


@pytest.mark.slow
def test_a_browser_draws_it(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs chromium: apt-get install chromium")
    for name in ("ddp", "dgc"):
        a_run(name, 30).save(tmp_path)
    path, picture = write_report(tmp_path), tmp_path / "page.png"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
    command += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={tmp_path / 'user'}"]
    command += ["--window-size=1100,1800", f"--screenshot={picture}", path.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    from matplotlib.image import imread

    pixels = imread(picture)[..., :3]
    for color in ((0x25, 0x63, 0xEB), (0xDC, 0x68, 0x03)):
        wanted = torch.tensor(color) / 255
        assert int(((torch.tensor(pixels) - wanted).abs().amax(-1) < 0.02).sum()) > 500


@pytest.mark.parametrize("ends", [(0.58, 1.0), (31e3, 52e3), (0.001, 1.0), (3.0, 3.0)])
def test_a_logarithmic_axis_has_at_least_three_numbers(ends: tuple[float, float]) -> None:
    scale = _Scale(Axis("density", plain, logarithmic=True), ends, 0, 100)
    ticks = scale.ticks()
    assert 3 <= len(ticks) <= 12
    assert all(-1e-6 <= scale(tick) <= 100 + 1e-6 for tick in ticks)


@pytest.mark.parametrize("values", [[1e17], [1e17, 1e17], [-3e300], [0.0], [2.5]])
def test_a_constant_has_an_axis(values: list[float]) -> None:
    scale = _Scale(Axis("loss", plain), values, 0.0, 100.0)
    assert len(scale.ticks()) > 1
    assert 0 <= scale(values[0]) <= 100
