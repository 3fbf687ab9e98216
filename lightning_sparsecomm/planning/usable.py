"""What a run can choose among: the methods that it can use, and what each would compute and send."""

import math
import warnings
from collections.abc import Mapping

from lightning_sparsecomm.planning.rehearsed import Kinds, Rehearsed, rehearse
from lightning_sparsecomm.run.choice import method_for
from lightning_sparsecomm.run.clipping import check_trainers_clipping
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.following import can_step_alone
from lightning_sparsecomm.sharing.bucket import BucketSync
from lightning_sparsecomm.sharing.method import Method


def usable(choices: Mapping[str, Method], engine: Engine) -> dict[str, Method]:
    """The methods that are defined for the run's optimizers and its clipping."""
    found: dict[str, Method] = {}
    registry = engine.registry
    for name, method in choices.items():
        if registry.ignored and not isinstance(method.syncs[0], BucketSync):
            # Their optimizer's momentum cannot be taken over.
            continue
        chain = method.chain
        try:
            held = ((tracked.optimizer, registry.held_by(tracked.optimizer)) for tracked in registry.optimizers)
            chosen = [method_for(optimizer, chain, named) for optimizer, named in held]
            if engine.max_norm is not None:
                check_trainers_clipping(chosen, engine.max_norm, registry.clips_by_value)
        except (TypeError, ValueError):
            # What cannot be used is no choice; used by itself, it says why.
            continue
        if can_step_alone(registry) or not any(sync.anchored for each in chosen for sync in each.syncs):
            found[name] = method
    return found


def without_buckets(choices: Mapping[str, Method]) -> dict[str, Method]:
    """Those methods that do not work in DDP's buckets."""
    return {name: method for name, method in choices.items() if not isinstance(method.syncs[0], BucketSync)}


def trained_by(engine: Engine) -> Kinds:
    """The run's optimizers, with the parameters that they train. Nothing is sent for those that are frozen."""
    kinds = []
    for tracked in engine.registry.optimizers:
        held = engine.registry.held_by(tracked.optimizer)
        # In manual optimization, those of another optimizer's turn may be frozen just now.
        trained = [each for each in held if each[1].requires_grad or id(each[1]) in tracked.noted]
        if trained:
            kinds.append((tracked.optimizer, trained))
    return kinds


def rehearsals(
    choices: Mapping[str, Method], kinds: Kinds, ranks: int, length: float = math.inf
) -> dict[str, Rehearsed]:
    """Each method's rehearsal. One that cannot be rehearsed is left out, with a warning that says why."""
    found: dict[str, Rehearsed] = {}
    for name, method in choices.items():
        try:
            found[name] = rehearse(method, kinds, ranks, length)
        except Exception as error:
            # A part from outside may need what only a real run has.
            warnings.warn(
                f"methods.auto does not try {name}, since its rehearsal has failed: {error!r}. Use it by itself, as"
                " SparseCommStrategy(method=...).",
                stacklevel=2,
            )
    return found
