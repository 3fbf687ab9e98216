"""Loggers that follow the lead, of both Lightning packages and without a training: held, written, dropped, put away."""

import copy
import csv
import importlib
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_sparsecomm.frontends.leading_loggers import LeadingLoggers
from lightning_sparsecomm.frontends.packages import TRAINERS

KINDS = ["CSVLogger", "TensorBoardLogger"]


def logger_of(package: str, kind: str, folder: Path, version: str | None = "run") -> Any:
    return getattr(importlib.import_module(f"{package}.loggers"), kind)(folder, "logs", version)


def leading(*loggers: Any) -> LeadingLoggers:
    trainer: Any = SimpleNamespace(loggers=list(loggers))
    return LeadingLoggers(trainer)


def rows(folder: Path, version: str = "run") -> list[dict[str, str]]:
    with open(folder / "logs" / version / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("package", TRAINERS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_still_what_it_was(package: str, kind: str, tmp_path: Path) -> None:
    logger = logger_of(package, kind, tmp_path)
    own = type(logger)
    leading(logger)
    leading(logger)
    assert isinstance(logger, own)
    assert (type(logger).__name__, type(logger).__mro__[1]) == (kind, own)
    assert (logger.name, logger.version) == ("logs", "run")
    assert type(copy.deepcopy(logger)) is type(pickle.loads(pickle.dumps(logger))) is own
    assert isinstance(logger.experiment, importlib.import_module(f"{package}.loggers.logger").DummyExperiment)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", TRAINERS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_before_the_lead_is_known_is_written_or_dropped(package: str, kind: str, tmp_path: Path) -> None:
    for leads in (True, False):
        folder = tmp_path / str(leads)
        logger = logger_of(package, kind, folder, None)
        loggers = leading(logger)
        given = {"width": 3}
        logger.log_hyperparams(given)
        given["width"] = 4
        logger.log_metrics({"early": 1.0}, step=0)
        cached = logger.experiment
        loggers.settle(leads)
        logger.log_metrics({"late": 2.0}, 1)
        cached.log_metrics({"own": 3.0}, 2) if kind == "CSVLogger" else cached.add_scalar("own", 3.0, 2)
        logger.save()
        logger.finalize("success")
        assert folder.exists() is leads
        if leads:
            assert "width: 3" in (folder / "logs" / "version_0" / "hparams.yaml").read_text()
        if leads and kind == "CSVLogger":
            assert [(row["step"], row["early"], row["late"], row["own"]) for row in rows(folder, "version_0")] == [
                ("0", "1.0", "", ""),
                ("1", "", "2.0", ""),
                ("2", "", "", "3.0"),
            ]


@pytest.mark.parametrize("package", TRAINERS)
def test_a_replica_that_takes_the_lead_adds_to_the_file_with_its_own_hyperparameters(
    package: str, tmp_path: Path
) -> None:
    former, later = (logger_of(package, "CSVLogger", tmp_path) for _ in range(2))
    first, second = leading(former), leading(later)
    former.log_hyperparams({"width": 1})
    later.log_hyperparams({"width": 2})
    first.settle(True)
    second.settle(False)
    for logger, width in ((former, 1), (later, 2)):
        logger.log_hyperparams({"depth": width})
        logger.log_metrics({"loss": width}, 0)
        logger.save()
    former.log_metrics({"waits": 5}, 1)
    # The lead changes, and changes back.
    second.settle(True)
    later.log_metrics({"accuracy": 7}, 2)
    later.save()
    assert (tmp_path / "logs" / "run" / "hparams.yaml").read_text().split() == ["depth:", "2", "width:", "2"]
    first.settle(False)
    second.settle(False)
    former.log_metrics({"loss": 8}, 3)
    later.log_metrics({"loss": 8}, 3)
    first.settle(True)
    former.log_metrics({"loss": 9}, 4)
    former.save()
    found = [{name: value for name, value in row.items() if value} for row in rows(tmp_path)]
    assert found == [
        {"loss": "1", "step": "0"},
        {"accuracy": "7", "step": "2"},
        {"waits": "5", "step": "1"},
        {"loss": "9", "step": "4"},
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_numbers_its_versions_takes_a_new_number_with_the_lead(kind: str, tmp_path: Path) -> None:
    former, later = (logger_of(TRAINERS[0], kind, tmp_path, None) for _ in range(2))
    first, second = leading(former), leading(later)
    # As for a ModelCheckpoint's folder, or a progress bar.
    assert (former.version, later.version) == (0, 0)
    first.settle(True)
    second.settle(False)
    second.settle(True)
    assert (former.version, later.version) == (0, 1)
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["version_0", "version_1"]


def test_a_users_own_methods_and_parts_of_an_experiment_follow_too() -> None:
    """Of a logger that knows nothing of ranks."""
    written: list[Any] = []

    class Run:
        def __init__(self) -> None:
            written.append("a run")
            self.config: dict[str, Any] = {}
            self.tags: list[str] = []

    class Own(importlib.import_module(f"{TRAINERS[0]}.loggers").Logger):  # type: ignore[misc]
        name = version = "own"
        run: Run | None = None

        @property
        def experiment(self) -> Run:
            self.run = self.run or Run()
            return self.run

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            written.append((metrics, step))

        def log_hyperparams(self, params: Any, *args: Any) -> None:
            written.append(params)

        def log_figure(self, name: str) -> str:
            written.append(name)
            return "done"

    logger = Own()
    loggers = leading(logger)
    experiment = logger.experiment
    experiment.config["rate"] = 1
    experiment.tags.append("early")
    assert logger.log_figure(name="first") is None
    loggers.settle(True)
    assert written == ["a run", "first"]
    assert (logger.experiment.config, experiment.tags) == ({"rate": 1}, ["early"])
    assert logger.log_figure("second") == "done"
    loggers.settle(False)
    logger.experiment.tags.append("not led")
    assert logger.log_figure("third") is None
    logger.log_metrics({"loss": 1.0})
    assert written == ["a run", "first", "second"]
    assert experiment._find().tags == ["early"]


def test_hyperparameters_that_a_logger_refuses_do_not_end_the_replica() -> None:
    class Refusing(importlib.import_module(f"{TRAINERS[0]}.loggers").Logger):  # type: ignore[misc]
        name = version = "refusing"

        def log_hyperparams(self, params: Any, *args: Any) -> None:
            raise ValueError("changed in this run")

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            raise ValueError("no metrics")

    for call, ends in (("log_hyperparams", False), ("log_metrics", True)):
        logger = Refusing()
        loggers = leading(logger)
        getattr(logger, call)({"width": 1})
        with pytest.raises(ValueError, match="no metrics") if ends else pytest.warns(match="changed in this run"):
            loggers.settle(True)
