"""Callbacks. Each class works with the Trainers of all Lightning packages."""

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lightning_sparsecomm.basis.ledger import OURS, Ledger
from lightning_sparsecomm.basis.schedules import Warmup
from lightning_sparsecomm.frontends.packages import Callback
from lightning_sparsecomm.frontends.trainer import TrainerMixin
from lightning_sparsecomm.sharing.averaging import Averaging

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


class _Totals(NamedTuple):
    """Totals of a ledger; each field has the name of the ledger's attribute."""

    steps: float
    sent_link_bytes: float
    ddp_link_bytes: float
    sent_elements: float
    elements: float
    exchange_seconds: float

    @classmethod
    def of(cls, ledger: Ledger) -> "_Totals":
        return cls(*(getattr(ledger, name) for name in cls._fields))


class CompressionMonitor(Callback):
    """Logs what the method sends, and prints a table of it at the end of fit.

    It logs rank 0's values under `sparsecomm/`, without a collective, once something was exchanged. Values are averages
    per optimizer step since the last entry: `bytes_sent` and `bytes_received` (on the link, by the collectives'
    published algorithms), `compression_ratio` (DDP's link bytes divided by these), `density` (elements sent divided by
    elements trained) and `exchange_seconds` (selecting, coding and waiting for the network; `dense` overlaps this with
    the backward pass). `residual_norm` is the current value.

    Args:
        progress_bar: Whether to show the ratio on the progress bar.
        summary: Whether to print the table at the end of fit.
    """

    def __init__(self, progress_bar: bool = True, summary: bool = True) -> None:
        super().__init__()
        self.progress_bar = progress_bar
        self.summary = summary
        self._logged: _Totals | None = None

    def on_fit_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        _strategy_of(trainer, self)

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        # By now, the ledger of a resumed run holds the totals of the earlier run.
        self._logged = _Totals.of(_strategy_of(trainer, self).engine.wire.ledger)

    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._logged is not None
        engine = _strategy_of(trainer, self).engine
        # Lightning decides whether to log this batch: it counts batches that stepped, not optimizer steps.
        due = trainer._logger_connector.should_update_logs
        totals = _Totals.of(engine.wire.ledger)
        new = _Totals(*(now - before for now, before in zip(totals, self._logged)))
        # A step has no gradient where training_step returned None. Steps without an exchange count with the next one.
        if not due or new.steps == 0 or new.elements == 0 or new.sent_elements == 0:
            return
        self._logged = totals
        values = {
            "sparsecomm/bytes_sent": new.sent_link_bytes / new.steps,
            "sparsecomm/bytes_received": new.sent_link_bytes / new.steps,
            "sparsecomm/density": new.sent_elements / new.elements,
            "sparsecomm/residual_norm": engine.residual_norm(),
            "sparsecomm/exchange_seconds": new.exchange_seconds / new.steps,
        }
        pl_module.log_dict(values, on_step=True, on_epoch=False)
        if new.sent_link_bytes:
            ratio = new.ddp_link_bytes / new.sent_link_bytes
            pl_module.log("sparsecomm/compression_ratio", ratio, on_step=True, on_epoch=False)
            if self.progress_bar:
                # Under a short name, since progress bars cut long ones.
                pl_module.log("ratio", ratio, on_step=True, on_epoch=False, prog_bar=True, logger=False)

    def on_fit_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        ledger = _strategy_of(trainer, self).ledger
        if self.summary and trainer.is_global_zero and ledger is not None:
            print(summary_table(ledger))


class SparsityWarmup(Callback):
    """Sends more in the first steps or epochs, with any method. Afterwards the method's own density applies.

    It replaces a warm-up of the method's own. `dense`, `federated_averaging` and `diloco` have no density and always
    send everything.

    Args:
        steps: Length in optimizer steps; 0 if it is given in epochs.
        epochs: Length in epochs; 0 if it is given in steps.
        shape: How the density falls to the method's own p: "exponential" (p^((e+1)/(E+1)) in stage e of E; E is the
            number of epochs, or 4), "inverse_time" (1 − (1 − p)^max(1, T/t) in step t), or a list of densities for
            stages of equal length.

    Raises:
        ValueError: Both or neither of steps and epochs is given, the shape is unknown, or a density is outside (0, 1].
    """

    def __init__(
        self,
        steps: int = 0,
        epochs: int = 0,
        shape: Literal["exponential", "inverse_time"] | list[float] = "exponential",
    ) -> None:
        super().__init__()
        self.warmup = Warmup(steps, epochs, shape)

    def on_fit_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        _strategy_of(trainer, self).engine.warmup = self.warmup


class ParameterAveraging(Callback):
    """Averages the parameters over all ranks every `every` optimizer steps, with any method.

    It replaces the method's own averaging. If replicas are equal already, only their last bits change.

    Args:
        every: Optimizer steps between two averages.
        buffers: Whether to average floating-point buffers too, such as running means of batch normalization.
        optimizer_state: Whether to average the optimizer's floating-point state too, such as momentum.

    Raises:
        ValueError: `every` is not a whole number of at least 1.
    """

    def __init__(self, every: int = 500, buffers: bool = False, optimizer_state: bool = False) -> None:
        super().__init__()
        self.averaging = Averaging(every, buffers, optimizer_state)

    def on_fit_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        _strategy_of(trainer, self).engine.replicas.averaging = self.averaging


def _strategy_of(trainer: "Trainer", callback: object) -> TrainerMixin:
    if not isinstance(trainer.strategy, TrainerMixin):
        raise TypeError(
            f"strategy must be a sparsecomm strategy with the callback {type(callback).__name__}; got"
            f" {type(trainer.strategy).__name__}. Use strategy='sparsecomm' ('sparsecomm_dense' sends what ddp sends),"
            " or leave the callback out."
        )
    return trainer.strategy


def summary_table(ledger: Ledger) -> str:
    """What one rank sent for each purpose, as a table for a terminal."""

    def line(name: str, calls: str, handed: str, link: str) -> str:
        return f"{name:<26}{calls:>9}{handed:>15}{link:>15}"

    lines = [line(f"sent by one rank of {ledger.world_size}", "calls", "handed over", "on the link")]
    for row in sorted(ledger.rows, key=lambda row: row not in OURS):
        calls = sum(traffic.calls for traffic in ledger.rows[row].values())
        lines.append(line(row, f"{calls:,}", _size(ledger.handed_bytes(row)), _size(ledger.link_bytes(row))))
    lines.append(line("gradients, had it been ddp", "", _size(ledger.ddp_bytes), _size(ledger.ddp_link_bytes)))
    if ledger.world_size == 1:
        lines.append("One process: nothing crosses a network, so nothing is saved.")
    elif ledger.sent_link_bytes:
        lines.append(
            f"compression ratio {ledger.compression_ratio():,.1f} over {ledger.steps:,} steps,"
            f" density {ledger.density():.3g}, {ledger.exchange_seconds:.1f} s in exchange"
        )
    lines.append("On the link: by the collectives' published algorithms, from the bytes handed over.")
    return "\n".join(lines)


def _size(count: float) -> str:
    """Bytes in decimal units, as for networks."""
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if count >= 10**power:
            return f"{count / 10**power:,.2f} {unit}"
    return f"{count:,.0f} B"
