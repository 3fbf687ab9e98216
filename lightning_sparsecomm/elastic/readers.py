"""The samples of all dataloaders of a replica, in its meetings with others."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_sparsecomm.elastic.deal import Deal, Need
from lightning_sparsecomm.elastic.members import Member, Plan, successor
from lightning_sparsecomm.elastic.reader import Reader, Stated


class Readers:
    """Deals samples out in each exchange, by what all members have said.

    An exchange that is made or in flight, and perhaps not committed by all, leads to deals under the name of its state.
    They count once the state does: then what its members had said to have read is read, and not before. What they have
    read meanwhile, they say in the next meeting.

    Args:
        readers: One for each training dataloader; none where the user deals samples out.
        expected: How many batches this replica expects to read until the next exchange.
        tell: Called when its deals have changed.
    """

    def __init__(
        self,
        readers: Sequence[Reader] = (),
        expected: Callable[[], int] = lambda: 1,
        tell: Callable[[], None] = lambda: None,
    ) -> None:
        self.readers = readers
        self._expected, self._tell = expected, tell
        # By the name of a state, what it leads to, and what each reader had said to have read.
        self._made: dict[str, tuple[list[Deal], list[Stated]]] = {}

    def needs(self) -> Sequence[Need]:
        """What this replica says of its samples."""
        return tuple(reader.need(self._expected()) for reader in self.readers)

    def meet(self, plan: Plan, members: Sequence[Member], rank: int, meeting: int) -> None:
        """Follows from what all have said: deals that an earlier exchange has led to count, or do not.

        Args:
            plan: Of this meeting.
            members: By rank.
            rank: This replica's own.
            meeting: Its number.
        """
        self.settle(plan.state)
        if rank in plan.joining or rank in plan.refused:
            return
        stated = [reader.stated for reader in self.readers]
        if plan.offer is None:
            # The first one there begins a run.
            deals = [reader.deal or Deal(reader.loading.size, reader.loading.seed) for reader in self.readers]
            self._made[plan.state] = self._dealt(deals, [], [*plan.healthy, *plan.joining], members), stated
            self.settle(plan.state)
        elif rank in plan.exchanging:
            name = successor(plan.state, [members[each].name for each in plan.exchanging], meeting)
            deals = [reader.deal for reader in self.readers if reader.deal is not None]
            self._made[name] = self._dealt(deals, plan.exchanging, plan.joining, members), stated

    def settle(self, state: str) -> None:
        """The replica shares that state: deals count that led to it, and no others do."""
        made = self._made.pop(state, None)
        self._made.clear()
        if made is not None and self.readers:
            for reader, deal, stated in zip(self.readers, *made):
                reader.adopt(deal, stated)
            self._tell()

    def state_dict(self) -> list[Any]:
        """What replicas that join go on from."""
        return [reader.state_dict() for reader in self.readers]

    def take(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Goes on from another replica's `state_dict`."""
        self._made.clear()
        for reader, saved in zip(self.readers, state):
            reader.take(Deal.from_plain(saved["deal"]), saved["number"])
        if self.readers:
            self._tell()

    def _dealt(
        self, deals: Sequence[Deal], exchanging: Sequence[int], joining: Sequence[int], members: Sequence[Member]
    ) -> list[Deal]:
        def needs(ranks: Sequence[int], number: int) -> dict[str, Need]:
            return {members[rank].name: members[rank].samples[number] for rank in ranks}

        return [deal.after(needs(exchanging, each), needs(joining, each)) for each, deal in enumerate(deals)]
