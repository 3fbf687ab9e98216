"""The log of one replica: who took part and why that changed, and all that a replay needs."""

import json
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lightning_sparsecomm.elastic.local_state import NOBODY, Holder
from lightning_sparsecomm.elastic.members import Member, Offer, Plan, successor, weights_of
from lightning_sparsecomm.elastic.membership import Change
from lightning_sparsecomm.elastic.rounds import Rounds
from lightning_sparsecomm.elastic.wire import LostPeerError

Outcome = Literal["counts", "in flight", "met", "lost", "in doubt", "ended"]
"""What a meeting came to for one replica: it has exchanged, or got the state; has started an exchange; had no part in
one; was among those that lost a replica; could not know whether others have counted the exchange; or has learnt that
these have, and have ended the run with it."""


class Met(NamedTuple):
    """One meeting, as one replica has seen it.

    Attributes:
        replica: Its name, unique to its process.
        number: Of the quorum.
        members: Names by rank.
        state, round: What those shared that could exchange, and the rounds that led to it.
        leads_to: The state that the exchange leads to; `NOTHING` without one.
        outcome: For this replica.
        seconds: By rank, seconds that a member takes for a step; empty if nobody knows.
        prepared: Of an exchange that was lost, how many units had taken in their changes. Taking these back rounds.
        weight: The factor of this replica's change, if it may have been lost.
        offer: What was exchanged, if it may have been lost.
        nth: How many meetings of the same number, members and state came before.
        holder: Whose local state this replica has taken over in it; `NOBODY` for none.
    """

    replica: str
    number: int
    members: tuple[str, ...]
    state: str
    round: int
    leads_to: str
    outcome: Outcome
    seconds: tuple[float, ...] = ()
    prepared: int = 0
    weight: float = 1.0
    offer: Offer | None = None
    nth: int = 0
    holder: Holder = NOBODY


class Landed(NamedTuple):
    """The end of an exchange in flight, as one replica has seen it.

    Attributes:
        replica: Its name.
        state: What the exchange leads to.
        steps: Optimizer steps since it was started.
        outcome: For this replica.
        prepared: As of `Met`.
    """

    replica: str
    state: str
    steps: int
    outcome: Outcome
    prepared: int = 0


class Ended(NamedTuple):
    """What a replica has ended its training with.

    Attributes:
        replica: Its name.
        round: Rounds finished.
        weights: A digest of its weights and buffers.
    """

    replica: str
    round: int
    weights: str


Entry = Met | Landed | Ended

# Of each line.
_BEGINNING = '{"kind": "'

_KINDS: dict[str, type[Entry]] = {"meeting": Met, "landing": Landed, "end": Ended}


class Record:
    """Writes the log of one replica, a line of JSON for each entry, to the end of a file.

    Args:
        path: The file; None for none.

    Attributes:
        holder: Whose local state this replica takes over in the meeting that it is in; `NOBODY` for none.
    """

    def __init__(self, path: str | None) -> None:
        self._path, self._begun = path, False
        self.holder = NOBODY
        self._counts: Counter[tuple[Any, ...]] = Counter()

    def change(self, change: Change) -> None:
        """Notes who takes part from now on."""
        self._write("change", change)

    @contextmanager
    def meeting(
        self, replica: str, number: int, plan: Plan, members: Sequence[Member], rank: int, rounds: Rounds
    ) -> Iterator[None]:
        """A context of a meeting: notes what it has come to. Not if this replica fails in it by itself, and ends."""
        names = [member.name for member in members]
        leads_to = (
            "" if plan.offer is None else successor(plan.state, [names[each] for each in plan.exchanging], number)
        )
        seconds = tuple(0.0 if each.offer is None else each.offer.step_seconds for each in members)
        met = Met(replica, number, tuple(names), plan.state, plan.round, leads_to, "counts")
        met = met._replace(seconds=seconds if any(seconds) else (), nth=self._counts[met[1:4]])
        self._counts[met[1:4]] += 1
        self.holder = NOBODY
        try:
            yield
        except LostPeerError:
            met = met._replace(outcome="lost" if rounds.made is None else "in doubt", prepared=rounds.prepared)
            if rounds.prepared:
                met = met._replace(weight=weights_of(members, plan)[rank], offer=plan.offer)
            self._write("meeting", met)
            raise
        if rounds.flight is not None:
            met = met._replace(outcome="in flight", weight=weights_of(members, plan)[rank], offer=plan.offer)
        elif rank not in plan.joining and (rank not in plan.exchanging or plan.offer is None):
            met = met._replace(outcome="met")
        self._write("meeting", met._replace(holder=self.holder))

    def late_end(self, replica: str, number: int, members: Sequence[Member], state: str, round_: int) -> None:
        """Notes a meeting without those that have ended the run, with this state."""
        names = tuple(member.name for member in members)
        self._write("meeting", Met(replica, number, names, state, round_, "", "ended"))

    def landing(self, landed: Landed) -> None:
        """Notes the end of an exchange in flight."""
        self._write("landing", landed)

    def end(self, ended: Ended) -> None:
        """Notes what training has ended with."""
        self._write("end", ended)

    def _write(self, kind: str, entry: Entry | Change) -> None:
        if self._path is not None:
            # A process that wrote to this file before may have been killed amid a line.
            try:
                broken_off = not self._begun and _ends_amid_line(self._path)
                with open(self._path, "ab") as log:
                    log.write(b"\n" * broken_off + json.dumps({"kind": kind, **entry._asdict()}).encode() + b"\n")
                self._begun = True
            except OSError as error:
                warnings.warn(
                    f"the membership log {self._path} ends here: {error}. Training goes on; `sparsecomm replay` needs a"
                    " whole log, so it cannot make this run again.",
                    stacklevel=2,
                )
                self._path = None


def _ends_amid_line(path: str) -> bool:
    # What is no file, such as a pipe, has nothing that was written before.
    if not os.path.isfile(path) or not os.path.getsize(path):
        return False
    with open(path, "rb") as log:
        log.seek(-1, os.SEEK_END)
        return log.read() != b"\n"


def read(path: str | Path) -> list[Entry]:
    """The entries of a log, but for changes. Lines that are broken off are left out: a replica was killed then.

    Raises:
        ValueError: There is no such file, or it is no such log.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"LOG must be a file that membership_log has written; got {str(path)!r}: {error}") from error
    entries: list[Entry] = []
    for number, line in enumerate(lines):
        if not line:
            continue
        try:
            fields: dict[str, Any] = json.loads(line)
            kind = fields.pop("kind")
            if kind != "change":
                entries.append(entry_of(_KINDS[kind], fields))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            # A replica that was killed may have broken off its last line anywhere.
            is_part = line.startswith(_BEGINNING) or _BEGINNING.startswith(line)
            if not (is_part and isinstance(error, json.JSONDecodeError)):
                raise ValueError(
                    f"LOG must be a file that membership_log has written; line {number + 1} of {str(path)!r} is"
                    f" {line[:80]!r}."
                ) from error
    return entries


def entry_of(kind: type[Any], fields: dict[str, Any]) -> Any:
    """An entry from what JSON has made of its fields. Raises `TypeError` or `KeyError` if that is none."""
    if kind is Met:
        offer = fields["offer"]
        lists = {name: tuple(fields[name]) for name in ("members", "seconds")}
        fields = fields | lists | {"offer": None if offer is None else Offer.of(offer)}
        fields["holder"] = Holder.of(fields.get("holder", NOBODY))
    entry = kind(**fields)
    for name in ("replica", "state", "leads_to", "outcome", "weights"):
        if not isinstance(fields.get(name, ""), str):
            raise TypeError(f"{name} is no text")
    for name in ("number", "round", "steps", "prepared", "nth"):
        if not isinstance(fields.get(name, 0), int):
            raise TypeError(f"{name} is no whole number")
    if not all(isinstance(name, str) for name in fields.get("members", ())):
        raise TypeError("members are no names")
    return entry
