"""Whole rounds of communication."""

from lightning_sparsecomm.exchange.base import Exchange, Exchanged, PlainExchange, SparseExchange
from lightning_sparsecomm.exchange.block import BlockReduce
from lightning_sparsecomm.exchange.dense import DenseAllReduce
from lightning_sparsecomm.exchange.gather import Gather
from lightning_sparsecomm.exchange.sketched import SketchedTopK
from lightning_sparsecomm.exchange.status import NonFiniteGradientError

__all__ = [
    "BlockReduce",
    "DenseAllReduce",
    "Exchange",
    "Exchanged",
    "Gather",
    "NonFiniteGradientError",
    "PlainExchange",
    "SketchedTopK",
    "SparseExchange",
]
