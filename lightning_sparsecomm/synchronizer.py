"""A method at work on one training run: whose gradients are shared, and when. Knows torch, but not Lightning."""

import copy
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_sparsecomm.gradients import NamedParameters
from lightning_sparsecomm.layout import Layout
from lightning_sparsecomm.methods import Method
from lightning_sparsecomm.rounds import Round
from lightning_sparsecomm.sync import BucketSync, Sync, matches
from lightning_sparsecomm.wire import Wire

T = TypeVar("T")


@dataclass
class _Stream:
    """One optimizer's gradients on their way.

    Attributes:
        optimizer: Whose gradients.
        steps: How often they have been shared.
        shared: Whether they are shared for the coming step.
        members: Identities of the parameters that have required a gradient.
        pieces: The same parameters, by the sync that they belong to.
        written: Version counters of the gradients when the last backward pass ended.
    """

    optimizer: Optimizer
    steps: int = 0
    shared: bool = False
    members: set[int] = field(default_factory=set)
    pieces: list[tuple[Sync, NamedParameters, Layout]] = field(default_factory=list)
    written: list[int] = field(default_factory=list)

    def gradients(self) -> list[tuple[Tensor | None, int]]:
        """The gradients with their version counters: equal lists mean that nothing has written to them."""
        parameters = [parameter for _, piece, _ in self.pieces for _, parameter in piece]
        return [(p.grad, -1 if p.grad is None else p.grad._version) for p in parameters]


def _same(before: list[tuple[Tensor | None, int]], after: list[tuple[Tensor | None, int]]) -> bool:
    return all(a[0] is b[0] and a[1] == b[1] for a, b in zip(before, after))


class Synchronizer:
    """Shares the gradients of an optimizer once per step, on the first call of whoever needs them shared.

    Args:
        method: The recipe. Its syncs are copied, so that it can serve again.
        wire: Where to communicate.
        seed: Seed of the method's randomness, equal on all ranks.
    """

    def __init__(self, method: Method, wire: Wire, seed: int = 0) -> None:
        self.syncs: tuple[Sync, ...] = copy.deepcopy(method.syncs)
        self.wire = wire
        self.seed = seed
        self.epoch = 0.0
        self._modules: list[nn.Module] = []
        self._known: dict[int, tuple[str, Parameter]] = {}
        self._ignored: set[int] = set()
        self._streams: list[_Stream] = []
        self._depth = 0
        # A global hook, so that no optimizer slips past: not one made later, nor one stepped behind Lightning's back.
        # It holds us weakly: nobody closes a Fabric run.
        watched = weakref.ref(self)

        def refuse_bypass(optimizer: Optimizer, *_: object) -> None:
            synchronizer = watched()
            if synchronizer is not None:
                synchronizer._refuse_bypass(optimizer)

        guard = None if self.buckets else register_optimizer_step_pre_hook(refuse_bypass)
        self._release = weakref.finalize(self, guard.remove) if guard is not None else None

    @property
    def buckets(self) -> BucketSync | None:
        """The sync that works inside DDP's hook, where the method has one."""
        sync = self.syncs[0]
        return sync if isinstance(sync, BucketSync) else None

    def add_module(self, module: nn.Module) -> None:
        """Takes in a module whose parameters train. The names of a second module's get a prefix.

        Raises:
            TypeError: The module holds something that no method can take.
        """
        self._modules.append(module)
        self._scan()
        for name, part in module.named_modules():
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
                raise TypeError(
                    f"embedding {name!r} has sparse=True, and this method cannot take sparse gradients."
                    " Build it with sparse=False, or use strategy='ddp'."
                )

    def _scan(self) -> None:
        for index, module in enumerate(self._modules):
            prefix = f"module_{index}." if index else ""
            left_out: set[str] = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
            for name, parameter in module.named_parameters():
                if name in left_out:
                    self._ignored.add(id(parameter))
                    continue
                if parameter.is_complex():
                    raise TypeError(
                        f"parameter {prefix + name!r} is complex, which no method can take. Hold it as a real tensor"
                        " (torch.view_as_real), or use strategy='ddp'."
                    )
                self._known.setdefault(id(parameter), (prefix + name, parameter))

    def check(self) -> None:
        """Refuses patterns that match nothing, and parameters that belong to no sync or to several.

        Raises:
            ValueError: As said, naming the pattern or the parameter.
        """
        names = [name for name, _ in self._known.values()]
        for sync in self.syncs:
            for option, patterns in (("parameters", sync.parameters), ("exclude", sync.exclude)):
                for pattern in patterns:
                    if not any(matches(name, (pattern,)) for name in names):
                        raise ValueError(
                            f"{option}: the pattern {pattern!r} matches no parameter. Patterns are shell-style and"
                            f" match whole names; the names are {_some(names)}."
                        )
        for name, parameter in self._known.values():
            claiming = sum(sync.claims(name, parameter) for sync in self.syncs)
            if claiming != 1:
                raise ValueError(
                    f"each parameter must belong to exactly one sync; {name!r} belongs to {claiming}."
                    " Change the `parameters` and `exclude` patterns of the method's syncs."
                )

    def register(self, optimizer: Optimizer) -> None:
        """Takes in an optimizer; all ranks must register theirs in the same order.

        Raises:
            TypeError: The method is not defined for this optimizer.
        """
        if isinstance(optimizer, LBFGS) and self.buckets is None:
            raise TypeError(
                "LBFGS evaluates the gradient several times per step, so 'once per step' has no meaning for it and a"
                " residual would be counted more than once. Use methods.dense(), or a first-order optimizer."
            )
        if not self.knows(optimizer):
            self._streams.append(_Stream(optimizer))

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether this very object has been registered."""
        return any(stream.optimizer is optimizer for stream in self._streams)

    def _stream(self, optimizer: Optimizer) -> _Stream:
        for stream in self._streams:
            if stream.optimizer is optimizer:
                return stream
        self.register(optimizer)
        return self._streams[-1]

    def synchronize(self, optimizer: Optimizer) -> None:
        """Leaves the shared gradient in `.grad` of the optimizer's parameters, unless it is there already.

        Raises:
            ValueError: The optimizer holds a parameter of no known module, which would drift apart in silence.
        """
        stream = self._stream(optimizer)
        if stream.shared:
            return
        if stream.written and stream.written != [version for _, version in stream.gradients()]:
            warnings.warn(
                f"the gradients of {type(optimizer).__name__} were changed between backward and step, before they were"
                " shared: each rank changed its own, where ddp would have averaged them already. Clip with"
                " clip_gradients, or call strategy.synchronize(optimizer) before you change them.",
                stacklevel=2,
            )
        self._admit(stream)
        index = self._streams.index(stream)
        for sync, parameters, layout in stream.pieces:
            round = Round(layout, stream.steps, self.epoch, self.seed, self.wire.rank, self.wire.world_size)
            with torch.no_grad():
                sync.synchronize(index, parameters, round, self.wire)
        stream.steps += 1
        stream.shared = True
        # We have just written to gradients, which another optimizer may have a part in.
        for each in self._streams:
            each.written = []
        self.wire.ledger.steps += 1

    def _admit(self, stream: _Stream) -> None:
        """Takes in parameters that require a gradient now and did not before, in named-parameter order on all ranks."""
        parameters = [p for group in stream.optimizer.param_groups for p in group["params"]]
        trained = {id(p) for p in parameters if p.requires_grad or p.grad is not None}
        new = trained - stream.members - self._ignored
        if not new:
            return
        if not new <= self._known.keys():
            self._scan()
            unknown = [tuple(p.shape) for p in parameters if id(p) in new - self._known.keys() - self._ignored]
            if unknown:
                raise ValueError(
                    f"the optimizer holds {len(unknown)} parameter(s) that the model lacks, of shapes {_some(unknown)}:"
                    " their gradients would stay local, and the replicas drift apart. Make them part of the model."
                )
        stream.members |= new
        # Dictionaries keep insertion order: the order of named_parameters().
        named = [known for key, known in self._known.items() if key in stream.members]
        stream.pieces = []
        for sync in self.syncs:
            piece = [(name, parameter) for name, parameter in named if sync.claims(name, parameter)]
            if piece:
                stream.pieces.append((sync, piece, Layout.of(piece)))

    def closure(self, optimizer: Optimizer, closure: Callable[[], T]) -> Callable[[], T]:
        """`closure`, after which the optimizer's gradients are shared. Each evaluation that computes new ones shares
        them anew; one that does not (the step of manual optimization) keeps what a clipping call has shared."""

        def shared_closure() -> T:
            stream = self._stream(optimizer)
            before = stream.gradients() if stream.shared else []
            result = closure()
            if not _same(before, stream.gradients()):
                stream.shared = False
            self.synchronize(optimizer)
            return result

        return shared_closure

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Around the optimizer's step; afterwards its gradients count as used.

        Raises:
            RuntimeError: The optimizer did not evaluate the closure after which they are shared.
        """
        stream = self._stream(optimizer)
        stepped_shared = False
        self._depth += 1
        try:
            yield
            stepped_shared = stream.shared
        finally:
            self._depth -= 1
            stream.shared = False
        if not stepped_shared and self.buckets is None:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() did not call the closure that it was given, after which gradients"
                " are shared, so the replicas have drifted apart. Let its step() call the closure first, as torch's"
                " optimizers do, or call strategy.synchronize(optimizer) before it."
            )

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass: it must not add a local gradient to one that is already shared.

        Raises:
            RuntimeError: It did. (Two passes before clipping are fine, and so is one after `zero_grad`.)
        """
        if self.buckets is not None:
            yield
            return
        waiting = [(stream, stream.gradients()) for stream in self._streams if stream.shared]
        cleared = [all(g is None or not g.any() for g, _ in before) for _, before in waiting]
        yield
        for (stream, before), empty in zip(waiting, cleared):
            if _same(before, stream.gradients()):
                continue
            if not empty:
                raise RuntimeError(
                    f"a backward pass added to gradients of {type(stream.optimizer).__name__} that clipping had already"
                    " shared between ranks: the sum would differ from rank to rank. Call clip_gradients after the last"
                    " backward pass before step(), or zero_grad() first."
                )
            stream.shared = False
        for stream in self._streams:
            stream.written = [version for _, version in stream.gradients()]

    def _refuse_bypass(self, optimizer: Optimizer) -> None:
        if self._depth or not any(id(p) in self._known for group in optimizer.param_groups for p in group["params"]):
            return
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() was called past the strategy, so its gradients were never shared and"
            " the replicas would drift apart. Step the optimizer that self.optimizers() or fabric.setup() returns"
            " (without use_pl_optimizer=False)."
        )

    def residual_norm(self) -> float:
        """Euclidean norm of what this rank has not sent yet."""
        return math.hypot(*(sync.residual_norm() for sync in self.syncs))

    def close(self) -> None:
        """Lets go of the optimizers: their steps are no longer watched."""
        if self._release is not None:
            self._release()


def _some(things: list[T], most: int = 6) -> str:
    shown = ", ".join(str(thing) for thing in things[:most])
    return shown if len(things) <= most else f"{shown}, … ({len(things)} in all)"
