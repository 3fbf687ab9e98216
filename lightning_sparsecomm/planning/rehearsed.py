"""What a method costs a rank besides the network: one process plays a few steps on a small model of the same shape."""

import copy
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sparsecomm.basis.ledger import Collective, link_bytes
from lightning_sparsecomm.basis.mirror import MirrorWire
from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.basis.phases import PHASES
from lightning_sparsecomm.planning import stand_ins
from lightning_sparsecomm.planning.exchanges import LATE, every_late, first_steps, share_of_exchanges
from lightning_sparsecomm.planning.model_layout import ddp_buckets
from lightning_sparsecomm.planning.stand_ins import HALVED, HALVED_TABLES, extrapolated, features, stand_in
from lightning_sparsecomm.run.choice import method_for
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.rehearsal import alike, own_randomness
from lightning_sparsecomm.sharing.bucket import BucketSync
from lightning_sparsecomm.sharing.delta import DeltaSync
from lightning_sparsecomm.sharing.delta_share import DeltaShare
from lightning_sparsecomm.sharing.gradient import GradientSync
from lightning_sparsecomm.sharing.gradients import NamedParameters, has_few_rows
from lightning_sparsecomm.sharing.method import Method

# Elements of the small model.
_ELEMENTS = 4_000_000

# In the first step buffers are touched for the first time; only from the second on does a residual hold something.
_WARM_UP_STEPS, _STEPS = 2, 3

# More exchanges of weights than this are not rehearsed, however rarely moments are averaged.
_LONGEST_PERIOD = 60

# Of `features`, the first that are numbers of elements.
_SIZES_FROM = 3

# A step of the first stage, where the exchange of that is another one.
_FIRST = 0


Kinds = Sequence[tuple[Optimizer, NamedParameters]]
"""Optimizers, with the parameters that each trains."""

Small = Callable[[Parameter], Parameter]
"""Makes the stand-in of a parameter."""


@dataclass(frozen=True)
class Rehearsed:
    """One step of a method on one rank, without the network; all figures are means per optimizer step.

    Attributes:
        name: The method, as it was called.
        ranks: Number of ranks that it was rehearsed for.
        seconds: Of this processor, by phase.
        calls: Collectives, each with the bytes that this rank hands over, and how often it takes place per step.
        held_bytes: What the method keeps from step to step.
        overlaps: Whether communication takes place during the backward pass, in DDP's buckets.
    """

    name: str
    ranks: int
    seconds: dict[str, float]
    calls: tuple[tuple[Collective, float, float], ...]
    held_bytes: float
    overlaps: bool

    @property
    def computing(self) -> float:
        """Seconds of this processor."""
        return sum(self.seconds.values())

    @property
    def link_bytes(self) -> float:
        """Bytes that a rank puts on the link."""
        return sum(often * link_bytes(kind, size, self.ranks) for kind, size, often in self.calls)


def rehearse(
    method: Method,
    kinds: Kinds,
    ranks: int,
    length: float = math.inf,
    elements: int = _ELEMENTS,
    timed: bool = True,
) -> Rehearsed:
    """Plays steps of a method on small stand-ins of parameters, as if all ranks sent what this one does.

    Bytes and seconds are scaled to the size of the parameters. Ranks' payloads are taken to be alike, so what depends
    on how far their choices differ, such as the union of S2 Reducer's blocks, is underestimated.

    Args:
        method: The method; it stays as it is.
        kinds: Optimizers, with the parameters that each trains.
        ranks: Number of ranks to play.
        length: Optimizer steps of the run, which densities may follow; infinite where unknown.
        elements: Most elements of the stand-ins, as far as matrices of 128 rows and columns allow it.
        timed: Whether seconds are wanted, which takes more steps, and stand-ins for all tensors.

    Raises:
        TypeError: The method is not defined for one of the optimizers.
    """
    if isinstance(method.syncs[0], BucketSync):
        return _rehearse_buckets(method, [p for _, named in kinds for _, p in named], ranks)
    parameters = [parameter for _, named in kinds for _, parameter in named]
    if not timed:
        kinds = [(optimizer, stand_ins.few_of_each_shape(method, named)) for optimizer, named in kinds]
    taken = [parameter for _, named in kinds for _, parameter in named]
    fraction = stand_ins.fraction_for(taken, elements)
    takes_few = any(sync.takes_few_rows for sync in parts_in(method, GradientSync))
    by_rows = takes_few and any(map(has_few_rows, taken))
    with own_randomness(kinds), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        if fraction == 1 and len(taken) == len(parameters):
            result, _ = _play(method, kinds, ranks, length, partial(stand_in, by_rows=by_rows), timed)
        else:
            sets, ends = (*HALVED, HALVED_TABLES) if by_rows else HALVED, (HALVED[0], HALVED[-1], HALVED_TABLES)
            smaller = [(each, partial(stand_in, fraction=fraction, halved=each, by_rows=by_rows)) for each in sets]
            plays = [_play(method, kinds, ranks, length, small, timed and each in ends) for each, small in smaller]
            result = _of_whole(features(parameters, by_rows), plays)
    return replace(result, name=repr(method))


def _of_whole(whole: Sequence[float], plays: Sequence[tuple[Rehearsed, Sequence[float]]]) -> Rehearsed:
    """What a step takes with parameters of these features, by what it took with several sets of smaller ones."""
    (result, played), *smaller = plays
    sizes, seconds = range(_SIZES_FROM, len(whole)), dict(result.seconds)
    # The smallest set, and the one with smaller tables.
    for least, less in smaller[len(HALVED) - 2 :]:
        halved = [size for size in sizes if less[size] < played[size]]
        total, more, fewer = (sum(each[size] for size in halved) for each in (whole, played, less))
        # A part of what a step takes does not grow with the model.
        grown = (total - more) / (more - fewer) if halved else 0.0
        for name, value in result.seconds.items():
            seconds[name] += grown * max(0.0, value - least.seconds[name])
    calls = result.calls
    sets = [each for _, each in plays]
    if all([kind for kind, _, _ in each.calls] == [kind for kind, _, _ in calls] for each, _ in plays):
        columns = zip(*(each.calls for each, _ in plays))
        sent = [extrapolated([size for _, size, _ in column], sets, whole) for column in columns]
    else:
        # Lengths and statuses do not grow with the model.
        grown = sum(whole[size] for size in sizes) / sum(played[size] for size in sizes)
        sent = [size * grown if size > 256 else size for _, size, _ in calls]
    calls = tuple((kind, size, often) for (kind, _, often), size in zip(calls, sent))
    held_bytes = extrapolated([each.held_bytes for each, _ in plays], sets, whole)
    return replace(result, seconds=seconds, calls=calls, held_bytes=held_bytes)


def _play(
    method: Method, kinds: Kinds, ranks: int, length: float, small: Small, timed: bool
) -> tuple[Rehearsed, Sequence[float]]:
    """A step on smaller stand-ins, and their features."""
    chain = method.chain
    chosen = [method_for(optimizer, chain, named) for optimizer, named in kinds]
    every = every_late(chosen, length)
    stage = _Stage(method, kinds, ranks, length, small, _STEPS if timed else 1)
    # Gradients are exchanged in steps that `every` divides, weights so many steps after the last time.
    last = LATE - LATE % every
    between = stage.play(0, last + 1) if every > 1 else None
    held_between = stage.held_bytes()
    due = stage.play(every - 1, last, every)
    result = due if between is None else _mixed(between, due, share_of_exchanges(chosen, every, length))
    first = first_steps(chosen, length)
    if first:
        result = _mixed(stage.play(0, _FIRST), result, 1 - min(first, length) / length)
    result = replace(result, held_bytes=max(held_between, stage.held_bytes()))
    stage.close()
    return result, features(stage.weights, by_rows=True)


class _Stage:
    """An engine on a wire without a network, with stand-ins for the parameters."""

    def __init__(self, method: Method, kinds: Kinds, ranks: int, length: float, small: Small, steps: int) -> None:
        self.ranks = ranks
        self.steps = steps
        self.wire = MirrorWire(ranks)
        method = copy.deepcopy(method)
        # Exchanges of weights average other moments each time; after so many, all have had their turns.
        moments = [every for sync in parts_in(method, DeltaSync) for every in sync.moments.values()]
        self._period = min(math.lcm(*moments), _LONGEST_PERIOD)
        for sync in parts_in(method, DeltaSync):
            # On average over steps, fragments send and compute what one exchange of all does, and so does a late one.
            sync.fragments, sync.delay = 1, 0
        for late in parts_in(method, GradientSync):
            late.delay = 0
        self.engine = Engine(method, self.wire)
        self.optimizers: list[Optimizer] = []
        for optimizer, parameters in kinds:
            named = [(name, small(parameter)) for name, parameter in parameters]
            self.engine.registry.known |= {id(parameter): (name, parameter) for name, parameter in named}
            weights = [parameter for _, parameter in named]
            self.optimizers.append(alike(optimizer, weights))
        self.weights = [weight for each in self.optimizers for group in each.param_groups for weight in group["params"]]
        self.engine.length = length
        self._gradients = itertools.cycle([list(map(stand_ins.gradient_for, self.weights)) for _ in range(3)])

    def play(self, local: int, step: int = LATE, apart: int = 0) -> Rehearsed:
        """Some repetitions of a late step, or of another one, so many steps after an exchange of weights.

        They are that step itself, or steps so far `apart`.
        """
        times: list[dict[str, float]] = []
        played: list[tuple[Collective, float]] = []
        period = self._period if local or apart else 1
        for repetition in range(_WARM_UP_STEPS + max(self.steps, period)):
            clock = self.wire.ledger.clock
            clock.seconds = dict.fromkeys(PHASES, 0.0)
            self.wire.calls.clear()
            self.engine.epoch = LATE
            for weight, gradient in zip(self.weights, next(self._gradients)):
                weight.grad = gradient.clone()
            for optimizer in self.optimizers:
                tracked = self.engine.register(optimizer)
                tracked.steps = step + apart * repetition
                for share in tracked.shares.values():
                    if isinstance(share, DeltaShare):
                        share.steps = local
                with self.engine.stepping(optimizer):
                    self.engine.closure(optimizer, lambda: None)()
                    optimizer.step()
            if repetition >= _WARM_UP_STEPS:
                times.append(clock.seconds)
                played += self.wire.calls if len(times) <= period else ()
        seconds = {name: statistics.median(each[name] for each in times) for name in PHASES}
        calls = tuple((kind, float(size), 1 / period) for kind, size in played)
        return Rehearsed("", self.ranks, seconds, calls, 0.0, overlaps=False)

    def held_bytes(self) -> float:
        """Bytes of all state that the shares hold."""
        shares = (share for tracked in self.engine.registry.optimizers for share in tracked.shares.values())
        kinds = (parts for share in shares for parts in share.state_dict().values())
        return float(sum(held.nbytes for parts in kinds for held in parts.values() if isinstance(held, Tensor)))

    def close(self) -> None:
        self.engine.guards.close()
        for tracked in self.engine.registry.optimizers:
            tracked.end_takeover()


def _mixed(between: Rehearsed, due: Rehearsed, share: float) -> Rehearsed:
    """Means per step, where this share of the steps has an exchange."""
    seconds = {name: (1 - share) * between.seconds[name] + share * due.seconds[name] for name in PHASES}
    calls = tuple((kind, size, often * (1 - share)) for kind, size, often in between.calls)
    calls += tuple((kind, size, often * share) for kind, size, often in due.calls)
    return replace(due, seconds=seconds, calls=calls)


def _rehearse_buckets(method: Method, parameters: Sequence[Parameter], ranks: int) -> Rehearsed:
    """DDP's buckets: what its hook computes on each, besides the sum."""
    sync = method.syncs[0]
    assert isinstance(sync, BucketSync)
    sizes = [sum(p.numel() * sync.dtype(p).itemsize for p in bucket) for bucket in ddp_buckets(parameters)]
    calls: list[tuple[Collective, float, float]] = [("all_reduce", float(size), 1.0) for size in sizes]
    computing = 0.0
    if sync.wire_dtype != "same":
        sample = torch.zeros(_ELEMENTS)
        begin = time.perf_counter()
        sample.copy_(sample.to(sync.dtype(sample)))
        computing = (time.perf_counter() - begin) * sum(p.numel() for p in parameters) / _ELEMENTS
    seconds = dict.fromkeys(PHASES, 0.0) | {"update": computing}
    return Rehearsed(repr(method), ranks, seconds, tuple(calls), 0.0, overlaps=True)
