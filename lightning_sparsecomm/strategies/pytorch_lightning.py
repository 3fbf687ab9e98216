"""The strategy for Trainer of `pytorch_lightning`."""

from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.strategies.launchers.multiprocessing import _MultiProcessingLauncher

from lightning_sparsecomm.frontends.elastic import ElasticTrainerMixin
from lightning_sparsecomm.frontends.reporting import ReportingLauncherMixin
from lightning_sparsecomm.frontends.trainer import TrainerMixin


class _Launcher(ReportingLauncherMixin, _MultiProcessingLauncher):
    pass


class SparseCommStrategy(TrainerMixin, DDPStrategy):
    __doc__ = TrainerMixin.__doc__
    reporting_launcher = _Launcher


class ElasticSparseCommStrategy(ElasticTrainerMixin, DDPStrategy):
    __doc__ = ElasticTrainerMixin.__doc__
    reporting_launcher = _Launcher
