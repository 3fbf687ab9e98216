"""CompressionMonitor: what it logs, shows and prints, against figures from the tensors' sizes. And other callbacks."""

import csv
import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sparsecomm import (
    CompressionMonitor,
    CompressionReport,
    Ledger,
    ParameterAveraging,
    SparseCommStrategy,
    SparsityWarmup,
)
from lightning_sparsecomm.frontends.monitor import summary_table
from lightning_sparsecomm.methods import dense, gradient_dropping
from lightning_sparsecomm.sharing import Method

PACKAGES = ["pytorch_lightning", "lightning.pytorch"]

# 6 x 8 + 8 and 8 x 4 + 4 parameters.
WEIGHTS, BIASES = 48 + 32, 8 + 4
PARAMETERS = WEIGHTS + BIASES
BATCHES = 10


def sparse_bytes(elements: int, value_bytes: int = 4) -> int:
    """An envelope of 16 bytes, a byte of room for a map of up to 8 tensors, a head of 16, positions, values: as in
    docs/formats.md."""
    return 16 + 1 + 16 + elements * (2 + value_bytes)


class _Training:
    def __init__(self, optimizers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.several = optimizers
        self.automatic_optimization = optimizers == 1

    def training_step(self: Any, batch: Tensor, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.network(batch).square().mean()
        for index, optimizer in enumerate(self.optimizers()):
            # The second steps in every other batch only.
            if index <= batch_idx % 2:
                optimizer.zero_grad()
                self.manual_backward(self.network(batch).square().mean())
                optimizer.step()
        return None

    def configure_optimizers(self: Any) -> Any:
        if self.several == 1:
            return torch.optim.SGD(self.parameters(), lr=0.1)
        return [torch.optim.SGD(self.network[part].parameters(), lr=0.1) for part in (0, 2)]


class _Calls:
    """How often each collective of torch is called while training, on rank 0."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.counts: dict[str, int] = {}
        for name in ("all_reduce", "broadcast", "barrier", "all_gather_object", "broadcast_object_list", "all_gather"):
            self._count(name, getattr(dist, name))
        for name in ("all_gather_single", "all_gather_into_tensor"):
            if hasattr(dist, name):
                self._count(name, getattr(dist, name))

    def _count(self, name: str, collective: Any) -> None:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] = self.counts.get(name, 0) + 1
            return collective(*args, **kwargs)

        setattr(dist, name, counted)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        ledger = trainer.strategy.ledger
        found = {
            "calls": self.counts,
            "rows": {row: {kind: t.calls for kind, t in traffic.items()} for row, traffic in ledger.rows.items()},
            "callback_metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
            "progress_bar_metrics": {k: float(v) for k, v in trainer.progress_bar_metrics.items()},
            "residual_norm": trainer.strategy.engine.residual_norm(),
            "link_bytes": ledger.link_bytes(),
            "exchange_seconds": ledger.exchange_seconds,
        }
        if trainer.is_global_zero:
            torch.save(found, self.file)


def fit(
    package: str,
    tmp_path: Path,
    method: Method,
    monitor: Any = True,
    logger: Any = False,
    devices: int = 2,
    optimizers: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Trains in forked processes; what rank 0 found."""
    lightning = importlib.import_module(package)
    strategy = importlib.import_module(f"lightning_sparsecomm.strategies.{package}").SparseCommStrategy
    calls = type("Calls", (_Calls, lightning.Callback), {})(tmp_path / "found.pt")
    trainer = lightning.Trainer(
        strategy=strategy(method, start_method="fork"),
        accelerator="cpu",
        devices=devices,
        logger=logger,
        callbacks=[calls, *([CompressionMonitor(summary=False) if monitor is True else monitor] if monitor else [])],
        **{
            "log_every_n_steps": 1,
            "max_epochs": 1,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        },
    )
    model = type("Model", (_Training, lightning.LightningModule), {})(optimizers)
    trainer.fit(model, DataLoader(torch.randn(4 * devices * BATCHES, 6), batch_size=4))
    return torch.load(tmp_path / "found.pt")


def rows_of(folder: Path) -> list[dict[str, float]]:
    """What CSVLogger wrote; an entry for each step that it was called for."""
    (file,) = folder.rglob("metrics.csv")
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    return [{name: float(value) for name, value in row.items() if value} for row in rows]


PHASES = ("update", "select", "encode", "wait", "decode")
NAMES = {
    f"sparsecomm/{name}"
    for name in (
        *("bytes_sent", "bytes_received", "bytes_sent_total", "compression_ratio", "density", "residual_norm"),
        *("exchange_seconds", "exchange_share", *(f"seconds_{name}" for name in PHASES)),
    )
}


@pytest.mark.parametrize("package", PACKAGES)
def test_csv_logger(package: str, tmp_path: Path) -> None:
    logger = importlib.import_module(f"{package}.loggers").CSVLogger(tmp_path)
    found = fit(package, tmp_path, gradient_dropping(0.25, follow_rate=False), logger=logger)
    rows = rows_of(tmp_path)
    assert len(rows) == BATCHES
    sent = PARAMETERS // 4
    for row in rows:
        assert row.keys() - {"epoch", "step"} == NAMES
        # With two processes an all-gather sends each byte once, and so does an all-reduce.
        assert row["sparsecomm/bytes_sent"] == row["sparsecomm/bytes_received"] == sparse_bytes(sent)
        assert row["sparsecomm/compression_ratio"] == pytest.approx(4 * PARAMETERS / sparse_bytes(sent))
        assert row["sparsecomm/density"] == pytest.approx(sent / PARAMETERS)
        assert row["sparsecomm/residual_norm"] > 0
        phases = [row[f"sparsecomm/seconds_{name}"] for name in PHASES]
        assert min(phases) > 0
        assert row["sparsecomm/exchange_seconds"] == pytest.approx(sum(phases), rel=1e-5)
        assert 0 < row["sparsecomm/exchange_share"] < 1
    totals = [row["sparsecomm/bytes_sent_total"] for row in rows]
    assert totals == [sparse_bytes(sent) * (step + 1) for step in range(BATCHES)]
    assert rows[-1]["sparsecomm/residual_norm"] == pytest.approx(found["residual_norm"], rel=1e-5)
    assert sum(row["sparsecomm/bytes_sent"] for row in rows) == found["link_bytes"]
    assert sum(row["sparsecomm/exchange_seconds"] for row in rows) == pytest.approx(found["exchange_seconds"], rel=1e-4)
    ratio = 4 * PARAMETERS / sparse_bytes(sent)
    assert found["progress_bar_metrics"] == {"sparsecomm/ratio": pytest.approx(ratio)}
    assert found["callback_metrics"]["sparsecomm/compression_ratio"] == pytest.approx(ratio)
    assert found["callback_metrics"].keys() == NAMES | {"sparsecomm/ratio"}


def test_tensorboard_logger(tmp_path: Path) -> None:
    logger = importlib.import_module("pytorch_lightning.loggers").TensorBoardLogger(tmp_path)
    fit("pytorch_lightning", tmp_path, gradient_dropping(0.25, follow_rate=False), logger=logger)
    (file,) = tmp_path.rglob("events.out.*")
    events = EventAccumulator(str(file.parent)).Reload()
    assert set(events.Tags()["scalars"]) >= NAMES
    scalars = events.Scalars("sparsecomm/bytes_sent")
    assert [scalar.step for scalar in scalars] == list(range(BATCHES))
    assert {scalar.value for scalar in scalars} == {sparse_bytes(PARAMETERS // 4)}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("method", "link", "elements"),
    [
        # Three processes: an all-gather sends to two others, an all-reduce 4/3 of what it is given.
        (gradient_dropping(0.25, values="float16", follow_rate=False), 2 * sparse_bytes(23, 2), 23),
        # The dense part goes with a count for each of its 2 tensors.
        (
            gradient_dropping(0.25, exclude=["*.bias"], follow_rate=False),
            2 * sparse_bytes(WEIGHTS // 4) + 4 / 3 * 4 * (BIASES + 2),
            WEIGHTS // 4 + BIASES,
        ),
        (dense("bfloat16"), 4 / 3 * 2 * PARAMETERS, PARAMETERS),
    ],
)
def test_methods(method: Method, link: float, elements: int, tmp_path: Path) -> None:
    logger = importlib.import_module("pytorch_lightning.loggers").CSVLogger(tmp_path)
    fit("pytorch_lightning", tmp_path, method, logger=logger, devices=3)
    for row in rows_of(tmp_path):
        assert row["sparsecomm/bytes_sent"] == pytest.approx(link)
        assert row["sparsecomm/compression_ratio"] == pytest.approx(4 / 3 * 4 * PARAMETERS / link)
        assert row["sparsecomm/density"] == pytest.approx(elements / PARAMETERS)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"log_every_n_steps": 4}, [3, 7]),
        ({"log_every_n_steps": 2, "accumulate_grad_batches": 2}, [1, 3]),
        ({"log_every_n_steps": 10}, [9]),
    ],
)
def test_entries(options: dict[str, int], steps: list[int], tmp_path: Path) -> None:
    logger = importlib.import_module("pytorch_lightning.loggers").CSVLogger(tmp_path)
    fit("pytorch_lightning", tmp_path, gradient_dropping(0.25, follow_rate=False), logger=logger, **options)
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == steps
    assert all(row["sparsecomm/bytes_sent"] == sparse_bytes(23) for row in rows)


@pytest.mark.few(1)
@pytest.mark.parametrize(("every", "entries"), [(1, 10), (2, 5), (3, 3)])
def test_two_optimizers(every: int, entries: int, tmp_path: Path) -> None:
    """Lightning's loggers count batches; an entry is the mean over both optimizers' steps since the one before."""
    logger = importlib.import_module("pytorch_lightning.loggers").CSVLogger(tmp_path)
    method = gradient_dropping(0.25, follow_rate=False)
    fit("pytorch_lightning", tmp_path, method, logger=logger, optimizers=2, log_every_n_steps=every)
    sizes = [6 * 8 + 8, 8 * 4 + 4]
    rows = rows_of(tmp_path)
    assert len(rows) == entries
    for index, row in enumerate(rows):
        batches = range(index * every, (index + 1) * every)
        stepped = [size for batch in batches for size in sizes[: 1 + batch % 2]]
        sent = sum(sparse_bytes(size // 4) for size in stepped)
        assert row["sparsecomm/bytes_sent"] == pytest.approx(sent / len(stepped))
        assert row["sparsecomm/density"] == pytest.approx(0.25)
        assert row["sparsecomm/compression_ratio"] == pytest.approx(4 * sum(stepped) / sent)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "method",
    [
        gradient_dropping(0.25, follow_rate=False),
        gradient_dropping(0.25, exclude=["*.bias"], follow_rate=False),
        dense(),
    ],
)
def test_no_collective_is_added(method: Method, tmp_path: Path) -> None:
    with_monitor = fit("pytorch_lightning", tmp_path, method, CompressionMonitor())
    without = fit("pytorch_lightning", tmp_path, method, None)
    assert with_monitor["calls"] == without["calls"]
    assert with_monitor["rows"] == without["rows"]
    # Lightning before 2.5.3 tells ranks nothing before each batch.
    if hasattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor"):
        assert with_monitor["calls"]["broadcast"] > 0
    assert sum(with_monitor["rows"]["gradients"].values()) >= BATCHES


def test_switches(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    quiet = CompressionMonitor(progress_bar=False, summary=False)
    found = fit("pytorch_lightning", tmp_path, gradient_dropping(0.25, follow_rate=False), quiet)
    assert found["progress_bar_metrics"] == {}
    assert found["callback_metrics"].keys() == NAMES
    assert "sent by" not in capfd.readouterr().out


@pytest.mark.parametrize("package", PACKAGES)
def test_summary_is_printed_once(package: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fit(package, tmp_path, gradient_dropping(0.25, follow_rate=False), CompressionMonitor())
    out = capfd.readouterr().out
    assert out.count("sent by one rank of 2") == 1
    lines = [line.split() for line in out.splitlines()]
    handed = BATCHES * sparse_bytes(23)
    assert ["gradients", "10", f"{handed / 1e3:.2f}", "kB", f"{handed / 1e3:.2f}", "kB"] in lines
    whole = BATCHES * 4 * PARAMETERS / 1e3
    assert ["gradients,", "had", "it", "been", "ddp", f"{whole:.2f}", "kB", f"{whole:.2f}", "kB"] in lines
    # The model once, at the start.
    assert ["DDP", "set-up", "1", "368", "B", "184", "B"] in lines
    assert f"compression ratio {4 * PARAMETERS / sparse_bytes(23):.1f} over 10 steps, density 0.25" in out


def test_one_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is sent: no ratio, and the table says so."""
    logger = importlib.import_module("pytorch_lightning.loggers").CSVLogger(tmp_path)
    found = fit(
        "pytorch_lightning",
        tmp_path,
        gradient_dropping(0.25, follow_rate=False),
        CompressionMonitor(),
        logger=logger,
        devices=1,
    )
    rows = rows_of(tmp_path)
    assert len(rows) == BATCHES
    for row in rows:
        assert row.keys() - {"epoch", "step"} == NAMES - {"sparsecomm/compression_ratio"}
        assert row["sparsecomm/bytes_sent"] == row["sparsecomm/bytes_received"] == 0
        assert row["sparsecomm/density"] == pytest.approx(0.25)
    assert found["progress_bar_metrics"] == {}
    assert "One process: nothing crosses a network, so nothing is saved." in capfd.readouterr().out


def test_table_of_large_numbers() -> None:
    ledger = Ledger(4)
    ledger.record("gradients", "all_gather", 2_500_000)
    for _ in range(1_000):
        ledger.record("DDP buffers", "broadcast", 7_000)
    ledger.steps, ledger.ddp_bytes = 1_234, 200_000_000_000
    ledger.elements, ledger.sent_elements = 50_000_000_000, 312_500
    ledger.clock.seconds |= {"select": 2.34, "wait": 10.0}
    lines = summary_table(ledger).splitlines()
    assert lines[1].split() == ["gradients", "1", "2.50", "MB", "7.50", "MB"]
    assert lines[2].split() == ["DDP", "buffers", "1,000", "7.00", "MB", "5.25", "MB"]
    assert lines[3].split()[-4:] == ["200.00", "GB", "300.00", "GB"]
    assert "compression ratio 40,000.0 over 1,234 steps, density 6.25e-06, 12.3 s in exchange" in lines
    assert "of these: select 2.3 s, wait 10.0 s" in lines
    assert len({len(line) for line in lines[:4]}) == 1


def test_table_of_nothing() -> None:
    assert "compression ratio" not in summary_table(Ledger(2))
    assert math.isnan(Ledger(2).compression_ratio())
    assert math.isnan(Ledger(2).density())


def test_training_is_not_changed(tmp_path: Path) -> None:
    weights = []
    for monitor in (None, CompressionMonitor()):
        fit(
            "pytorch_lightning",
            tmp_path,
            gradient_dropping(0.25, follow_rate=False),
            monitor,
            max_epochs=2,
            enable_checkpointing=True,
            default_root_dir=tmp_path / str(len(weights)),
        )
        (file,) = (tmp_path / str(len(weights))).rglob("*.ckpt")
        state = torch.load(file, weights_only=False)["state_dict"]
        weights.append(np.concatenate([tensor.numpy().ravel() for tensor in state.values()]))
    assert weights[0].tobytes() == weights[1].tobytes()


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: SparsityWarmup(), ValueError, r"only one of them.*got steps=0, epochs=0\. Give one of them"),
        (lambda: SparsityWarmup(steps=5, shape="linear"), ValueError, "shape must be 'exponential', .*got 'linear'"),  # type: ignore[arg-type]
        (lambda: SparsityWarmup(steps=5, shape=0.5), TypeError, "shape must be a name or a list of .*got 0.5"),  # type: ignore[arg-type]
        (lambda: SparsityWarmup(steps=5, shape=[25, 0.1]), ValueError, r"shape\[0\] must be in \(0, 1\].*got 25\."),
        (lambda: SparsityWarmup(steps=5, shape=["a"]), TypeError, r"shape\[0\] must be a number.*got 'a'"),  # type: ignore[list-item]
        (lambda: ParameterAveraging(every=0), ValueError, "every must be a whole number of optimizer steps.*got 0"),
    ],
)
def test_other_callbacks_refuse_what_cannot_work(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_it_is_a_callback_of_each_package() -> None:
    for package in PACKAGES:
        assert isinstance(CompressionMonitor(), importlib.import_module(package).Callback)
    assert isinstance(CompressionMonitor(), pl.Callback)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: CompressionMonitor(summary="no"), "summary must be True or False; got 'no'"),  # type: ignore[arg-type]
        (lambda: CompressionMonitor(progress_bar=1), "progress_bar must be True or False; got 1"),  # type: ignore[arg-type]
        (lambda: CompressionReport(5), "folder must be a text; got 5"),  # type: ignore[arg-type]
        (lambda: CompressionReport(name=5), "name must be a text; got 5"),  # type: ignore[arg-type]
        (lambda: SparseCommStrategy(uneven_inputs=0), "uneven_inputs must be True or False"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_the_wrong_kind_are_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        make()
