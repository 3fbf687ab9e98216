"""What type checkers take our strategies for: those of every Lightning package. Nothing imports it to run."""

from lightning.pytorch.strategies import DDPStrategy

from lightning_sparsecomm.strategies import pytorch_lightning, ray


class SparseCommStrategy(pytorch_lightning.SparseCommStrategy, DDPStrategy):  # type: ignore[misc]
    """See the class of the same name in lightning_sparsecomm.strategies.pytorch_lightning."""


class ElasticSparseCommStrategy(pytorch_lightning.ElasticSparseCommStrategy, DDPStrategy):  # type: ignore[misc]
    """See the class of the same name in lightning_sparsecomm.strategies.pytorch_lightning."""


class RaySparseCommStrategy(ray.RaySparseCommStrategy, DDPStrategy):  # type: ignore[misc]
    """See the class of the same name in lightning_sparsecomm.strategies.ray."""
