"""Makes replicas equal before any other hook for the end of training runs."""

from typing import TYPE_CHECKING

from lightning_sparsecomm.frontends.packages import callback_bases
from lightning_sparsecomm.run.engine import Engine

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningModule, Trainer
else:
    Callback = type("Callback", callback_bases(), {})


class EndOfTraining(Callback):
    """Settles replicas at the end of training. It is the Trainer's first callback: a strategy's own hook runs last."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    def on_train_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        self._engine.settle()
