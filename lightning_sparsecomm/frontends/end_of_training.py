"""A callback of the strategy's own, which a Trainer calls before all others."""

from typing import TYPE_CHECKING

from lightning_sparsecomm.frontends.packages import Callback
from lightning_sparsecomm.run.engine import Engine

if TYPE_CHECKING:
    import pytorch_lightning as pl


class EndOfTraining(Callback):
    """Settles replicas before any other callback runs: a strategy's own hook runs after all of them.

    It also tells the wire where the run is, for messages.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._engine.wire.place = "the end of training"
        self._engine.settle()

    def on_train_epoch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._engine.wire.place = None

    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._engine.wire.place = "the end of an epoch"
