"""The strategy for Fabric of `lightning.fabric`."""

from lightning.fabric.strategies.ddp import DDPStrategy

from lightning_sparsecomm.frontends.fabric import FabricMixin


class SparseCommStrategy(FabricMixin, DDPStrategy):
    __doc__ = FabricMixin.__doc__
