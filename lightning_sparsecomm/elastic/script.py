"""What each replica is to do in a replay. Pure: from the logs of all replicas."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning_sparsecomm.elastic.local_state import NOBODY
from lightning_sparsecomm.elastic.record import Ended, Entry, Landed, Met, Outcome, entry_of

Key = tuple[int, tuple[str, ...], str, int]
"""Which meeting it is: number, members, state, and the count of equal ones before."""

# A replica that is killed has not written its last meeting, or the last two with one in flight.
_UNWRITTEN = 2


def key_of(met: Met) -> Key:
    """Equal for all members of a meeting, and for no other meeting."""
    return met.number, met.members, met.state, met.nth


class Scene(NamedTuple):
    """A meeting of one replica, to be made again.

    Attributes:
        met: As it was for this replica.
        counts: Whether anybody has counted what came of it. If not, the replica makes its part of it alone, and takes
            it back.
    """

    met: Met
    counts: bool

    @property
    def name(self) -> str:
        """A name that all members give to this meeting."""
        return hashlib.sha256(json.dumps(key_of(self.met)).encode()).hexdigest()[:16]


class Script(NamedTuple):
    """What a replica does in a replay.

    Attributes:
        replica: Its name.
        scenes: Its meetings, in order.
        landings: Ends of its exchanges in flight.
        weights: A digest of what it has ended with; empty if it was lost before.
        follows: Names of replicas that have to wait in its first meeting with others before it is started.
    """

    replica: str
    scenes: Sequence[Scene]
    landings: Sequence[Landed]
    weights: str
    follows: Sequence[str] = ()

    @property
    def first(self) -> str:
        """The name of its first meeting that counts; empty if there is none."""
        return next((scene.name for scene in self.scenes if scene.counts), "")

    def to_json(self) -> str:
        scenes = [(scene.met._asdict(), scene.counts) for scene in self.scenes]
        return json.dumps(self._asdict() | {"scenes": scenes, "landings": [each._asdict() for each in self.landings]})

    @classmethod
    def from_json(cls, text: str) -> "Script":
        """Inverse of `to_json`."""
        fields: dict[str, Any] = json.loads(text)
        scenes = [Scene(entry_of(Met, met), counts) for met, counts in fields.pop("scenes")]
        landings = [Landed(**each) for each in fields.pop("landings")]
        return cls(**fields, scenes=scenes, landings=landings)


def scripts_of(entries: Sequence[Entry]) -> list[Script]:
    """The scripts of all replicas, in the order in which they were there first.

    Args:
        entries: Of all logs; those of each replica in order.

    Raises:
        ValueError: They are of no run, a log is there twice, or that of a replica is missing.
    """
    met = [each for each in entries if isinstance(each, Met)]
    if not met:
        raise ValueError("logs must hold a meeting at least; these hold none. Name those of all replicas of a run.")
    for (name, key), count in Counter((each.replica, key_of(each)) for each in met).items():
        if count > 1 or name not in key[1]:
            why = "it has a meeting twice" if count > 1 else "it has a meeting of others"
            raise ValueError(f"each log must be given once; of that of {name}, {why}. Name each file once.")
    states = {each.state for each in met} | {each.leads_to for each in met if each.outcome == "counts"}
    states |= {each.state for each in entries if isinstance(each, Landed) and each.outcome == "counts"}
    counting = {
        key_of(each): each
        for each in met
        if (each.leads_to in states if each.leads_to else each.outcome in ("counts", "met", "ended"))
    }
    by_name: dict[str, list[Met]] = {name: [] for each in met for name in each.members}
    for each in met:
        by_name[each.replica].append(each)
    scripts = []
    for name, own in by_name.items():
        scenes = [Scene(each, key_of(each) in counting) for each in _completed(name, own, list(counting.values()))]
        landings = [each for each in entries if isinstance(each, Landed) and each.replica == name]
        weights = [each.weights for each in entries if isinstance(each, Ended) and each.replica == name]
        scripts.append(Script(name, scenes, landings, "".join(weights[-1:])))
    return [script._replace(follows=_before(script, scripts)) for script in scripts if script.scenes]


def _completed(name: str, own: Sequence[Met], counting: Sequence[Met]) -> list[Met]:
    """A replica's meetings, with those that count and that it has not written."""
    written = {key_of(each) for each in own}
    unwritten = [each for each in counting if name in each.members and key_of(each) not in written]
    if len(unwritten) > _UNWRITTEN:
        raise ValueError(
            f"the log of {name} must be there too: it has taken part in {len(unwritten)} meetings that no given log of"
            " its own has. Name the logs of all replicas."
        )
    meetings = list(own)
    for each in sorted(unwritten, key=lambda each: each.round):
        later = next((place for place, met in enumerate(meetings) if met.number > each.number), len(meetings))
        # Amid others, it has said what it shares, and then lost the rest.
        outcome: Outcome = "counts" if later == len(meetings) else "lost"
        meetings.insert(later, each._replace(replica=name, outcome=outcome, prepared=0, offer=None, holder=NOBODY))
    return meetings


def _before(script: Script, scripts: Sequence[Script]) -> list[str]:
    """Those that were there before a replica has come."""
    first = next((scene for scene in script.scenes if scene.counts), None)
    if first is None:
        return []
    others = [each for each in scripts if each.replica in first.met.members and each is not script]
    return [each.replica for each in others if each.first != first.name]
