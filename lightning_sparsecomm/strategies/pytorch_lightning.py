"""The strategy for Trainer of `pytorch_lightning`."""

from pytorch_lightning.strategies import DDPStrategy

from lightning_sparsecomm.frontends.trainer import TrainerMixin


class SparseCommStrategy(TrainerMixin, DDPStrategy):
    __doc__ = TrainerMixin.__doc__
