"""A method whose exchanges remember what they gave, for the laws to look at."""

import copy
from collections.abc import Sequence
from typing import Any

from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.compensation import Wanted
from lightning_sparsecomm.exchange import Exchange, Exchanged, Outgoing
from lightning_sparsecomm.layout import SparseVector
from lightning_sparsecomm.method import Method
from lightning_sparsecomm.rounds import Round
from lightning_sparsecomm.sync import GradientSync
from lightning_sparsecomm.wire import Wire


class Recording(Exchange):
    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.sent: list[Any] = []
        self.shared: list[Any] = []

    def wanted(self, round: Round) -> Sequence[Wanted]:
        return self.exchange.wanted(round)

    def run(self, outgoing: Outgoing, round: Round, wire: Wire) -> Exchanged:
        exchanged = self.exchange.run(outgoing, round, wire)
        self.sent.append(_copy(exchanged.sent))
        self.shared.append(_copy(exchanged.shared))
        return exchanged


def _copy(vector: Any) -> Any:
    if isinstance(vector, SparseVector):
        return SparseVector(vector.indices.clone(), vector.values.clone(), vector.size)
    return vector.clone()


def recorded(method: Method) -> Method:
    """The same method, with every exchange of its gradient syncs recorded."""
    syncs = []
    for sync in method.syncs:
        assert isinstance(sync, GradientSync)
        recording = copy.copy(sync)
        recording.channel = Channel(Recording(sync.channel.exchange), sync.channel.memories)
        syncs.append(recording)
    return Method(syncs, method.averaging)
