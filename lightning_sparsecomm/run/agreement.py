"""Checks that ranks were set up alike and share the same weights; errors say what each rank has."""

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_sparsecomm.basis.digests import digest_of
from lightning_sparsecomm.basis.ledger import COMPARISON, SETUP
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.codecs.payload import FORMAT_VERSION
from lightning_sparsecomm.run.gathered import as_tensor, gather_texts
from lightning_sparsecomm.run.nodes import Groups
from lightning_sparsecomm.run.optimizers import parameters_of, rate_in
from lightning_sparsecomm.run.registry import Registry
from lightning_sparsecomm.sharing.gradients import NamedParameters
from lightning_sparsecomm.sharing.method import Method

CHECK_REPLICAS_EVERY = 1000
"""Optimizer steps between two comparisons by default. They cost less than 0.1% of these steps' time."""

_INSTALL = "Install the same version on all ranks."
_ARGUMENTS = "Make the strategy with the same arguments on all ranks."
_MODEL = "Build the same model, and freeze the same parameters, on all ranks."
_CHANGED = (
    "Look for code that changes it on some ranks only, in a callback or a hook, for example. Different machines may"
    " also round differently."
)
_RATES = "If a scheduler follows a metric, log that with sync_dist=True."
_OPTIMIZERS = "Give the same parameters to the same optimizers, in the same order, on all ranks."

# The default repr of an object holds its address, which differs between processes that are set up alike.
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")
_ABSENT = "none"
_LONG, _CONTEXT = 160, 60


class ReplicaError(RuntimeError):
    """Ranks that should share weights hold different ones. Raised on all ranks.

    It names the first learning rate that differs, too, or else the first such parameter.

    >>> issubclass(ReplicaError, RuntimeError)  # a loop may catch it: all ranks raise it in the same step
    True
    """


class Fact(NamedTuple):
    """Something that must be equal on all ranks: its name, this rank's value, and what to do if another's differs."""

    topic: str
    value: str
    remedy: str


class Agreement:
    """Compares what ranks were set up with, and the weights that they should share; see `require_agreement`.

    Attributes:
        run: A random number of this run, equal on all ranks after `on_setup`; 0 before.
        arguments: Further arguments of the strategy that must be equal, with their names.
    """

    def __init__(
        self, registry: Registry, wire: Wire, seed: int, check_replicas_every: int | None, scales_loss: bool
    ) -> None:
        self.run = 0
        self.arguments: dict[str, object] = {}
        self._registry = registry
        self._wire = wire
        self._settings = seed, check_replicas_every, scales_loss

    def on_setup(self) -> None:
        """Refuses ranks that differ in version, method, seed or parameters. A collective, to be called first."""
        facts = facts_of_run(self._registry.methods[0], self._registry.named, *self._settings)
        facts += [Fact(name, str(value), _ARGUMENTS) for name, value in self.arguments.items()]
        require_agreement(facts, self._wire, self._device)
        if not self.run:
            self.run = secrets.randbits(63)
            if self._wire.world_size > 1:
                self.run = int(self._wire.all_gather(torch.tensor([self.run], device=self._device), SETUP)[0])

    def on_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Refuses ranks whose optimizers differ. A collective."""
        require_agreement(facts_of_optimizers(optimizers, self._registry.named), self._wire, self._device)

    def on_weights(self, shared: Sequence[tuple[int, Mapping[int, Tensor]]]) -> None:
        """Refuses ranks whose weights differ. A collective, if there are weights to compare.

        `shared` pairs an optimizer's finished steps with its weights, by the identity of the parameter.
        """
        self._compare(shared, ())

    def on_nodes(self, shared: Sequence[tuple[int, Mapping[int, Tensor]]]) -> None:
        """Refuses ranks whose weights differ within a node; as `on_weights`, and raised on all ranks of all nodes."""
        self._compare(shared, self._registry.nodes.groups if self._registry.nodes is not None else ())

    def _compare(self, shared: Sequence[tuple[int, Mapping[int, Tensor]]], alike: Groups) -> None:
        if self._wire.world_size == 1:
            return
        facts = [
            Fact(f"parameter {name!r} after optimizer step {steps}", f"digest {digest_of(weights[key])}", _CHANGED)
            for steps, weights in shared
            for key, (name, _) in self._registry.known.items()
            if key in weights
        ]
        if facts:
            causes = facts_of_rates([tracked.optimizer for tracked in self._registry.optimizers])
            require_agreement(facts, self._wire, self._device, COMPARISON, ReplicaError, alike, causes)

    def on_length(self, steps: float, may_end_sooner: bool) -> tuple[float, bool]:
        """The least number of steps that any rank expects to make, and whether any of them may end sooner."""
        expected = torch.tensor([steps, may_end_sooner], dtype=torch.float64, device=self._device)
        lengths, sooner = self._wire.all_gather(expected, SETUP).unbind(1)
        return float(lengths.min()), bool(sooner.any())

    @property
    def _device(self) -> torch.device:
        return next((parameter.device for _, parameter in self._registry.named), torch.device("cpu"))


def plain_repr(method: Method) -> str:
    """The method's `repr` without addresses: equal in all processes that make it with the same arguments."""
    return _ADDRESS.sub("", repr(method))


def facts_of_run(
    method: Method, parameters: NamedParameters, seed: int, check_replicas_every: int | None, scales_loss: bool
) -> list[Fact]:
    """What exchanges depend on: versions, the strategy's arguments, and the model's parameters."""
    # The package imports this module before it sets its version.
    from lightning_sparsecomm import __version__

    facts = [
        Fact("the version of lightning_sparsecomm", __version__, _INSTALL),
        Fact("the version of torch", torch.__version__, _INSTALL),
        Fact("the version of the payload format", str(FORMAT_VERSION), _INSTALL),
        Fact("method", plain_repr(method), _ARGUMENTS),
        Fact("seed", str(seed), _ARGUMENTS),
        Fact("check_replicas_every", str(check_replicas_every), _ARGUMENTS),
        Fact("the loss scaler", "one" if scales_loss else _ABSENT, "Train with the same precision on all ranks."),
    ]
    for name, parameter in parameters:
        shape = "of no shape yet" if is_lazy(parameter) else f"of shape {tuple(parameter.shape)}"
        trained = "trained" if parameter.requires_grad else "frozen"
        facts.append(Fact(f"parameter {name!r}", f"{parameter.dtype} {shape}, {trained}", _MODEL))
    return facts


def facts_of_optimizers(optimizers: Sequence[Optimizer], parameters: NamedParameters) -> list[Fact]:
    """The list of optimizers, and which of them hold each parameter."""
    kinds = [type(optimizer).__name__ for optimizer in optimizers]
    facts = [Fact("the list of optimizers", ", ".join(kinds) or _ABSENT, _OPTIMIZERS)]
    held = [{id(parameter) for parameter in parameters_of(optimizer)} for optimizer in optimizers]
    for name, parameter in parameters:
        holders = [f"number {i} ({kinds[i]})" for i, members in enumerate(held) if id(parameter) in members]
        facts.append(Fact(f"the optimizer of parameter {name!r}", " and ".join(holders) or _ABSENT, _OPTIMIZERS))
    return facts


def facts_of_rates(optimizers: Sequence[Optimizer]) -> list[Fact]:
    """The learning rates of all param groups."""
    return [
        Fact(f"the learning rate of optimizer {number}'s group {place}", _as_text(rate_in(group)), _RATES)
        for number, optimizer in enumerate(optimizers)
        for place, group in enumerate(optimizer.param_groups)
    ]


def _as_text(rate: float | None) -> str:
    return _ABSENT if rate is None else f"{rate:.6g}"


def require_agreement(
    facts: Sequence[Fact],
    wire: Wire,
    device: torch.device,
    row: str = SETUP,
    error: type[Exception] = ValueError,
    alike: Groups = (),
    causes: Sequence[Fact] = (),
) -> None:
    """Refuses ranks whose facts differ. A collective; each rank hands over 32 bytes if all agree.

    Args:
        facts: What this rank has.
        wire: Between all ranks.
        device: Where to communicate.
        row: Of the ledger.
        error: What to raise.
        alike: Ranks that must have equal facts, in groups; empty for all of them.
        causes: What may differ by itself, and is named first where facts differ.

    Raises:
        Exception: Facts differ. An `error`, raised on all ranks with one message, which names the first difference.
    """
    if wire.world_size == 1:
        return
    # Other versions of this package must be able to read this: three strings for each fact.
    text = json.dumps(facts)
    digests = wire.all_gather(as_tensor(hashlib.sha256(text.encode()).digest(), device), row)
    groups = alike or [range(wire.world_size)]
    differing = [group for group in groups if not bool((digests[list(group)] == digests[group[0]]).all())]
    if not differing:
        return
    texts = gather_texts(json.dumps([*causes, *facts]), wire, device, row)
    found = [[Fact(*fact) for fact in json.loads(texts[rank])] for rank in differing[0]]
    raise error(_difference(found, differing[0] if alike else ()))


def _difference(ranks: Sequence[Sequence[Fact]], node: Sequence[int] = ()) -> str:
    """The first difference in words, equal on all ranks. `node` has their numbers, where they are those of a node."""
    values = [{fact.topic: fact.value for fact in facts} for facts in ranks]
    # Rank 0's facts first, then those that only other ranks have.
    for fact in (fact for facts in ranks for fact in facts):
        found = [known.get(fact.topic, _ABSENT) for known in values]
        if len(set(found)) > 1:
            return _words(fact.topic, found, fact.remedy, node)
    columns = zip(*ranks, strict=True)
    column = next(column for column in columns if len({fact.topic for fact in column}) > 1)
    return _words("the order of parameters", [f"{fact.topic} earlier" for fact in column], _MODEL, node)


def _words(topic: str, found: Sequence[str], remedy: str, node: Sequence[int]) -> str:
    holders: dict[str, list[str]] = {}
    for rank, value in zip(node or range(len(found)), _shortened(found)):
        holders.setdefault(value, []).append(str(rank))
    parts = [f"{value} on rank{'s' * (len(who) > 1)} {', '.join(who)}" for value, who in holders.items()]
    words = f"{topic} must be equal on all ranks; got {'; '.join(parts)}. {remedy}"
    return words.replace("on all ranks;", "on all ranks of a node;", 1) if node else words


def _shortened(texts: Sequence[str]) -> list[str]:
    """Long texts without most of their common beginning and end."""
    if max(map(len, texts)) <= _LONG:
        return list(texts)
    start = max(0, _common_prefix(texts) - _CONTEXT)
    end = max(0, _common_prefix([text[start:][::-1] for text in texts]) - _CONTEXT)
    before, behind = "…" if start else "", "…" if end else ""
    return [before + text[start : len(text) - end] + behind for text in texts]


def _common_prefix(texts: Sequence[str]) -> int:
    """How many characters all texts begin with."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*texts)))
