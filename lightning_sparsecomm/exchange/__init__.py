"""Whole rounds of communication."""

from lightning_sparsecomm.exchange.base import Exchange, Exchanged, NonFiniteGradientError, Outgoing
from lightning_sparsecomm.exchange.dense import DenseAllReduce
from lightning_sparsecomm.exchange.gather import Gather

__all__ = ["DenseAllReduce", "Exchange", "Exchanged", "Gather", "NonFiniteGradientError", "Outgoing"]
