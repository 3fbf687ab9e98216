"""Callbacks; each class serves the Trainers of all Lightning packages."""

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lightning_sparsecomm._lightning import callback_bases
from lightning_sparsecomm.averaging import Averaging
from lightning_sparsecomm.schedules import Warmup
from lightning_sparsecomm.strategies.mixin import SynchronizingMixin
from lightning_sparsecomm.strategies.trainer import TrainerMixin
from lightning_sparsecomm.wire import OURS, Ledger

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningModule, Trainer
else:
    # Both packages' Callback classes have the same hooks; the first in the resolution order answers.
    Callback = type("Callback", callback_bases(), {})


class _Counts(NamedTuple):
    steps: int
    link_bytes: float
    ddp_link_bytes: float
    sent_elements: int
    elements: int
    exchange_seconds: float

    @classmethod
    def of(cls, ledger: Ledger) -> "_Counts":
        return cls(
            ledger.steps,
            ledger.sent_link_bytes,
            ledger.ddp_link_bytes,
            ledger.sent_elements,
            ledger.elements,
            ledger.exchange_seconds,
        )

    def since(self, earlier: "_Counts") -> "_Counts":
        return _Counts(
            self.steps - earlier.steps,
            self.link_bytes - earlier.link_bytes,
            self.ddp_link_bytes - earlier.ddp_link_bytes,
            self.sent_elements - earlier.sent_elements,
            self.elements - earlier.elements,
            self.exchange_seconds - earlier.exchange_seconds,
        )


class CompressionMonitor(Callback):
    """Logs what the synchronization sends, and prints a table of it at the end of fit.

    Logged under `sparsecomm/`, per optimizer step since the last entry, as rank 0 sees it (no collective is added, and
    no entry made before something was exchanged):
    `bytes_sent` and `bytes_received` (on the link, by the collectives' published algorithms), `compression_ratio`
    (DDP's link bytes over these), `density` (elements sent by elements trained), `residual_norm`, and
    `exchange_seconds` (selecting, coding and waiting for the network; for `dense`, overlapping the backward pass).

    Args:
        progress_bar: Whether the ratio is shown on the progress bar.
        summary: Whether the table is printed at the end of fit.
    """

    def __init__(self, progress_bar: bool = True, summary: bool = True) -> None:
        super().__init__()
        self.progress_bar = progress_bar
        self.summary = summary
        self._logged: _Counts | None = None

    def on_fit_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, SynchronizingMixin):
            raise TypeError(
                f"CompressionMonitor reports what a sparsecomm strategy sends, but the Trainer's strategy is"
                f" {type(strategy).__name__}. Use strategy='sparsecomm' ('sparsecomm_dense' sends what ddp sends),"
                " or leave the callback out."
            )

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        # By now a resumed run has the counts of what it goes on with.
        assert isinstance(trainer.strategy, SynchronizingMixin)
        self._logged = _Counts.of(trainer.strategy.synchronizer.wire.ledger)

    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, SynchronizingMixin) and self._logged is not None
        # Lightning's own decision whether this batch is logged: it counts batches that stepped, not optimizer steps.
        due = trainer._logger_connector.should_update_logs
        counts = _Counts.of(strategy.synchronizer.wire.ledger)
        new = counts.since(self._logged)
        # A step may have had no gradient at all, where training_step returned None. And steps before an exchange, where
        # they are many to one, are counted with it.
        if not due or new.steps == 0 or new.elements == 0 or new.sent_elements == 0:
            return
        self._logged = counts
        values = {
            "sparsecomm/bytes_sent": new.link_bytes / new.steps,
            "sparsecomm/bytes_received": new.link_bytes / new.steps,
            "sparsecomm/density": new.sent_elements / new.elements,
            "sparsecomm/residual_norm": strategy.synchronizer.residual_norm(),
            "sparsecomm/exchange_seconds": new.exchange_seconds / new.steps,
        }
        pl_module.log_dict(values, on_step=True, on_epoch=False)
        if new.link_bytes:
            ratio = new.ddp_link_bytes / new.link_bytes
            pl_module.log("sparsecomm/compression_ratio", ratio, on_step=True, on_epoch=False)
            if self.progress_bar:
                # A name of its own: progress bars cut long ones.
                pl_module.log("ratio", ratio, on_step=True, on_epoch=False, prog_bar=True, logger=False)

    def on_fit_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        strategy = trainer.strategy
        if self.summary and trainer.is_global_zero and isinstance(strategy, SynchronizingMixin) and strategy.ledger:
            print(summary_table(strategy.ledger))


class SparsityWarmup(Callback):
    """Sends more in the first steps or epochs, whatever the method; afterwards the method's own density holds.

    In the place of a warm-up that the method has itself. `dense`, `federated_averaging` and `diloco` have no density,
    and go on sending everything.

    Args:
        steps: Length in optimizer steps; 0 where it is counted in epochs.
        epochs: Length in epochs; 0 where it is counted in steps.
        shape: How the density falls to the method's own p: "exponential" (in stage e of E it is p^((e+1)/(E+1)), one
            stage for each epoch, or 4), "inverse_time" (1 − (1 − p)^max(1, T/t) in step t), or a list of densities for
            stages of equal length.

    Raises:
        ValueError: Both or neither of steps and epochs, an unknown shape, or a density outside (0, 1].
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
        _strategy_of(trainer, self).synchronizer.warmup = self.warmup


class ParameterAveraging(Callback):
    """Averages the parameters over all processes every so many optimizer steps, whatever the method.

    In the place of what the method itself says of averaging. Where replicas are equal already it changes nothing but
    their last bits; with `buffers` and `optimizer_state`, what ranks keep apart is averaged too.

    Args:
        every: Optimizer steps between two averages.
        buffers: Whether floating-point buffers, such as running means of batch normalization, are averaged too.
        optimizer_state: Whether the optimizer's floating-point state, such as momentum, is averaged too.

    Raises:
        ValueError: `every` is not a whole number of at least 1.
    """

    def __init__(self, every: int = 500, buffers: bool = False, optimizer_state: bool = False) -> None:
        super().__init__()
        self.averaging = Averaging(every, buffers, optimizer_state)

    def on_fit_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        _strategy_of(trainer, self).synchronizer.replicas.averaging = self.averaging


def _strategy_of(trainer: "Trainer", callback: object) -> TrainerMixin:
    if not isinstance(trainer.strategy, TrainerMixin):
        raise TypeError(
            f"{type(callback).__name__} changes what a sparsecomm strategy does, but the Trainer's strategy is"
            f" {type(trainer.strategy).__name__}. Use strategy='sparsecomm', or leave the callback out."
        )
    return trainer.strategy


def summary_table(ledger: Ledger) -> str:
    """What one rank sent, by purpose, as text for a terminal."""
    lines = [
        f"{'sent by one rank of ' + str(ledger.world_size):<26}{'calls':>9}{'handed over':>15}{'on the link':>15}",
    ]
    for row in sorted(ledger.rows, key=lambda row: row not in OURS):
        calls = sum(traffic.calls for traffic in ledger.rows[row].values())
        lines.append(f"{row:<26}{calls:>9,}{_size(ledger.handed_bytes(row)):>15}{_size(ledger.link_bytes(row)):>15}")
    lines.append(
        f"{'gradients, had it been ddp':<26}{'':>9}{_size(ledger.ddp_bytes):>15}{_size(ledger.ddp_link_bytes):>15}"
    )
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
    """Bytes in decimal units, as networks are rated."""
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if count >= 10**power:
            return f"{count / 10**power:,.2f} {unit}"
    return f"{count:,.0f} B"
