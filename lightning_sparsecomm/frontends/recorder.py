"""CompressionReport: records a run, and writes a page that compares it with others."""

import dataclasses
import itertools
import re
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from lightning_sparsecomm.basis.arguments import check_texts
from lightning_sparsecomm.basis.ledger import OURS, Ledger
from lightning_sparsecomm.frontends.monitor import Observer, Totals
from lightning_sparsecomm.report import Point, Run, write_report

_LONGEST_NAME = 60


class CompressionReport(Observer):
    """Writes one self-contained HTML page: loss against bytes and time, bytes by purpose, phases, density, residual.

    Rank 0 writes `NAME.run.json` and `report.html` to the folder after each epoch; of replicas that come and go, the
    one that leads. The page shows all runs in the folder. So for a comparison, train twice into one folder: with ddp,
    and with sparsecomm. Adds no collective, but a broadcast at the start where `folder` is None. `sparsecomm report
    FOLDER` makes the page anew.
    A run that was resumed is one of its own: its steps go on from the checkpoint's, bytes and time begin with it.

    >>> import pytorch_lightning as pl
    >>> trainer = pl.Trainer(accelerator="cpu", callbacks=[CompressionReport("reports", name="ddp")], logger=False)

    Args:
        folder: Where to write; None for the Trainer's log_dir, or its default_root_dir.
        name: Names the run, in the folder and on the page, and replaces an earlier one of that name, with a warning.
            None for the method, such as `dgc(density=0.01)`, or `ddp`; `from step 1200` where it was resumed; and a
            number where the folder has one already.
        every: Batches between two points; None for about 100 points, or the Trainer's log_every_n_steps where the
            number of batches is unknown.

    Raises:
        ValueError: A name that is no file's name, or `every` is not a whole number of at least 1.
        TypeError: `folder` or `name` is of another kind. At the start of fit: a strategy that is neither ours nor ddp.
        OSError: At the start of training, where the folder cannot be written to.
    """

    def __init__(self, folder: str | Path | None = None, name: str | None = None, every: int | None = None) -> None:
        super().__init__()
        check_texts(name=name, folder=None if isinstance(folder, Path) else folder)
        if name is not None and not re.fullmatch(r"[\w.,=()+ -]+", name):
            raise ValueError(
                f"name must be letters, digits, spaces and any of .,=()+-, as it names a file; got {name!r}."
            )
        if every is not None and (type(every) is not int or every < 1):
            raise ValueError(f"every must be a whole number of batches, at least 1; got {every!r}. Leave it out.")
        self.folder = None if folder is None else Path(folder)
        self.name = name
        self.every = every
        # Known on all ranks once training begins: finding it may take all of them. None before.
        self._where: Path | None = None
        self._run: Run | None = None
        # As training began; with a resumed run, both hold what the earlier one has sent.
        self._start: Totals | None = None
        self._start_rows: dict[str, tuple[int, float, float]] = {}
        self._last: Totals | None = None
        self._begin = 0.0
        self._losses = 0
        self._loss = torch.zeros(())
        self._batches = 0
        self._interval = 1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self._start = self._last = self.totals(trainer)
        ledger, resumed_at = self.ledger_of(trainer), trainer.global_step
        # What a new run has sent before its first step, to set up, is its own.
        self._start_rows = _rows(ledger) if ledger is not None and resumed_at else {}
        self._begin = 0.0
        self._losses, self._loss, self._batches = 0, torch.zeros(()), 0
        expected = trainer.estimated_stepping_batches * trainer.accumulate_grad_batches
        known = 0 < expected < float("inf")
        self._interval = self.every or (max(1, int(expected) // 100) if known else max(1, trainer.log_every_n_steps))
        self._run = Run("", type(trainer.strategy).__name__, trainer.world_size, resumed_at=resumed_at)
        self._where = None
        # Of replicas that come and go, it is not known yet which one writes.
        if not hasattr(trainer.strategy, "writes"):
            self._open(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._where is None and self.writes(trainer):
            self._open(trainer)
        # Not before the first batch: kernels may have been compiled until now.
        self._begin = self._begin or time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            # Added up where it lies: to read it in each batch would make a GPU wait.
            self._loss = self._loss.to(loss.device) + loss.detach().float().reshape(())
            self._losses += 1
        self._batches += 1
        if self._batches % self._interval == 0 and trainer.is_global_zero:
            self._record(trainer)

    def _open(self, trainer: Any) -> Path:
        """Finds the folder, and the run's name where this process writes. A collective, but of replicas."""
        # Lightning's log_dir is a collective.
        self._where = self.folder or Path(trainer.log_dir or trainer.default_root_dir)
        if self.writes(trainer):
            assert self._run is not None
            _check_writable(self._where)
            self._run.name = self._chosen_name(trainer, self._where)
        return self._where

    def _record(self, trainer: Any) -> None:
        assert self._run is not None and self._last is not None and self._start is not None
        totals = self.totals(trainer)
        new = totals.since(self._last)
        if new.empty:
            # Steps without an exchange count with the next one.
            return
        self._last = totals
        values: dict[str, float | None] = {**new.values(), "residual_norm": self.residual_norm(trainer)}
        loss = float(self._loss) / self._losses if self._losses else None
        self._losses, self._loss = 0, torch.zeros_like(self._loss)
        here = totals.since(self._start).counts
        seconds, step = time.perf_counter() - self._begin, self._run.resumed_at + int(here["steps"])
        self._run.points.append(Point(step, seconds, loss, here["sent_link_bytes"], values))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._write(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        # What is left of the last batches, and what was exchanged after them.
        if trainer.is_global_zero:
            self._record(trainer)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero and self._run is not None and self._run.points and self._start is not None:
            # And what ranks told each other after that, as they became equal.
            sent = self.totals(trainer).since(self._start).counts["sent_link_bytes"]
            self._run.points[-1] = dataclasses.replace(self._run.points[-1], sent_bytes=sent)
        path = self._write(trainer)
        if path is not None:
            print(f"{path}: loss by bytes and time, phases, bytes by purpose")

    def _write(self, trainer: Any) -> Path | None:
        run, ledger, start = self._run, self.ledger_of(trainer), self._start
        if run is None or ledger is None or start is None or not self.writes(trainer):
            return None
        said = getattr(trainer.strategy, "announced", ())
        run.strategy = "; ".join(line.removeprefix("sparsecomm: ") for line in said) or run.strategy
        for row, (calls, handed, link) in _rows(ledger).items():
            earlier_calls, earlier_handed, earlier_link = self._start_rows.get(row, (0, 0.0, 0.0))
            if calls > earlier_calls:
                run.rows[row] = calls - earlier_calls, handed - earlier_handed, link - earlier_link
        run.ddp_link_bytes = ledger.ddp_link_bytes - start.counts["ddp_link_bytes"]
        ours = ("sparsecomm/", "loss", "train_loss")
        run.metrics = {
            name: float(value) for name, value in trainer.callback_metrics.items() if not name.startswith(ours)
        }
        try:
            # None on a replica that has just taken the lead.
            where = self._where or self._open(trainer)
            run.save(where)
            return write_report(where)
        except Exception as error:
            # Neither the folder nor another run's file is this training's: it must not end for them.
            warnings.warn(f"the report was not written: {error}", stacklevel=2)
            return None

    def _chosen_name(self, trainer: Any, where: Path) -> str:
        """The user's name for the run, or one that the folder does not have yet."""
        if self.name is None:
            name = _name_of(trainer.strategy)
            if trainer.global_step:
                name = f"{name} from step {trainer.global_step}"
            names = itertools.chain([name], (f"{name} {number}" for number in itertools.count(2)))
            return next(each for each in names if not Run.path(where, each).exists())
        if Run.path(where, self.name).exists():
            warnings.warn(
                f"{Run.path(where, self.name)} is replaced by this run. To keep both, give CompressionReport"
                " another name.",
                stacklevel=2,
            )
        return self.name


def _check_writable(folder: Path) -> None:
    """Makes the folder. Raises `OSError` where that, or writing to it, is not allowed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(
            f"folder must be one that CompressionReport can write to; got {str(folder)!r}: {error}. Give another."
        ) from error


def _rows(ledger: Ledger) -> dict[str, tuple[int, float, float]]:
    """By purpose, the method's own first: calls, bytes handed over, and bytes on the link."""
    return {
        row: (sum(each.calls for each in ledger.rows[row].values()), ledger.handed_bytes(row), ledger.link_bytes(row))
        for row in sorted(ledger.rows, key=lambda row: row not in OURS)
    }


def _name_of(strategy: Any) -> str:
    """The method of a strategy of ours, such as `dgc(density=0.01)`; else the class in small letters, such as `ddp`."""
    method = getattr(strategy, "method", None)
    if method is None:
        return type(strategy).__name__.removesuffix("Strategy").lower()
    if method.fallback is not None:
        return "sparsecomm"
    recipe = method.call or type(method).__name__
    # What may stand in a file's name.
    short = re.sub(r"[^\w.,=()+ -]", "", recipe)[:_LONGEST_NAME]
    return short.removesuffix("()").strip()
