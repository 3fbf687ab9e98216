"""The end of training, before anyone else's hook for it: those are to find the model that stays."""

from typing import TYPE_CHECKING

from lightning_sparsecomm._lightning import callback_bases
from lightning_sparsecomm.synchronizer import Synchronizer

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningModule, Trainer
else:
    Callback = type("Callback", callback_bases(), {})


class Settling(Callback):
    """The first of a Trainer's callbacks while it fits: a strategy's own hook comes after those of all callbacks.

    Args:
        synchronizer: Whose replicas become one model.
    """

    def __init__(self, synchronizer: Synchronizer) -> None:
        super().__init__()
        self._synchronizer = synchronizer

    def on_train_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        if trainer.is_global_zero:
            self._synchronizer.warn_of_no_exchange()
        self._synchronizer.settle()
