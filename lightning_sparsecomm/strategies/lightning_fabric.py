"""The strategy for Fabric of `lightning_fabric`."""

from lightning_fabric.strategies.ddp import DDPStrategy

from lightning_sparsecomm.frontends.fabric import FabricMixin


class SparseCommStrategy(FabricMixin, DDPStrategy):
    __doc__ = FabricMixin.__doc__
