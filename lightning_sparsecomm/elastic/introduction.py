"""What a replica says of itself in a meeting, and what it has to exchange."""

import hashlib
import math
import warnings
from collections.abc import Sequence

import torch

from lightning_sparsecomm.basis.digests import digest_of
from lightning_sparsecomm.basis.ledger import MEMBERSHIP
from lightning_sparsecomm.elastic.connections import Connections
from lightning_sparsecomm.elastic.members import Member, Offer, Plan
from lightning_sparsecomm.elastic.membership import short
from lightning_sparsecomm.elastic.settings import settings_of
from lightning_sparsecomm.elastic.units import trained_since, units_of
from lightning_sparsecomm.elastic.wire import ElasticWire
from lightning_sparsecomm.run.gathered import gather_texts
from lightning_sparsecomm.run.optimizers import TrackedOptimizer
from lightning_sparsecomm.run.registry import Registry
from lightning_sparsecomm.sharing.delta_share import DeltaShare
from lightning_sparsecomm.sharing.share import Turn

_CPU = torch.device("cpu")


def introduced(
    own: Member, registry: Registry, compare_every: int | None, quorum: Connections, wire: ElasticWire
) -> list[Member]:
    """What all members of the quorum say, by rank. A collective.

    Args:
        own: What this one says, but for what follows from `registry`: steps, what trains, and weights.
        registry: Its optimizers.
        compare_every: Rounds between two comparisons of weights; None for none.
        quorum, wire: Of this replica.
    """
    compares = compare_every is not None and own.round and own.round % compare_every == 0 and not own.pending
    own = own._replace(
        steps=registry.steps,
        setup=own.setup | _trained_by(registry),
        weights=_weights_in_common(registry) if compares else "",
    )
    ranks = range(quorum.size)
    with wire.among(quorum.group_of(ranks), ranks, quorum.rank):
        return [Member.from_json(text) for text in gather_texts(own.to_json(), wire, _CPU, MEMBERSHIP)]


def check_place(plan: Plan, members: Sequence[Member], rank: int) -> None:
    """Warns a replica whose weights differ; raises `ValueError` on one that is set up otherwise than the others."""
    if rank in plan.refused:
        raise ValueError(
            f"{plan.refused[rank]} must be equal on all replicas; that of {members[plan.leader].name} differs."
            " Start this replica with the same versions, model, method and arguments; if parameters are frozen or"
            " unfrozen during training, start it before that."
        )
    alike = [member.name for member in members if short(member.name) == short(members[rank].name)]
    if len(alike) > 1 and (plan.round == 0 or rank in plan.joining):
        warnings.warn(
            f"{len(alike)} replicas are named {short(members[rank].name)!r}: messages cannot tell them apart. Give"
            " each a name of its own: replica=...",
            stacklevel=2,
        )
    if rank in plan.differing:
        warnings.warn(
            f"after round {plan.round}, this replica's weights differ from those of most others: other code than the"
            " optimizer has changed them here. It gets theirs now.",
            stacklevel=2,
        )


def offer_of(
    tracked: TrackedOptimizer,
    turn: Turn,
    wanted: list[int],
    length: float,
    step_seconds: float = 0.0,
    stale: bool = False,
) -> Offer:
    """What a replica offers to exchange in a turn.

    Args:
        tracked: The optimizer.
        turn: This replica's own.
        wanted: Numbers of the units that are due.
        length: Optimizer steps of the whole run; infinite where unknown.
        step_seconds: Seconds that a step takes here.
        stale: Whether its gradients are of other weights than those that it shares.
    """
    units, gradients = units_of(tracked), turn.kind == "gradients"
    settings = settings_of(tracked.optimizer) if gradients else ()
    trained, since, samples = int(not stale), 0, 0 if stale else tracked.samples.next
    if not gradients:
        weights = [unit for number in wanted if isinstance(unit := units[number], DeltaShare)]
        trained = trained_since(weights)
        since = max((unit.steps for unit in weights if unit.trained > unit.steps), default=0)
        samples = tracked.samples.behind(trained)
    return Offer(
        optimizer=tracked.number,
        units=wanted,
        kind=turn.kind,
        step=turn.step,
        epoch=turn.epoch,
        length=turn.length,
        trained=trained,
        step_seconds=step_seconds,
        settings=settings,
        since=since,
        samples=_known(samples),
        samples_since=_known(tracked.samples.behind(since)),
        last=turn.step + 1 >= length,
    )


def _known(samples: float) -> int | None:
    return None if math.isnan(samples) else int(samples)


def _trained_by(registry: Registry) -> dict[str, str]:
    """By topic of set-up, a digest of the names of what an optimizer trains; nothing before its first step.

    Each optimizer is a topic of its own: amid the first batch, one may know its parameters, and another not yet.
    """
    topics = {}
    for tracked in registry.optimizers:
        names = [name for name, _ in tracked.parameters]
        if names:
            which = f" by optimizer {tracked.number}" if len(registry.optimizers) > 1 else ""
            topics[f"the parameters that train{which}"] = _short(repr(names).encode())
    return topics


def _weights_in_common(registry: Registry) -> str:
    """A digest of the weights that are equal on all replicas after each step; empty where there are none."""
    equal = [parameter for each in registry.optimizers if not each.drifts for _, parameter in each.parameters]
    return _short("".join(map(digest_of, equal)).encode()) if equal else ""


def _short(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
