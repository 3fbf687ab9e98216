"""Rounds of communication that the laws of exchanges and memories are checked in."""

import io
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparsecomm.basis.layout import Layout, SparseVector
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.channel import Channel, Memory, MomentumRule, StepSettings
from lightning_sparsecomm.exchange import Exchange
from lightning_sparsecomm.testing.laws import check_close, equal_bits, law
from lightning_sparsecomm.testing.samples import LAYOUT

ROUNDS = 5
ROUND_OFF = 1e-5
NAMES = [segment.name for segment in LAYOUT.segments]
# Absent in the last round on the last rank, and in round 2 on all ranks.
ABSENT_ON_ONE, ABSENT_ON_ALL = 0, 1

State = dict[str, dict[str, Tensor]]


class Outcome(NamedTuple):
    """What one rank has of one round: `shared` and `sent`, each `[n]`, and which tensors are present on any rank."""

    shared: Tensor
    sent: Tensor
    present: list[bool]


def gradients_of(rank: int, step: int, world_size: int, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    """A rank's gradients in one round: some are absent, on one rank or on all, and some are zero."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    gradients: list[Tensor | None] = [
        torch.randn(segment.shape, generator=generator, dtype=dtype) for segment in LAYOUT.segments
    ]
    if step == ROUNDS - 1 and rank == world_size - 1:
        gradients[ABSENT_ON_ONE] = None
    if step == 2:
        gradients[ABSENT_ON_ALL] = None
    if step == 3:
        gradients = [None if part is None else torch.zeros_like(part) for part in gradients]
    return gradients


def settings_of(gradients: Sequence[Tensor | None]) -> StepSettings:
    """What an optimizer with momentum prescribes for a step with these gradients."""
    norm = math.sqrt(sum(float(part.square().sum()) for part in gradients if part is not None))
    return StepSettings([MomentumRule(0.9)] * len(gradients), norm)


def context_of(step: int, wire: Wire, layout: Layout = LAYOUT, dtype: torch.dtype = torch.float32) -> Round:
    """The context of one round."""
    return Round(layout, step, step / 100, 7, wire.rank, wire.world_size, dtype=dtype)


def bound(exchange: Exchange, memories: Sequence[Memory] = (), dtype: torch.dtype = torch.float32) -> Channel:
    """A channel that is ready for rounds of `gradients_of`."""
    channel = Channel(exchange, memories).fresh()
    channel.bind(LAYOUT, dtype, torch.device("cpu"))
    return channel


def reduced(channel: Channel, step: int, wire: Wire, settings: StepSettings = StepSettings()) -> Outcome:  # noqa: B008
    """What a whole round of `gradients_of` leads to."""
    gradients = gradients_of(wire.rank, step, wire.world_size, channel.dtype)
    exchanged = channel.reduce(gradients, context_of(step, wire, dtype=channel.dtype), wire, settings)
    shared, sent = (x.dense() if isinstance(x, SparseVector) else x.clone() for x in exchanged[:2])
    return Outcome(shared, sent, exchanged.present)


def prepare_another(channel: Channel, step: int, wire: Wire) -> None:
    """Prepares a round of other gradients."""
    gradients = [None if part is None else part + 1 for part in gradients_of(wire.rank, step + 50, wire.world_size)]
    channel.prepare(gradients, context_of(step, wire, dtype=channel.dtype), wire, settings_of(gradients))


def saved(channel: Channel) -> State:
    """A copy of what the channel holds, as it comes back from a file."""
    file = io.BytesIO()
    torch.save(channel.state_dict(), file)
    file.seek(0)
    state: State = torch.load(file)
    return state


def resumed(channel: Channel, fresh: Channel) -> Channel:
    """`fresh`, with what `channel` holds."""
    state = saved(channel)
    fresh.load_state_dict(state, NAMES)
    left = [f"{kind} of {name!r}" for kind, tensors in state.items() for name in tensors]
    law(not left, f"load_state_dict must take over what state_dict returned; it left {', '.join(left)}")
    return fresh


def check_equal(before: State, after: State, sentence: str, where: str, tolerance: float = 0.0) -> None:
    """Raises an AssertionError that says which tensors of a saved state differ: in a bit, or by a tolerance."""
    names = {(kind, name) for state in (before, after) for kind, tensors in state.items() for name in tensors}
    for kind, name in sorted(names):
        one, other = before.get(kind, {}).get(name), after.get(kind, {}).get(name)
        law(one is not None and other is not None, f"{sentence}: {kind} of {name!r} comes or goes, {where}")
        assert one is not None and other is not None
        if tolerance and one.shape == other.shape and one.dtype.is_floating_point:
            check_close(one, other, tolerance, f"{sentence}: {kind} of {name!r}", where)
        else:
            law(equal_bits(one, other), f"{sentence}: {kind} of {name!r} differs, {where}")
