"""A method whose exchanges remember what they gave, for the laws to look at."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.exchange import Exchange, Exchanged
from lightning_sparsecomm.layout import SparseVector
from lightning_sparsecomm.methods import Method
from lightning_sparsecomm.rounds import Round
from lightning_sparsecomm.sync import GradientSync
from lightning_sparsecomm.wire import Wire


class Recording(Exchange):
    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.sent: list[Any] = []
        self.shared: list[Any] = []

    def run(
        self, x: Tensor, present: Sequence[bool], nonfinite_segment: int | None, round: Round, wire: Wire
    ) -> Exchanged:
        exchanged = self.exchange.run(x, present, nonfinite_segment, round, wire)
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
        channel = Channel(Recording(sync.channel.exchange), sync.channel.memories)
        syncs.append(GradientSync(channel, sync.parameters, sync.exclude))
    return Method(syncs)
