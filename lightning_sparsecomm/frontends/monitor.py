"""CompressionMonitor: what a run sends and how long that takes, in any Lightning logger and as a table at the end."""

import time
from typing import Any, NamedTuple

from lightning_sparsecomm.basis.arguments import check_booleans
from lightning_sparsecomm.basis.ledger import Ledger, summary_table
from lightning_sparsecomm.elastic.membership import Membership
from lightning_sparsecomm.frontends.packages import Callback
from lightning_sparsecomm.frontends.plain_ddp import PlainDDP
from lightning_sparsecomm.frontends.trainer import TrainerMixin

_COUNTS = ("steps", "sent_link_bytes", "ddp_link_bytes", "sent_elements", "elements")


class Totals(NamedTuple):
    """Totals of a run, on this rank.

    Attributes:
        counts: What the ledger has counted, by its attributes' names.
        seconds: In exchanges, by phase.
        batch_seconds: In training batches, from start to end.
    """

    counts: dict[str, float]
    seconds: dict[str, float]
    batch_seconds: float

    def since(self, earlier: "Totals") -> "Totals":
        """What was added since an earlier moment."""
        counts = {name: value - earlier.counts[name] for name, value in self.counts.items()}
        seconds = {name: value - earlier.seconds[name] for name, value in self.seconds.items()}
        return Totals(counts, seconds, self.batch_seconds - earlier.batch_seconds)

    @property
    def empty(self) -> bool:
        """Whether nothing was exchanged."""
        return not all(self.counts[name] for name in ("steps", "elements", "sent_elements"))

    def values(self) -> dict[str, float]:
        """Means per optimizer step, by the names that are logged."""
        counts, exchange, steps = self.counts, sum(self.seconds.values()), self.counts["steps"]
        sent = counts["sent_link_bytes"]
        values = {
            "bytes_sent": sent / steps,
            # On average over ranks, as many bytes come in as go out: all collectives of a method are symmetric.
            "bytes_received": sent / steps,
            "density": counts["sent_elements"] / counts["elements"],
            "exchange_seconds": exchange / steps,
        }
        if self.batch_seconds > 0:
            values["exchange_share"] = exchange / self.batch_seconds
        if sent:
            values["compression_ratio"] = counts["ddp_link_bytes"] / sent
        return values | {f"seconds_{name}": seconds / steps for name, seconds in self.seconds.items()}


class Observer(Callback):
    """What callbacks that observe communication share: a ledger, of our strategies or of plain ddp, and batch times."""

    def __init__(self) -> None:
        super().__init__()
        self._plain: PlainDDP | None = None
        self._batch_seconds = 0.0
        self._since = 0.0

    def ledger_of(self, trainer: Any) -> Ledger | None:
        """The run's ledger; None before it has begun."""
        if isinstance(trainer.strategy, TrainerMixin):
            return trainer.strategy.ledger
        return self._plain.ledger if self._plain is not None else None

    def totals(self, trainer: Any) -> Totals:
        """Totals up to now; includes an earlier run that was resumed."""
        if self._plain is not None:
            self._plain.look()
        ledger = self.ledger_of(trainer)
        assert ledger is not None
        counts = {name: float(getattr(ledger, name)) for name in _COUNTS}
        return Totals(counts, dict(ledger.clock.seconds), self._batch_seconds)

    def residual_norm(self, trainer: Any) -> float:
        """Euclidean norm of what this rank has not sent yet; 0 with ddp."""
        return trainer.strategy.engine.residual_norm() if isinstance(trainer.strategy, TrainerMixin) else 0.0

    def writes(self, trainer: Any) -> bool:
        """Whether this process writes what one of all does: rank 0 or, of replicas, the one that leads."""
        return bool(trainer.is_global_zero and getattr(trainer.strategy, "writes", True))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._plain = None
        if not isinstance(trainer.strategy, TrainerMixin):
            self._plain = PlainDDP.of(trainer, type(self).__name__)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._batch_seconds = 0.0
        if self._plain is not None:
            self._plain.begin(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._since = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._batch_seconds += time.perf_counter() - self._since

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self._plain is not None:
            self._plain.after_backward()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._plain is not None:
            self._plain.ledger.steps += 1

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._plain is not None:
            self._plain.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        # Lightning does not call `teardown` then.
        self.teardown(trainer, pl_module, "fit")


class CompressionMonitor(Observer):
    """Logs what the method sends, and prints a table of it at the end of fit. Works with ddp too, for comparison.

    It logs rank 0's values under `sparsecomm/`, without a collective, once something was exchanged. Means per optimizer
    step since the last entry:

    - `bytes_sent`, `bytes_received`: on the link, by the collectives' published algorithms.
    - `compression_ratio`: DDP's link bytes divided by these.
    - `density`: elements sent divided by elements trained.
    - `exchange_seconds`: selecting, coding and waiting for the network. Of what `dense` and ddp send during backward
      passes, only what is left at their ends is waited for.
    - `seconds_update`, `seconds_select`, `seconds_encode`, `seconds_wait`, `seconds_decode`: its phases. On CUDA, the
      host's time. ddp has `seconds_wait` only, as DDP's own logging samples it.
    - `exchange_share`: exchange_seconds of the time in training batches.

    And current values: `bytes_sent_total`; `residual_norm`; `replicas`, how many take part where they come and go; and
    `choice`, the place in the method's `choices` of what `methods.auto` uses: 0 ddp, 1 ddp in bfloat16, 2 sparsecomm,
    as far as its quality allows them, and then its candidates.

    >>> import pytorch_lightning as pl
    >>> trainer = pl.Trainer(accelerator="cpu", callbacks=[CompressionMonitor(progress_bar=False)], logger=False)

    Args:
        progress_bar: Whether to show the ratio on the progress bar, as `sparsecomm/ratio`; and how many replicas take
            part, as `replicas`, where they come and go.
        summary: Whether to print the table at the end of fit.

    Raises:
        TypeError: An argument is no bool; or, at the start of fit, with a strategy that is neither ours nor ddp.
    """

    def __init__(self, progress_bar: bool = True, summary: bool = True) -> None:
        super().__init__()
        check_booleans(progress_bar=progress_bar, summary=summary)
        self.progress_bar = progress_bar
        self.summary = summary
        self._logged: Totals | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        # By now, the ledger of a resumed run holds the totals of the earlier run.
        self._logged = self.totals(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        assert self._logged is not None
        # Lightning decides whether to log this batch: it counts batches that stepped, not optimizer steps.
        if not trainer._logger_connector.should_update_logs:
            return
        totals = self.totals(trainer)
        new = totals.since(self._logged)
        # A step has no gradient where training_step returned None. Steps without an exchange count with the next one.
        if new.empty:
            return
        self._logged = totals
        values = new.values()
        values["bytes_sent_total"] = totals.counts["sent_link_bytes"]
        values["residual_norm"] = self.residual_norm(trainer)
        if (chooser := getattr(trainer.strategy, "chooser", None)) is not None:
            values["choice"] = chooser.number
        membership = _membership_of(trainer)
        if membership is not None:
            values["replicas"] = trainer.strategy.taking_part
        named = {f"sparsecomm/{name}": value for name, value in values.items()}
        pl_module.log_dict(named, on_step=True, on_epoch=False)
        if self.progress_bar and "compression_ratio" in values:
            # Under a short name, since progress bars cut long ones.
            ratio = values["compression_ratio"]
            pl_module.log("sparsecomm/ratio", ratio, on_step=True, on_epoch=False, prog_bar=True, logger=False)
        if self.progress_bar and membership is not None:
            replicas = float(trainer.strategy.taking_part)
            pl_module.log("replicas", replicas, on_step=True, on_epoch=False, prog_bar=True, logger=False)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        ledger = self.ledger_of(trainer)
        if self.summary and trainer.is_global_zero and ledger is not None:
            announced, membership = getattr(trainer.strategy, "announced", ()), _membership_of(trainer)
            lines = [*announced, summary_table(ledger), *([] if membership is None else [membership.summary])]
            print("\n".join(lines))


def _membership_of(trainer: Any) -> Membership | None:
    """Who takes part in a run of replicas that come and go; None for other runs."""
    turns = getattr(trainer.strategy, "turns", None)
    return None if turns is None else turns.membership
