"""The strategy for Trainer of `lightning.pytorch`."""

from lightning.pytorch.strategies import DDPStrategy

from lightning_sparsecomm.frontends.trainer import TrainerMixin


class SparseCommStrategy(TrainerMixin, DDPStrategy):
    __doc__ = TrainerMixin.__doc__
