"""What replicas say when they meet, and what follows from it. Pure: all replicas come to the same plan."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_sparsecomm.elastic.deal import Need
from lightning_sparsecomm.sharing.share import TurnKind

# Replicas whose steps differ by less make equally many: it may be chance.
_ALIKE = 0.9

NOTHING = ""
"""The state of a replica that shares nothing with others yet."""


class Offer(NamedTuple):
    """An exchange that a replica has to make, and that all others can make with it.

    Attributes:
        optimizer: Number of the optimizer.
        units: Numbers of its shares, or of their fragments; none where buffers alone are averaged.
        kind: When it takes place, as in `Turn`.
        step: Optimizer steps finished before the one it belongs to.
        epoch: Epochs finished, including a fraction.
        length: Optimizer steps of the whole run; infinite where unknown.
        trained: Optimizer steps that this replica has made since its last exchange. Of gradients, 1; or 0 where they
            are of weights from before it joined, and count for nothing.
        step_seconds: Seconds that it takes for one; 0 where unknown.
        settings: Of each group of the optimizer, for gradients, as in `elastic.settings`.
        since: Of `trained`, steps since the start of an exchange in flight that others may have committed.
        samples: Training samples behind `trained`; None where unknown.
        samples_since: Those behind `since`.
        last: Whether the run of the replica that offers it is over after this. `length` does not tell: it is what the
            method's density follows, and less where the run may end sooner.
    """

    optimizer: int
    units: Sequence[int]
    kind: TurnKind
    step: int
    epoch: float
    length: float
    trained: int = 0
    step_seconds: float = 0.0
    settings: Sequence[dict[str, Any]] = ()
    since: int = 0
    samples: int | None = None
    samples_since: int | None = None
    last: bool = False

    @classmethod
    def of(cls, fields: Sequence[Any]) -> "Offer":
        """From what JSON has made of one."""
        offer = cls(*fields)
        return offer._replace(settings=tuple(offer.settings))


class Member(NamedTuple):
    """What one replica says of itself.

    Attributes:
        name: Its name, unique to its process.
        state: What it shares with others: a name that all replicas give to the outcome of one round; `NOTHING` before
            its first.
        round: Rounds that led to this state.
        pending: The state that its last exchange leads to, if it cannot know whether others have committed it.
        steps: Optimizer steps that its model has made.
        setup: By topic, a digest of what must be equal on all replicas.
        offer: What it has to exchange.
        weights: A digest of its weights, where replicas compare them in this round; else empty.
        samples: For each dataloader whose samples are dealt out, what it has read, and what it wants.
        behind: Steps that its run counts less than its model has made, since it was away for a while.
        note: What the one that leads tells those that have joined in the meeting before; else empty.
        leads: Whether it has led in its last meeting.
    """

    name: str
    state: str
    round: int
    pending: str
    steps: int
    setup: dict[str, str]
    offer: Offer | None = None
    weights: str = ""
    samples: Sequence[Need] = ()
    behind: int = 0
    note: str = ""
    leads: bool = False

    @property
    def progress(self) -> int:
        """Steps by the count of its run."""
        return self.steps - self.behind

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str) -> "Member":
        """Inverse of `to_json`. Raises `ValueError` for anything else."""
        try:
            fields: dict[str, Any] = json.loads(text)
            offer = fields.pop("offer")
            samples = tuple(map(Need.of, fields.pop("samples")))
            return cls(**fields, offer=None if offer is None else Offer.of(offer), samples=samples)
        except (TypeError, KeyError, AttributeError, IndexError) as error:
            raise ValueError(f"a replica has introduced itself by {text[:200]!r}, which cannot be read") from error


class Plan(NamedTuple):
    """What replicas do in one meeting.

    Attributes:
        state: What those share that exchange.
        round: Rounds that led to it.
        healthy: Ranks of those that share it, or can commit to it.
        exchanging: Ranks of those of them that exchange. One that has yet to commit to the exchange of gradients before
            has its step to make first, and no gradients of these weights.
        leader: The rank of those that exchange whose run has come furthest; among equals, of the one that has led
            before, or else the lowest.
        joining: Ranks of those that get it from the leader.
        differing: Ranks of those of them that share the state by name, and have other weights than most.
        refused: Ranks of those that were set up otherwise, with the topic in which they differ.
        offer: What is exchanged; None for nothing.
        ends: Whether the run of one that exchanges is over after that: so all end with it.
    """

    state: str
    round: int
    healthy: list[int]
    exchanging: list[int]
    leader: int
    joining: list[int]
    differing: list[int]
    refused: dict[int, str]
    offer: Offer | None
    ends: bool


def plan_of(members: Sequence[Member], meeting: int) -> Plan:
    """The plan that follows from what all members of a quorum have said, by rank.

    The state of most rounds counts; among equals, that which most replicas have or can commit to; then that of the
    lowest rank. If no replica shares a state, the one with most steps begins one, and all others get it from it. Its
    rank is the lowest among equals.

    Args:
        members: By rank.
        meeting: A number of this meeting, unique in the run.
    """
    states = {member.state for member in members} - {NOTHING}
    refused: dict[int, str] = {}
    if states:
        able = {state: [r for r, each in enumerate(members) if state in (each.state, each.pending)] for state in states}
        rounds = {member.state: member.round for member in members}
        state = max(states, key=lambda each: (rounds[each], len(able[each]), -able[each][0]))
        healthy, round_ = able[state], rounds[state]
    else:
        leader = max(range(len(members)), key=lambda rank: (members[rank].steps, -rank))
        healthy, round_, state = [leader], 0, successor(NOTHING, [members[leader].name], meeting)
    # One that has the state, and not one that can only commit to it: so one is left that exchanges.
    reference = next((rank for rank in healthy if members[rank].state == state), healthy[0])
    for rank, member in enumerate(members):
        topic = _difference(members[reference].setup, member.setup)
        if topic is not None:
            refused[rank] = topic
    healthy = [rank for rank in healthy if rank not in refused]
    # One that commits only now has made its exchange already.
    ready = [rank for rank in healthy if members[rank].pending != state]
    differing = _differing(members, ready)
    offers = {rank: offer for rank in ready if rank not in differing and (offer := members[rank].offer) is not None}
    offer, apart = _leading(offers)
    healthy = [rank for rank in healthy if rank not in (*differing, *apart)]
    exchanging = [rank for rank in healthy if rank in offers or not _by_gradients(members[rank].offer or offer)]
    leader = max(exchanging, key=lambda rank: (members[rank].progress, members[rank].leads, -rank))
    joining = [rank for rank in range(len(members)) if rank not in healthy and rank not in refused]
    ends = any(each.last for rank, each in offers.items() if rank in healthy)
    return Plan(state, round_, healthy, exchanging, leader, joining, differing, refused, offer, ends)


def _leading(offers: Mapping[int, Offer]) -> tuple[Offer | None, list[int]]:
    """What is exchanged, and the ranks that cannot take part in that, though they share the state.

    It is the first offer. But gradients are exchanged by those that are about to make a step with the same optimizer:
    what most offer is exchanged, and others, amid a batch of two optimizers, get the state after it. Of such offers,
    one counts of a replica that has come as far as any: its learning rate does for all.
    """
    first = next(iter(offers.values()), None)
    if first is None or all(offer.kind != "gradients" for offer in offers.values()):
        return first, []
    kinds = [(offer.kind, offer.optimizer) for offer in offers.values()]
    usual = max(kinds, key=lambda kind: (kinds.count(kind), kind[0] == "gradients"))
    alike = {rank: offer for rank, offer in offers.items() if (offer.kind, offer.optimizer) == usual}
    chosen = max(alike.values(), key=lambda offer: (offer.trained, offer.epoch))
    return chosen, [rank for rank in offers if rank not in alike]


def _by_gradients(offer: Offer | None) -> bool:
    return offer is not None and offer.kind == "gradients"


def _differing(members: Sequence[Member], ranks: Sequence[int]) -> list[int]:
    """Those with other weights than most of the ranks, or among equals than the first."""
    digests = [members[rank].weights for rank in ranks]
    usual = max(digests, key=digests.count, default="")
    return [rank for rank, digest in zip(ranks, digests) if digest and usual and digest != usual]


def weights_of(members: Sequence[Member], plan: Plan) -> dict[int, float]:
    """For each rank that exchanges, the factor of its change in the mean: its samples by the mean of all of theirs.

    Where one does not know its samples, steps count instead, those of all.
    """
    if len({offer.optimizer for rank in plan.exchanging if (offer := members[rank].offer) is not None}) > 1:
        # Of several optimizers, steps and samples are those of the one that a replica has come with.
        return dict.fromkeys(plan.exchanging, 1.0)
    trained = [_behind(members[rank], plan.state) for rank in plan.exchanging]
    samples = [count for _, count in trained if count is not None]
    counts = samples if len(samples) == len(trained) else [steps for steps, _ in trained]
    mean = sum(counts) / len(counts)
    unknown = 0.0 if _by_gradients(plan.offer) else 1.0
    return {rank: count / mean if mean else unknown for rank, count in zip(plan.exchanging, counts)}


def _behind(member: Member, state: str) -> tuple[int, int | None]:
    """The steps that a member has made since its last exchange that counts in a state, and the samples behind them."""
    offer = member.offer
    if offer is None:
        return 0, 0
    # One that commits only now has trained nothing since, or what it has while its exchange was in flight.
    return (offer.since, offer.samples_since) if member.pending == state else (offer.trained, offer.samples)


def pace_of(rank: int, members: Sequence[Member], plan: Plan) -> float:
    """The part of a round's steps that a replica makes, so that it takes as long as the fastest one's; 1 for nearly
    all."""
    offers = [members[each].offer for each in plan.exchanging]
    known = [offer.step_seconds for offer in offers if offer is not None and offer.step_seconds > 0]
    offer = members[rank].offer
    if offer is None or not offer.step_seconds or not known:
        return 1.0
    pace = min(known) / offer.step_seconds
    return 1.0 if pace > _ALIKE else pace


def successor(state: str, names: Sequence[str], meeting: int) -> str:
    """The name of the state that an exchange leads to: equal on all that took part, and on nobody else."""
    return hashlib.sha256(json.dumps([state, *names, meeting]).encode()).hexdigest()[:16]


def _difference(leading: dict[str, str], other: dict[str, str]) -> str | None:
    """The first topic on which both say something, and not the same."""
    return next((topic for topic in leading if topic in other and leading[topic] != other[topic]), None)
