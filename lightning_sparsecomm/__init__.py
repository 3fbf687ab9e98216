"""Trains Lightning models over slow networks: `Trainer(strategy="sparsecomm")` instead of `"ddp"`."""

from typing import TYPE_CHECKING

from lightning_sparsecomm import _lightning, methods
from lightning_sparsecomm.agreement import ReplicaError
from lightning_sparsecomm.callbacks import CompressionMonitor, ParameterAveraging, SparsityWarmup
from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.codecs import PayloadError
from lightning_sparsecomm.delta_sync import DeltaSync
from lightning_sparsecomm.exchange import NonFiniteGradientError
from lightning_sparsecomm.memory import ErrorFeedback
from lightning_sparsecomm.method import Method
from lightning_sparsecomm.metrics import CompressionRatio
from lightning_sparsecomm.sync import BucketSync, GradientSync
from lightning_sparsecomm.wire import Ledger, PeerError

if TYPE_CHECKING:
    from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy as SparseCommStrategy

__version__ = "0.1.0"

# Without SparseCommStrategy, which an import of * would resolve, and refuse where it is ambiguous.
__all__ = [
    "BucketSync",
    "Channel",
    "CompressionMonitor",
    "CompressionRatio",
    "DeltaSync",
    "ErrorFeedback",
    "GradientSync",
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
    if name == "SparseCommStrategy":
        return _lightning.trainer_strategy()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_lightning.register_strategies()
