"""The strategy for a Trainer on each of Ray Train's workers. This module imports Ray where that is installed."""

import importlib
from typing import TYPE_CHECKING

from lightning_sparsecomm.frontends.packages import TRAINERS
from lightning_sparsecomm.frontends.ray import RayTrainerMixin

_missing: ImportError | None = None

if TYPE_CHECKING:
    # RayDDPStrategy extends it, and mypy has to pass without Ray.
    from pytorch_lightning.strategies import DDPStrategy as RayDDPStrategy
else:
    try:
        RayDDPStrategy = importlib.import_module("ray.train.lightning").RayDDPStrategy
    except ImportError as error:
        # A class all the same, which says what to install when it is called.
        _missing = error.with_traceback(None)
        RayDDPStrategy = importlib.import_module(f"{TRAINERS[0]}.strategies").DDPStrategy


class RaySparseCommStrategy(RayTrainerMixin, RayDDPStrategy):
    """Trains on Ray Train's workers, with a method that shares the gradients.

    It takes the place of `ray.train.lightning.RayDDPStrategy`, and `prepare_trainer` accepts it. All else is as with
    that strategy, and as with `SparseCommStrategy`.

    >>> from lightning_sparsecomm.strategies.ray import RaySparseCommStrategy
    >>> def train_on_each_worker():
    ...     from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
    ...     trainer = pl.Trainer(
    ...         strategy=RaySparseCommStrategy(methods.dgc(density=0.01)),
    ...         plugins=[RayLightningEnvironment()],
    ...         callbacks=[RayTrainReportCallback()],
    ...     )
    ...     prepare_trainer(trainer).fit(model, data)

    Each rank writes what it holds into the folder that it reports to Ray, and Ray puts the folders of all ranks into
    one checkpoint. So a checkpoint that `RayTrainReportCallback` reports, or a callback of yours that saves into a
    folder of each rank's own, has all that an exact resume needs.

    Ray Train takes the package `lightning` where that is installed, and else `pytorch_lightning`. The Trainer must come
    from the same.
    """

    missing = _missing
