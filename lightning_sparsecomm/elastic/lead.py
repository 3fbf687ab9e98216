"""Who leads, and what follows from that for this replica."""

from collections.abc import Sequence

from lightning_sparsecomm.elastic.joining import Joining
from lightning_sparsecomm.elastic.members import Member, Plan


class Lead:
    """Notes, meeting by meeting, who leads.

    Args:
        joining: Heeds what the one that leads tells those that have joined.

    Attributes:
        behind: Steps that its run is behind those of others, since it was away for a while; set by the front end.
        short: As this replica took the lead: steps it had to make until it was past all that the former leader made.
    """

    def __init__(self, joining: Joining) -> None:
        self.behind = self.short = 0
        self._joining = joining
        self._holds = False
        # The name of another that leads, and steps that it has made by its next meeting, where it is ahead; else 0.
        self._leader, self._reached = "", 0

    def note(self, plan: Plan, members: Sequence[Member], rank: int) -> bool:
        """Notes a meeting; whether this replica leads."""
        for each in plan.healthy:
            if members[each].note and each != rank:
                self._joining.heed(members[each].note)
        own, leader, holds = members[rank], members[plan.leader], rank == plan.leader
        if holds and not self._holds:
            # One that is still there has made no more than it says.
            there = [each.progress for each in members if each.name == self._leader]
            self.short = max(0, min([self._reached, *there]) - own.progress)
        elif not holds:
            # One that joins may count on from where it was, behind the leader.
            ahead = leader.progress > own.progress or rank in plan.joining
            trained = leader.offer.trained if leader.offer is not None else 0
            self._leader, self._reached = leader.name, leader.progress + trained if ahead else 0
        self._holds = holds
        return holds
