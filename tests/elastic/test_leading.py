"""One run of several replicas, whichever leads: one log, one folder of checkpoints, nothing twice."""

import csv
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.cli import LightningArgumentParser, SaveConfigCallback
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lightning_sparsecomm import methods
from lightning_sparsecomm.frontends.recorder import CompressionReport
from tests.elastic.replicas import Replica, lighthouse, needs_torchft, replicas
from tests.elastic.test_elastic_training import altered, together
from tests.elastic.training import Model, die_in_round, equal, slowed, stop_at, train, wait_for_the_start

pytestmark = [needs_torchft, pytest.mark.timeout(300)]

DILOCO = methods.diloco(every=5, outer_lr=0.5)

CHECKPOINTS: dict[str, Any] = {"filename": "{step}", "save_last": True, "every_n_train_steps": 5}


class Logged(Model):
    """It logs which replica it is, by Lightning and by itself."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # TensorBoard draws graphs by it.
        warnings.filterwarnings("ignore", message=".torch.jit.trace(_method)?. is deprecated")
        # Lightning saves arguments by it.
        warnings.filterwarnings("ignore", message=r"\s*skip_none parameter was deprecated")
        self.seed = args[1]
        self.save_hyperparameters({"seed": self.seed})
        self.example_input_array = torch.zeros(1, 6)

    def forward(self, batch: Tensor) -> Tensor:
        return self.network(batch)  # type: ignore[no-any-return]

    def on_fit_start(self) -> None:
        assert isinstance(self.loggers[0], CSVLogger)
        self.own = self.loggers[0].experiment

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("seed", float(self.seed))
        self.log("mean", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.own.log_metrics({"own": self.seed}, self.trainer.fit_loop.epoch_loop._batches_that_stepped)
        return loss


class Late(pl.Callback):
    """Where it does not lead, a replica saves after the leader: it finds what that has written."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step % 5 == 0 and not trainer.strategy.turns.leads:  # type: ignore[attr-defined]
            time.sleep(0.05)


def config() -> SaveConfigCallback:
    """As LightningCLI has it."""
    parser = LightningArgumentParser()
    parser.add_argument("--width", default=16)
    return SaveConfigCallback(parser, parser.parse_args([]))


def options(folder: Path, version: str | None = "run", **more: Any) -> dict[str, Any]:
    """Options of `train`: loggers, and a ModelCheckpoint whose folder is the first logger's."""
    loggers = [CSVLogger(folder, "csv", version), TensorBoardLogger(folder, "tb", version, log_graph=True)]
    callbacks = [ModelCheckpoint(**CHECKPOINTS), LearningRateMonitor("step"), config(), CompressionReport(), Late()]
    given = {"logger": loggers, "callbacks": callbacks, "log_every_n_steps": 1, "enable_checkpointing": True}
    return {"kind": Logged, **given, **more}


def logged(folder: Path, name: str, version: str = "run") -> list[tuple[int, float]]:
    """Steps and values of a metric, in the order of the file."""
    with open(folder / "csv" / version / "metrics.csv", newline="") as file:
        return [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row[name]]


def events(folder: Path, name: str) -> list[int]:
    """The steps of a metric, as TensorBoard reads them."""
    reader = EventAccumulator(str(folder / "tb" / "run"))
    reader.Reload()
    return [event.step for event in reader.Scalars(name)]


def checkpoints_of(folder: Path, version: str = "run") -> set[str]:
    return {path.name for path in (folder / "csv" / version / "checkpoints").iterdir() if path.suffix == ".ckpt"}


def test_one_that_joins_does_not_take_the_lead_and_there_is_one_run(tmp_path: Path) -> None:
    given = options(tmp_path)
    with lighthouse() as address, replicas() as start:
        b = start(train, address, "b", 1, DILOCO, (12, 43), **given)
        assert b.hear() == 12
        # Its name sorts first: it would lead if both had begun together.
        a = start(train, address, "a", 0, DILOCO, before=wait_for_the_start, **given)
        assert a.hear() == "ready"
        a.say("go on")
        b.say("go on")
        assert b.hear() == 43
        b.kill()
        assert a.hear()["steps"] == 60
    # b was killed amid its step 43. In the optimizer's step 45, a took the lead: what comes before in it is not logged.
    steps = [*range(42), *range(44, 60)]
    assert logged(tmp_path, "seed") == [(step, float(step < 42)) for step in steps]
    assert logged(tmp_path, "own") == [(step, float(step < 42)) for step in steps if step != 44]
    assert [step for step, _ in logged(tmp_path, "lr-AdamW")] == [step for step in steps if step != 44]
    assert [step for step, _ in logged(tmp_path, "mean")] == list(range(9, 60, 10))
    assert events(tmp_path, "seed") == steps
    assert checkpoints_of(tmp_path) == {"last.ckpt", "step=60.ckpt"}
    files = {path.name for path in (tmp_path / "csv" / "run").iterdir()}
    assert files > {"metrics.csv", "hparams.yaml", "config.yaml", "checkpoints", "report.html"}
    assert [path.name for path in (tmp_path / "csv").iterdir()] == ["run"]
    assert "seed: 0" in (tmp_path / "csv" / "run" / "hparams.yaml").read_text()


def test_a_replica_that_never_leads_leaves_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with lighthouse() as address, replicas() as start:
        started = together(start, address, DILOCO, {}, "ab", **options(tmp_path, None, max_epochs=2))
        assert [replica.hear()["steps"] for replica in started] == [20, 20]
    assert [path.name for kind in ("csv", "tb") for path in (tmp_path / kind).iterdir()] == ["version_0"] * 2
    assert logged(tmp_path, "seed", "version_0") == [(step, 0.0) for step in range(20)]
    assert checkpoints_of(tmp_path, "version_0") == {"last.ckpt", "step=20.ckpt"}
    assert len(list(tmp_path.rglob("config.yaml"))) == 1
    # One has written its report.
    assert capfd.readouterr().out.count("report.html: loss by bytes and time") == 1


@pytest.mark.slow
@pytest.mark.parametrize("version", ["run", None])
def test_the_leader_is_killed(version: str | None, tmp_path: Path) -> None:
    """With a version, those that are left go on in its folder. Without, the next leader begins one of its own."""
    given = options(tmp_path, version)
    with lighthouse() as address, replicas() as start:
        a, b, c = together(start, address, DILOCO, {"a": stop_at(23)}, **given)
        assert a.hear() == 23
        a.kill()
        assert [b.hear()["steps"], c.hear()["steps"]] == [60, 60]
    earlier, later = ("run", "run") if version else ("version_0", "version_1")
    rows = logged(tmp_path, "seed", later)
    assert {path.name for path in (tmp_path / "csv").iterdir()} == {earlier, later}
    assert {path.name for path in (tmp_path / "tb").iterdir()} == {earlier, later}
    if version:
        # What the dead leader had written stays. It waited amid a step, and the next meeting was after step 25.
        assert rows == [(step, 0.0) for step in range(22)] + [(step, 1.0) for step in range(24, 60)]
        assert events(tmp_path, "seed") == [step for step, _ in rows]
    else:
        assert logged(tmp_path, "seed", earlier) == [(step, 0.0) for step in range(22)]
        assert rows == [(step, 1.0) for step in range(24, 60)]
        assert checkpoints_of(tmp_path, earlier) == {"last.ckpt", "step=20.ckpt"}
    assert checkpoints_of(tmp_path, later) == {"last.ckpt", "step=60.ckpt"}
    assert "seed: 1" in (tmp_path / "csv" / later / "hparams.yaml").read_text()
    folder = tmp_path / "csv" / later / "checkpoints"
    assert torch.load(folder / "last.ckpt", weights_only=False)["global_step"] == 60
    with lighthouse() as address, replicas() as start:
        more = {"callbacks": [ModelCheckpoint(folder, **CHECKPOINTS)], "enable_checkpointing": True, "max_epochs": 7}
        assert start(train, address, "d", 3, DILOCO, ckpt_path="last", **more).hear()["steps"] == 70
    # As Lightning has it, what a run resumed from is kept, but for the last one, which is written anew.
    assert checkpoints_of(tmp_path, later) == {"last.ckpt", "step=70.ckpt"}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["exchange", "vote", "landed"])
def test_the_leader_is_killed_with_exchanges_in_flight(place: str, tmp_path: Path) -> None:
    """Replicas meet after steps 7, 14, 21 and 28, and use what was in flight two steps later."""
    dies = stop_at(30) if place == "landed" else die_in_round(4, place)
    method = methods.diloco(every=7, outer_lr=0.5, delay=2)
    with lighthouse() as address, replicas() as start:
        a, b, c = together(start, address, method, {"a": dies}, **options(tmp_path))
        if place == "landed":
            assert a.hear() == 30
            a.kill()
        results = [b.hear(), c.hear()]
    assert equal(results)
    rows = logged(tmp_path, "seed")
    steps = [step for step, value in rows if value == 0]
    # What was lost in flight is taken back where it would have landed, in a meeting of those that are left. What has
    # landed is not: they meet when they would have.
    assert steps == list(range(len(steps)))
    assert len(steps) == 29 if place == "landed" else 27 <= len(steps) <= 29
    assert rows[len(steps) :] == [(step, 1.0) for step in range(34 if place == "landed" else 29, 60)]
    assert (found := events(tmp_path, "seed")) == sorted(set(found))
    assert checkpoints_of(tmp_path) == {"last.ckpt", "step=60.ckpt"}


def stop_until(a: Replica, b: Replica, step: int) -> None:
    """Stops one replica (SIGSTOP) at step 12 until the other one has made its step `step`; then both go on."""
    assert a.hear() == 12
    os.kill(a.process.pid, signal.SIGSTOP)
    assert b.hear() == step
    os.kill(a.process.pid, signal.SIGCONT)
    a.say("go on")
    b.say("go on")


@pytest.mark.slow
def test_a_leader_that_was_stopped_for_long_leads_no_more(tmp_path: Path) -> None:
    """It goes on by its own count, and is behind: the other logs on."""
    with lighthouse() as address, replicas() as start:
        stops = {"a": stop_at(12), "b": stop_at(30)}
        a, b = together(start, address, DILOCO, stops, "ab", **options(tmp_path))
        stop_until(a, b, 30)
        results = [a.hear(), b.hear()]
    assert results[0]["steps"] < results[1]["steps"] == 60
    # Until it met the other one, it could not know: these steps are before those that the other one has logged.
    assert sorted(logged(tmp_path, "seed")) == [(step, float(step >= 14)) for step in range(60)]
    assert checkpoints_of(tmp_path) == {"last.ckpt", "step=60.ckpt"}


@pytest.mark.slow
def test_one_that_wakes_after_the_end_writes_nothing(tmp_path: Path) -> None:
    """The lighthouse tells it that the others have ended the run."""
    given = options(tmp_path)
    given["callbacks"].append(ModelCheckpoint(tmp_path / "failed", every_n_train_steps=1000, save_on_exception=True))
    with lighthouse() as address, replicas() as start:
        a, b, c = together(start, address, DILOCO, {"a": stop_at(12)}, **given)
        assert a.hear() == 12
        os.kill(a.process.pid, signal.SIGSTOP)
        assert [b.hear()["steps"], c.hear()["steps"]] == [60, 60]
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        os.kill(a.process.pid, signal.SIGCONT)
        a.say("go on")
        with pytest.raises(AssertionError, match="have ended the run after 60 steps, while this one was away after 14"):
            a.hear()
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    rows = logged(tmp_path, "seed")
    # Until it met the lighthouse, it could not know, and had led.
    assert sorted(rows) == [(step, float(step >= 14)) for step in range(60)]
    changed = {path.name for path in after if after[path] != before.get(path)}
    assert changed <= {"metrics.csv"} | {path.name for path in after if path.name.startswith("events.")}
    folder = tmp_path / "csv" / "run" / "checkpoints"
    assert torch.load(folder / "last.ckpt", weights_only=False)["global_step"] == 60


@pytest.mark.slow
def test_one_whose_others_are_lost_while_it_is_away_goes_on(tmp_path: Path) -> None:
    with lighthouse() as address, replicas() as start:
        a, b = together(start, address, DILOCO, {"a": stop_at(12), "b": stop_at(30)}, "ab", **options(tmp_path))
        assert a.hear() == 12
        os.kill(a.process.pid, signal.SIGSTOP)
        assert b.hear() == 30
        b.kill()
        os.kill(a.process.pid, signal.SIGCONT)
        a.say("go on")
        assert a.hear()["steps"] == 60
    # The one that was lost can remove no more what it had saved.
    assert checkpoints_of(tmp_path) == {"last.ckpt", "step=30.ckpt", "step=60.ckpt"}


@pytest.mark.slow
def test_one_that_is_behind_and_left_alone_repeats_no_step(tmp_path: Path) -> None:
    with lighthouse() as address, replicas() as start:
        stops = {"a": stop_at(12), "b": altered(slowed(0.02), stop_at(20), stop_at(38))}
        a, b = together(start, address, DILOCO, stops, "ab", **options(tmp_path))
        stop_until(a, b, 20)
        assert b.hear() == 38
        b.kill()
        steps = a.hear()["steps"]
    # It ends with its model's step 60. The other one may have logged up to step 40, before the next exchange.
    assert 39 < steps < 60
    expected = [(step, 0.0) for step in range(14)] + [(step, 1.0) for step in range(14, 37)]
    assert sorted(logged(tmp_path, "seed")) == expected + [(step, 0.0) for step in range(39, steps)]


@pytest.mark.slow
def test_each_replica_logs_where_that_is_wanted(tmp_path: Path) -> None:
    with lighthouse() as address, replicas() as start:
        given = options(tmp_path, None, max_epochs=2, log_each_replica=True)
        given["callbacks"] = given["callbacks"][:1]
        for replica in together(start, address, DILOCO, {}, "ab", **given):
            replica.hear()
    found = {tuple(logged(tmp_path, "seed", path.name)) for path in (tmp_path / "csv").iterdir()}
    assert found == {tuple((step, float(seed)) for step in range(20)) for seed in (0, 1)}
