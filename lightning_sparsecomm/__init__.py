"""Trains Lightning models over slow networks: `Trainer(strategy="sparsecomm")` instead of `"ddp"`."""

from typing import TYPE_CHECKING

from lightning_sparsecomm import versions

# Before imports that could fail with an older version, in words that do not say so.
versions.check()

from lightning_sparsecomm import methods
from lightning_sparsecomm.basis.arguments import did_you_mean
from lightning_sparsecomm.basis.ledger import Ledger
from lightning_sparsecomm.basis.wire import PeerError
from lightning_sparsecomm.channel import Channel, ErrorFeedback
from lightning_sparsecomm.codecs import PayloadError
from lightning_sparsecomm.exchange import NonFiniteGradientError
from lightning_sparsecomm.frontends.callbacks import ParameterAveraging, SparsityWarmup
from lightning_sparsecomm.frontends.iterate_average import IterateAverage
from lightning_sparsecomm.frontends.metrics import CompressionRatio
from lightning_sparsecomm.frontends.monitor import CompressionMonitor
from lightning_sparsecomm.frontends.recorder import CompressionReport
from lightning_sparsecomm.run.agreement import ReplicaError
from lightning_sparsecomm.sharing import BucketSync, DeltaSync, GradientSync, Method
from lightning_sparsecomm.strategies import registration

if TYPE_CHECKING:
    from lightning_sparsecomm.strategies.typed import ElasticSparseCommStrategy as ElasticSparseCommStrategy
    from lightning_sparsecomm.strategies.typed import RaySparseCommStrategy as RaySparseCommStrategy
    from lightning_sparsecomm.strategies.typed import SparseCommStrategy as SparseCommStrategy

__version__ = "0.2.0"

# Without the strategies, which are decided when they are used.
__all__ = [
    "BucketSync",
    "Channel",
    "CompressionMonitor",
    "CompressionRatio",
    "CompressionReport",
    "DeltaSync",
    "ErrorFeedback",
    "GradientSync",
    "IterateAverage",
    "Ledger",
    "Method",
    "NonFiniteGradientError",
    "ParameterAveraging",
    "PayloadError",
    "PeerError",
    "ReplicaError",
    "SparsityWarmup",
    "methods",
]


def __getattr__(name: str) -> object:
    strategies = registration.PLAIN, registration.ELASTIC, registration.RAY
    if name in strategies:
        return registration.trainer_strategy(name)
    known = *__all__, *strategies
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{did_you_mean(name, known)}")


registration.register_strategies()
