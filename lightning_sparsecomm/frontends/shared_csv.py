"""CSVLoggers of several replicas that add to one file, one after another."""

import csv
import importlib
from typing import Any

from lightning_sparsecomm.frontends.packages import TRAINERS


def begun_by_others(logger: Any) -> None:
    """Makes a CSVLogger add to the file that it finds. By itself it would delete that. Other loggers are left alone."""
    for package in TRAINERS:
        module = importlib.import_module(f"{package}.loggers.csv_logs")
        # A user's own class may have another kind of experiment.
        own = isinstance(logger, module.CSVLogger) and type(logger).experiment is module.CSVLogger.experiment
        if own and logger._experiment is None:
            logger._experiment = _adding(module.ExperimentWriter)(log_dir=logger.log_dir)


def with_others(experiment: Any) -> None:
    """Makes a CSVLogger's writer heed columns that others have added to its file. Other experiments are left alone."""
    for package in TRAINERS:
        writer: Any = importlib.import_module(f"{package}.loggers.csv_logs").ExperimentWriter
        if type(experiment) is writer:
            experiment.__class__ = _adding(writer)


def _adding(writer: Any) -> Any:
    class Adding(writer):  # type: ignore[misc]
        """A writer that takes the columns from the file, which others may have written to."""

        def _check_log_dir_exists(self) -> None:
            """Does nothing: the file is kept."""

        def save(self) -> None:
            if self.metrics and self._fs.isfile(self.metrics_file_path):
                with self._fs.open(self.metrics_file_path, "r", newline="") as file:
                    self.metrics_keys = next(csv.reader(file), [])
            super().save()

    return Adding
