"""One exchange between replicas: made, confirmed, and then committed or taken back."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparsecomm.basis.ledger import MEMBERSHIP
from lightning_sparsecomm.elastic.members import NOTHING, Offer, Plan, successor
from lightning_sparsecomm.elastic.quorum import Quorum
from lightning_sparsecomm.elastic.settings import follow_settings
from lightning_sparsecomm.elastic.units import Unit, closings_of, units_of
from lightning_sparsecomm.elastic.wire import ElasticWire, LostPeerError
from lightning_sparsecomm.exchange.status import NonFiniteGradientError
from lightning_sparsecomm.run.optimizers import TrackedOptimizer
from lightning_sparsecomm.run.registry import Registry
from lightning_sparsecomm.run.replicas import Replicas
from lightning_sparsecomm.sharing.share import Turn


class Made(NamedTuple):
    """An exchange that is made, and neither committed nor taken back yet.

    Attributes:
        state: The name of the state that it leads to.
        offer: What was exchanged.
        units: What has exchanged.
        means: By name, the means of buffers.
    """

    state: str
    offer: Offer
    units: list[Unit]
    means: dict[str, Tensor]


class Rounds:
    """The exchanges of one replica with those that share its state.

    Args:
        registry: The optimizers of the run.
        replicas: Whose buffers are averaged with the weights.
        wire: Of this replica.
        quorum: Of this replica.

    Attributes:
        made: An exchange of which this replica cannot know whether others have committed it; None for none.
    """

    def __init__(self, registry: Registry, replicas: Replicas, wire: ElasticWire, quorum: Quorum) -> None:
        self.made: Made | None = None
        self._registry = registry
        self._replicas = replicas
        self._wire = wire
        self._quorum = quorum

    @property
    def pending(self) -> str:
        """The name of the state that `made` leads to; `NOTHING` for none."""
        return NOTHING if self.made is None else self.made.state

    def make(self, plan: Plan, offer: Offer, names: Sequence[str], turn: Turn, weight: float = 1.0) -> Made:
        """Exchanges, and confirms that all have the result. A collective of those that share the state of the plan.

        If an exchange fails, it is taken back; if confirming fails, it stays in `made`.

        Args:
            plan: Of this meeting.
            offer: What to exchange.
            names: Of those that exchange.
            turn: This replica's own, whose moment, step, epoch and length the offer replaces.
            weight: The factor of this replica's change in the mean.

        Raises:
            LostPeerError: A replica is gone, or could not finish.
        """
        tracked = self._registry.optimizers[offer.optimizer]
        follow_settings(tracked.optimizer, offer.settings)
        turn = replace(turn, moment=offer.moment, step=offer.step, epoch=offer.epoch, length=offer.length)
        units = [unit for number, unit in enumerate(units_of(tracked)) if number in offer.units]
        try:
            group = self._quorum.group_of(plan.exchanging, plan.state)
        except RuntimeError as error:
            raise LostPeerError(f"replicas could not connect for round {plan.round + 1}") from error
        with self._wire.among(group, plan.exchanging, self._quorum.rank), torch.no_grad():
            try:
                for unit in units:
                    unit.weight = weight
                    unit.prepare(turn)
                for unit in units:
                    unit.exchange()
                means = self._means(tracked, offer)
            except NonFiniteGradientError as error:
                _take_back(units)
                if error.rank is None or error.rank == self._wire.rank:
                    raise
                # That one ends, and the others repeat the round without it.
                raise LostPeerError(f"{names[error.rank]}: {error}") from error
            except BaseException:
                _take_back(units)
                raise
            made = self.made = Made(successor(plan.state, names, self._quorum.number), offer, units, means)
            votes = self._wire.all_gather(torch.tensor([self._quorum.vote()], dtype=torch.uint8), MEMBERSHIP)
        if not bool(votes.all()):
            self.take_back()
            raise LostPeerError(f"a replica could not finish round {plan.round + 1}")
        return made

    def settle(self, plan: Plan) -> list[Offer]:
        """Commits to an exchange that was made before this meeting if others have, or takes it back.

        Returns what it has committed to.
        """
        if self.pending == plan.state:
            made = self.commit()
            return [made.offer] if made is not None else []
        self.take_back()
        return []

    def commit(self) -> Made | None:
        """Commits to what was made: memories forget what was sent, and weights move. Returns it."""
        made, self.made = self.made, None
        if made is not None:
            with torch.no_grad():
                for unit in made.units:
                    unit.commit()
            self._replicas.untrained.take(made.means)
        return made

    def take_back(self) -> None:
        """Takes back what was made: memories and weights are as before it, to round-off."""
        made, self.made = self.made, None
        if made is not None:
            _take_back(made.units)

    def _means(self, tracked: TrackedOptimizer, offer: Offer) -> dict[str, Tensor]:
        """The means of buffers, if these units close a round after which they are averaged. A collective then."""
        if not offer.units:
            return self._replicas.untrained.means()
        if not any(closing.averages and closing.unit in offer.units for closing in closings_of(tracked)):
            return {}
        # Of several optimizers, the first that exchanges weights averages the buffers.
        self._registry.leading = self._registry.leading or tracked
        return self._replicas.untrained.means() if self._registry.leading is tracked else {}


def _take_back(units: Sequence[Unit]) -> None:
    with torch.no_grad():
        for unit in reversed(units):
            unit.take_back()
