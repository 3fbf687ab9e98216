"""Who took part, from which round on, and why that changed."""

import time
from collections.abc import Sequence
from typing import NamedTuple


class Change(NamedTuple):
    """One change of the replicas that take part.

    Attributes:
        time: Seconds since 1970, on this machine.
        round: Rounds finished before.
        members: Names of those that take part from then on.
        joined: Names of those that are new.
        gone: Names of those that are there no more.
        why: What is known of the cause.
        lost_steps: Of those that are gone, about how many steps each has trained since the last exchange, which nobody
            else has: as many as this replica has made since.
    """

    time: float
    round: int
    members: tuple[str, ...]
    joined: tuple[str, ...]
    gone: tuple[str, ...]
    why: str
    lost_steps: int = 0

    def __str__(self) -> str:
        parts = [f"{', '.join(map(short, self.joined))} joined"] if self.joined else []
        if self.gone:
            lost = f", with about {self.lost_steps} steps since the last exchange" if self.lost_steps > 1 else ""
            parts.append(f"{', '.join(map(short, self.gone))} left ({self.why}){lost}")
        there = "1 replica" if len(self.members) == 1 else f"{len(self.members)} replicas"
        return f"sparsecomm: after round {self.round}, {' and '.join(parts)}; {there} from now on"


class Membership:
    """Notes who takes part, meeting by meeting.

    Attributes:
        changes: All changes that this replica has seen, the first one when it joined itself.
        failures: Exchanges that have failed here, and were made again.
    """

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.failures = 0
        self._members: tuple[str, ...] = ()
        self._failed = False

    def fail(self) -> None:
        """Notes that an exchange has failed since the last meeting."""
        self._failed = True
        self.failures += 1

    def meet(self, members: Sequence[str], finished_rounds: int, steps: int = 0) -> Change | None:
        """Notes who takes part from now on; the change, if there is one.

        Args:
            members: Names of those that take part.
            finished_rounds: Rounds finished before.
            steps: Steps that this replica has made since the last exchange.
        """
        why, self._failed = "lost in an exchange" if self._failed else "did not come to the next round", False
        former, now = set(self._members), set(members)
        if former == now:
            return None
        joined = tuple(name for name in members if name not in former)
        gone = tuple(name for name in self._members if name not in now)
        self._members = tuple(members)
        lost, why = (steps, why) if gone else (0, "")
        self.changes.append(Change(time.time(), finished_rounds, self._members, joined, gone, why, lost))
        return self.changes[-1]


def short(name: str) -> str:
    """A replica's name without the part that tells one process from the next of the same name."""
    return name.partition(":")[0]
