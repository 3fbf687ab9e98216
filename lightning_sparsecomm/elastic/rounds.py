"""One exchange between replicas: made or in flight, confirmed, and then committed or taken back."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparsecomm.basis.ledger import MEMBERSHIP
from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.codecs import PayloadError
from lightning_sparsecomm.elastic.connections import Connections
from lightning_sparsecomm.elastic.flight import RoundInFlight
from lightning_sparsecomm.elastic.local_state import note_exchange
from lightning_sparsecomm.elastic.members import NOTHING, Offer, Plan, successor
from lightning_sparsecomm.elastic.settings import follow_settings
from lightning_sparsecomm.elastic.units import Unit, closings_of, under_way_in, units_of
from lightning_sparsecomm.elastic.wire import ElasticWire, LostPeerError
from lightning_sparsecomm.exchange.status import NonFiniteGradientError
from lightning_sparsecomm.run.optimizers import TrackedOptimizer
from lightning_sparsecomm.run.registry import Registry
from lightning_sparsecomm.run.replicas import Replicas
from lightning_sparsecomm.sharing.share import Turn
from lightning_sparsecomm.sharing.streamed import StreamedShare

# An exchange whose payloads were damaged is repeated so many times.
_MOST_DAMAGED = 2


class Made(NamedTuple):
    """An exchange that is made or in flight, and neither committed nor taken back yet.

    Attributes:
        state: The name of the state that it leads to.
        offer: What is exchanged.
        names: Of those that exchange.
        units: What exchanges.
        means: What returns the means of buffers, by name.
        flight: Where it takes place; None where it was made at once.
    """

    state: str
    offer: Offer
    names: Sequence[str]
    units: list[Unit]
    means: Callable[[], dict[str, Tensor]]
    flight: RoundInFlight | None = None


class _Losses:
    """Tells which errors of an exchange cost only that exchange, which is then repeated."""

    def __init__(self) -> None:
        # Exchanges that failed one after another because of damaged payloads.
        self.damaged = 0

    def caused_by(self, error: BaseException, names: Sequence[str], rank: int) -> LostPeerError | None:
        """The loss that others see; None for an error that ends this replica.

        Another replica whose gradient is not finite ends by itself. A damaged payload is sent again, up to twice. If it
        is damaged then too, that is no accident on the way, and this replica ends.

        Args:
            error: What an exchange has raised.
            names: Of those that exchange.
            rank: This replica's among them.
        """
        if isinstance(error, NonFiniteGradientError) and error.rank is not None and error.rank != rank:
            return LostPeerError(f"{names[error.rank]}: {error}")
        if isinstance(error, PayloadError) and self.damaged < _MOST_DAMAGED:
            self.damaged += 1
            warnings.warn(f"an exchange between replicas is repeated: {error}", stacklevel=2)
            return LostPeerError(str(error))
        return None


class Rounds:
    """The exchanges of one replica with those that share its state.

    Args:
        registry: The optimizers of the run.
        replicas: Whose buffers are averaged with the weights.
        wire: Of this replica.
        quorum: Of this replica.

    Attributes:
        made: An exchange in flight, or one of which this replica cannot know whether others have committed it; None for
            none.
        exchanged: See `note_exchange`.
    """

    def __init__(self, registry: Registry, replicas: Replicas, wire: ElasticWire, quorum: Connections) -> None:
        self.made: Made | None = None
        self.exchanged = dict[str, str]()
        # Of the units of the last exchange, the channels, with the rounds that they had prepared before.
        self._channels: list[tuple[Channel, int]] = []
        self._registry, self._replicas = registry, replicas
        self._wire, self._quorum = wire, quorum
        self._losses = _Losses()

    @property
    def pending(self) -> str:
        """The name of the state that `made` leads to; `NOTHING` for none."""
        return NOTHING if self.made is None else self.made.state

    @property
    def prepared(self) -> int:
        """How many units of the last exchange had their changes taken in."""
        return sum(channel.prepared > before for channel, before in self._channels)

    @property
    def flight(self) -> RoundInFlight | None:
        """What is in flight, and has to land before the next meeting; None for nothing."""
        flight = None if self.made is None else self.made.flight
        return None if flight is None or flight.landed else flight

    def make(
        self,
        plan: Plan,
        offer: Offer,
        names: Sequence[str],
        turn: Turn,
        weight: float = 1.0,
        called_off: LostPeerError | None = None,
    ) -> Made:
        """Exchanges, and confirms that all have the result. A collective of those that share the state of the plan.

        If an exchange fails, it is taken back; if confirming fails, it stays in `made`. Where units have a delay, all
        this takes place in flight, until `land`.

        Args:
            plan: Of this meeting.
            offer: What to exchange.
            names: Of those that exchange.
            turn: This replica's own, whose kind, step, epoch and length the offer replaces.
            weight: The factor of this replica's change in the mean.
            called_off: What an exchange in flight ends with before it begins; for a replay.

        Raises:
            LostPeerError: A replica is gone, or could not finish.
        """
        tracked = self._registry.optimizers[offer.optimizer]
        follow_settings(tracked.optimizer, offer.settings)
        turn = replace(turn, kind=offer.kind, step=offer.step, epoch=offer.epoch, length=offer.length)
        units = [unit for number, unit in enumerate(units_of(tracked)) if number in offer.units]
        self._channels = [(unit.channel, unit.channel.prepared) for unit in units]
        try:
            group = self._quorum.group_of(plan.exchanging, plan.state)
        except RuntimeError as error:
            raise LostPeerError(f"replicas could not connect for round {plan.round + 1}") from error
        state = successor(plan.state, names, self._quorum.number)
        with self._wire.among(group, plan.exchanging, self._quorum.rank), torch.no_grad():
            later = any(isinstance(each, StreamedShare) and each.sync.delay_at(turn) for each in units)
            if turn.kind == "weights" and later:
                return self._depart(Made(state, offer, names, units, dict), tracked, turn, weight, called_off)
            try:
                for unit in units:
                    unit.weight = weight
                    unit.prepare(turn)
                for unit in units:
                    unit.exchange()
                means = self._replicas.untrained.means() if _averages(self._registry, tracked, offer) else {}
            except BaseException as error:
                _take_back(units)
                if (loss := self._losses.caused_by(error, names, self._wire.rank)) is None:
                    raise
                raise loss from error
            made = self.made = Made(state, offer, names, units, lambda: means)
            votes = self._wire.all_gather(torch.tensor([self._quorum.vote()], dtype=torch.uint8), MEMBERSHIP)
        if not bool(votes.all()):
            self.take_back()
            raise LostPeerError(f"a replica could not finish round {plan.round + 1}")
        return made

    def _depart(
        self, made: Made, tracked: TrackedOptimizer, turn: Turn, weight: float, called_off: LostPeerError | None
    ) -> Made:
        """Starts an exchange in flight. Nothing that this replica shares changes until it lands."""
        flight = RoundInFlight(self._wire, self._quorum.vote, self._quorum.disconnect)
        means = made.means
        try:
            for unit in made.units:
                assert isinstance(unit, StreamedShare)
                unit.weight, unit.stream = weight, flight
                unit.prepare(turn)
            if _averages(self._registry, tracked, made.offer):
                means = flight.start(self._replicas.untrained.noted()).wait
        except BaseException as error:
            flight.call_off(error)
            _take_back(made.units)
            raise
        self.made = made._replace(means=means, flight=flight)
        if called_off is None:
            flight.depart()
        else:
            flight.call_off(called_off)
        return self.made

    def land(self) -> Made:
        """Waits for what is in flight, and commits to it.

        If it has failed, it is taken back. If others may have committed to it nevertheless, it stays in `made`.

        Raises:
            LostPeerError: A replica is gone, or could not finish.
        """
        made, flight = self.made, self.flight
        assert made is not None and flight is not None
        try:
            flight.wait()
        except Exception as error:
            flight.landed = True
            if not flight.in_doubt:
                self.take_back()
            if (loss := self._losses.caused_by(error, made.names, flight.rank)) is None:
                raise
            raise loss from error
        flight.landed = True
        self.commit()
        return made

    @property
    def is_lost(self) -> bool:
        """Whether this replica cannot commit to what it has made any more, and does not know whether others have.

        A save, or a parameter that was added, had to close the exchange before others could tell.
        """
        return self.made is not None and any(unit.failure is not None for unit in self._units(self.made))

    def settle(self, state: str) -> list[Offer]:
        """Commits to an exchange that was made before this meeting if others have, or takes it back.

        Returns what it has committed to.

        Args:
            state: What those share that can exchange.
        """
        self._channels = []
        if self.pending == state:
            made = self.commit()
            return [made.offer] if made is not None else []
        self.take_back()
        return []

    def commit(self) -> Made | None:
        """Commits to what was made: memories forget what was sent, and weights move. Returns it."""
        made, self.made = self.made, None
        if made is not None:
            if made.flight is not None:
                made.flight.counts = True
            with torch.no_grad():
                for unit in self._units(made):
                    unit.land() if isinstance(unit, StreamedShare) and made.flight is not None else unit.commit()
            self._replicas.untrained.take(made.means())
            note_exchange(self.exchanged, made.names, made.state)
            self._losses.damaged = 0
        return made

    def take_back(self) -> None:
        """Takes back what was made: memories and weights are as before it, to round-off."""
        made, self.made = self.made, None
        if made is not None:
            _take_back(self._units(made))

    def drop(self) -> None:
        """Forgets what was made, after an error that ends this replica's part in it."""
        if self.flight is not None:
            with suppress(Exception):
                self.flight.wait()
            self.take_back()
        self.made = None

    def _units(self, made: Made) -> Sequence[Unit]:
        """What was made: in flight, parameters that were added may have moved others to another fragment."""
        return made.units if made.flight is None else under_way_in(self._registry.optimizers[made.offer.optimizer])


def _averages(registry: Registry, tracked: TrackedOptimizer, offer: Offer) -> bool:
    """Whether buffers are averaged with what is offered: its units close a round, or are none."""
    if not offer.units:
        return True
    if not any(closing.averages and closing.unit in offer.units for closing in closings_of(tracked)):
        return False
    # Of several optimizers, the first that exchanges weights averages the buffers.
    registry.leading = registry.leading or tracked
    return registry.leading is tracked


def _take_back(units: Sequence[Unit]) -> None:
    with torch.no_grad():
        for unit in reversed(units):
            unit.take_back()
