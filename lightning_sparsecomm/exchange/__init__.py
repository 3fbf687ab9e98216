"""Whole rounds of communication."""

from lightning_sparsecomm.exchange.base import Exchange, Exchanged, NonFiniteGradientError, Outgoing
from lightning_sparsecomm.exchange.block import BlockReduce
from lightning_sparsecomm.exchange.dense import DenseAllReduce
from lightning_sparsecomm.exchange.gather import Gather
from lightning_sparsecomm.exchange.recursive import RecursiveDoubling
from lightning_sparsecomm.exchange.sketched import SketchedTopK

__all__ = [
    "BlockReduce",
    "DenseAllReduce",
    "Exchange",
    "Exchanged",
    "Gather",
    "NonFiniteGradientError",
    "Outgoing",
    "RecursiveDoubling",
    "SketchedTopK",
]
