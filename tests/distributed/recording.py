"""A method whose exchanges note what they sent and shared, for the laws to check."""

import copy

from torch import Tensor

from lightning_sparsecomm.basis.layout import Layout, SparseVector, Vector
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.exchange import Exchange, Exchanged, SparseExchange
from lightning_sparsecomm.exchange.status import masked
from lightning_sparsecomm.sharing import DeltaSync, GradientSync, Method


class Recording(Exchange):
    """Passes every call on to an exchange, and notes the result of each round that is committed.

    Attributes:
        inner: The exchange that does the work. Its selectors are found through this attribute.
        sent: What this rank sent, round by round.
        shared: What all ranks shared, round by round.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.inner = exchange
        self.sent: list[SparseVector | Tensor] = []
        self.shared: list[SparseVector | Tensor] = []
        self._result: Exchanged | None = None

    @property
    def overlaps(self) -> bool:
        return self.inner.overlaps

    def objection(self, layout: Layout) -> str | None:
        return self.inner.objection(layout)

    def prepare(self, x: Vector, context: Round, wire: Wire) -> None:
        self.inner.prepare(x, context, wire)

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        exchanged = self.inner.exchange(x, context, wire)
        # Copied now: `sent` may be a memory's own vector, which changes when the round is committed.
        # What is sent of a tensor for which no rank has a gradient is void.
        shared, sent = (masked(each, exchanged.present, context.layout) for each in (exchanged.shared, exchanged.sent))
        self._result = exchanged._replace(shared=_copy(shared), sent=_copy(sent))
        return exchanged

    def elements(self, exchanged: Exchanged) -> int:
        return self.inner.elements(exchanged)

    def commit(self) -> None:
        self.inner.commit()
        assert self._result is not None, "committed without an exchange"
        self.sent.append(self._result.sent)
        self.shared.append(self._result.shared)
        self._result = None

    def abort(self) -> None:
        self.inner.abort()
        self._result = None

    def state_dict(self) -> dict[str, Tensor]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.inner.load_state_dict(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"


class SparseRecording(Recording, SparseExchange):
    """The same for an exchange that also takes sparse vectors."""


def recording(exchange: Exchange) -> Recording:
    """An exchange of the same kind that also notes what it does."""
    return SparseRecording(exchange) if isinstance(exchange, SparseExchange) else Recording(exchange)


def recorded(method: Method) -> Method:
    """The same method, with all its exchanges recorded."""
    syncs = []
    for sync in method.syncs:
        assert isinstance(sync, (GradientSync, DeltaSync))
        with_recording = copy.copy(sync)
        with_recording.channel = Channel(recording(sync.channel.exchange), sync.channel.memories)
        syncs.append(with_recording)
    return Method(syncs, method.averaging)


def _copy(vector: SparseVector | Tensor) -> SparseVector | Tensor:
    if isinstance(vector, SparseVector):
        return SparseVector(vector.indices.clone(), vector.values.clone(), vector.size)
    return vector.clone()
