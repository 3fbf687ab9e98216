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
        behind_since: Of a replica that joins again, the first of `joined`, in its own log: the rounds it had finished
            before it was away; None otherwise.
    """

    time: float
    round: int
    members: tuple[str, ...]
    joined: tuple[str, ...]
    gone: tuple[str, ...]
    why: str
    lost_steps: int = 0
    behind_since: int | None = None

    def __str__(self) -> str:
        parts, joined = [], [short(name) for name in self.joined]
        if self.behind_since is not None:
            parts.append(f"{joined.pop(0)} joined again (away since round {self.behind_since})")
        if joined:
            parts.append(f"{', '.join(joined)} joined")
        if self.gone:
            lost = f", with about {self.lost_steps} steps since the last exchange" if self.lost_steps > 1 else ""
            parts.append(f"{', '.join(map(short, self.gone))} left ({self.why}){lost}")
        return (
            f"sparsecomm: after round {self.round}, {' and '.join(parts)}; {_replicas(len(self.members))} from now on"
        )


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
        self._round = 0
        self._failed = False

    @property
    def summary(self) -> str:
        """How many have taken part, in a line for the end of a run."""
        counts = [len(change.members) for change in self.changes]
        if not counts:
            return "1 replica"
        least, most = min(counts), max(counts)
        span = f", {least} to {most} in the run" if least < most else ""
        changes = len(self.changes) - 1
        return (
            f"{_replicas(counts[-1])} at the end{span}; {changes} change{'s' * (changes != 1)} of members,"
            f" {self.failures} exchange{'s' * (self.failures != 1)} repeated"
        )

    def fail(self) -> None:
        """Notes that an exchange has failed since the last meeting."""
        self._failed = True
        self.failures += 1

    def meet(
        self,
        members: Sequence[str],
        finished_rounds: int,
        steps: int = 0,
        joining: Sequence[str] = (),
        own: str = "",
        own_rounds: int = 0,
    ) -> Change | None:
        """Notes who takes part from now on; the change, if there is one.

        Args:
            members: Names of those that take part.
            finished_rounds: Rounds finished before.
            steps: Steps that this replica has made since the last exchange.
            joining: Names of those of them that get the state from others, which have shared it before.
            own: The name of this replica.
            own_rounds: Rounds that this replica has finished; 0 where it cannot know.
        """
        why, self._failed = "lost in an exchange" if self._failed else "did not come to the next round", False
        former, now, since = set(self._members), set(members), None
        if own in joining:
            if former:
                # Others have gone on without this one, whoever was there before.
                former, since = former - {own}, own_rounds or self._round
            else:
                former = now - set(joining)
        self._round = finished_rounds
        if former == now:
            return None
        joined = tuple(sorted((name for name in members if name not in former), key=lambda name: name != own))
        gone = tuple(name for name in self._members if name not in now)
        self._members = tuple(members)
        lost, why = (steps, why) if gone else (0, "")
        self.changes.append(Change(time.time(), finished_rounds, self._members, joined, gone, why, lost, since))
        return self.changes[-1]


def short(name: str) -> str:
    """A replica's name without the part that tells one process from the next of the same name."""
    return name.rpartition(":")[0] or name


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"
