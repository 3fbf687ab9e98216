"""A method at work on one training run: whose gradients are shared, and when. Knows torch, but not Lightning."""

import copy
import itertools
import math
import secrets
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_sparsecomm.agreement import (
    Fact,
    ReplicaError,
    facts_of_optimizers,
    facts_of_run,
    facts_of_weights,
    require_agreement,
)
from lightning_sparsecomm.checkpoint import State, save_number
from lightning_sparsecomm.delta_sync import DeltaSync
from lightning_sparsecomm.gradients import (
    NamedParameters,
    elements_of,
    gradient_of,
    has_sparse_gradient,
    make_nonfinite_,
    norm_of,
    note_sparse_gradient,
)
from lightning_sparsecomm.held import Held, take
from lightning_sparsecomm.layout import Layout
from lightning_sparsecomm.memory import ClipLocalNorm
from lightning_sparsecomm.method import Method, parts_in
from lightning_sparsecomm.replicas import Replicas, ignored_by_ddp
from lightning_sparsecomm.rounds import Round
from lightning_sparsecomm.scaling import LossScaling
from lightning_sparsecomm.schedules import Schedule, Warmup, every_at, least_every
from lightning_sparsecomm.streams import Stream, same
from lightning_sparsecomm.sync import BucketSync, Sync, matches
from lightning_sparsecomm.wire import COMPARISON, SETUP, Wire

T = TypeVar("T")

# What is saved of a stream besides what its syncs hold.
_OPTIMIZER, _BEGUN = "the optimizer's own state", "momentum begun"

_BY_VALUE = (
    "gradient_clip_algorithm must be 'norm' with a method that clips each rank's own gradient, by its norm;"
    " got 'value'. Use 'norm' (in Fabric, max_norm), or methods.gradient_dropping(), which clips the shared gradient."
)


class Synchronizer:
    """Shares the gradients of an optimizer once per step, on the first call of whoever needs them shared.

    Args:
        method: The recipe. Its syncs are copied, so that it can serve again.
        wire: Where to communicate.
        seed: Seed of the method's randomness, equal on all ranks.
        check_replicas_every: Optimizer steps between two comparisons of the weights that ranks share; None compares
            them in `settle` only.
        scaler: The loss scaler, where there is one.

    Attributes:
        epoch: Epochs finished, with fraction.
        max_norm: The Trainer's threshold for clipping by norm; methods that clip each rank's own gradient take it over.
        warmup: What takes the place of the method's densities early in training; None for nothing.
        replicas: The model that all ranks share, where they go apart.
        run: A number of this run, equal on all ranks once they have agreed; 0 before.
        scaling: What the loss scaler does, done together; None without one.
    """

    def __init__(
        self,
        method: Method,
        wire: Wire,
        seed: int = 0,
        check_replicas_every: int | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        self.methods: list[Method] = []
        following: Method | None = copy.deepcopy(method)
        while following is not None:
            self.methods.append(following)
            following = following.otherwise
        self.syncs: tuple[Sync, ...] = tuple(sync for each in self.methods for sync in each.syncs)
        self.wire = wire
        self.seed = seed
        self.check_replicas_every = check_replicas_every
        self.epoch = 0.0
        self.max_norm: float | None = None
        self.warmup: Warmup | None = None
        self.run = 0
        self.scaling = LossScaling(scaler, wire) if scaler is not None else None
        self._modules: list[nn.Module] = []
        self._known: dict[int, tuple[str, Parameter]] = {}
        self._ignored: set[int] = set()
        self._streams: list[Stream] = []
        self.replicas = Replicas(self._streams, self._modules, wire)
        self._leading: Stream | None = None
        self._told_of_every = False
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
        # What is frozen has no gradient, and is looked at when it gets one.
        self._refuse_sparse([known for known in self._known.values() if known[1].requires_grad])

    def _refuse_sparse(self, named: NamedParameters) -> None:
        for name, parameter in named:
            if has_sparse_gradient(parameter) and not all(method.takes(name, parameter) for method in self.methods):
                raise TypeError(
                    f"the gradient of {name!r} is sparse (sparse=True), which this method cannot take. Use"
                    f" methods.split([{name!r}], methods.s2_reducer(), ...) with this method for the rest, a method"
                    " that exchanges weights, such as methods.sbc(), or a layer with sparse=False."
                )

    def _scan(self) -> None:
        for index, module in enumerate(self._modules):
            prefix = f"module_{index}." if index else ""
            left_out = ignored_by_ddp(module)
            for part in module.modules():
                if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
                    note_sparse_gradient(part.weight)
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

    def agree(self) -> None:
        """Refuses ranks that differ in version, method, seed or parameters; all call it, before anything is exchanged.

        Raises:
            ValueError: They differ; on all ranks, naming the first difference.
        """
        named = list(self._known.values())
        self._require(
            facts_of_run(self.methods[0], self.seed, self.check_replicas_every, named, self.scaling is not None)
        )
        if not self.run:
            self.run = secrets.randbits(63)
            if self.wire.world_size > 1:
                self.run = int(self.wire.all_gather(torch.tensor([self.run], device=self._device), SETUP)[0])

    def agree_on_optimizers(self, optimizers: Sequence[Optimizer] | None = None) -> None:
        """Refuses ranks that differ in which optimizer holds which parameter, as `agree` does.

        Args:
            optimizers: In order; those that are registered where None.
        """
        if optimizers is None:
            optimizers = [stream.optimizer for stream in self._streams]
        self._require(facts_of_optimizers(optimizers, list(self._known.values())))

    def _require(self, facts: list[Fact], row: str = SETUP, error: type[Exception] = ValueError) -> None:
        require_agreement(facts, self.wire, self._device, row, error)

    @property
    def _device(self) -> torch.device:
        """Where tensors must be that travel."""
        return next((parameter.device for _, parameter in self._known.values()), torch.device("cpu"))

    def _compare(self, shared: Sequence[tuple[int, dict[int, Tensor]]]) -> None:
        """Compares weights between ranks, each so many by the steps after which they are; a collective, if any are."""
        if self.wire.world_size == 1:
            return
        facts: list[Fact] = []
        for steps, weights in shared:
            named = {name: weights[key] for key, (name, _) in self._known.items() if key in weights}
            facts += facts_of_weights(named, steps)
        if facts:
            self._require(facts, COMPARISON, ReplicaError)

    def check(self) -> None:
        """Refuses patterns that match nothing, and parameters that belong to no sync or to several.

        Raises:
            ValueError: As said, naming the pattern or the parameter.
        """
        names = [name for name, _ in self._known.values()]
        for sync in self.syncs:
            both = (*itertools.chain(*sync.within), *sync.outside)
            for option, patterns in (("parameters", (*sync.parameters, *both)), ("exclude", sync.exclude)):
                for pattern in patterns:
                    if not any(matches(name, (pattern,)) for name in names):
                        raise ValueError(
                            f"{option}: the pattern {pattern!r} matches no parameter. Patterns are shell-style and"
                            f" match whole names; the names are {_some(names)}."
                        )
        for method in self.methods:
            for name, parameter in self._known.values():
                claiming = [sync for sync in method.syncs if sync.claims(name, parameter)]
                frozen = has_sparse_gradient(parameter) and not parameter.requires_grad
                if len(claiming) > 1 or not (frozen or method.takes(name, parameter)):
                    raise ValueError(
                        f"each parameter must belong to exactly one sync; {name!r} belongs to {len(claiming)}."
                        " Change the `parameters` and `exclude` patterns of the method's syncs."
                    )
            for sync, parameters in method.parts(list(self._known.values())):
                sync.check(parameters)

    def register(self, optimizer: Optimizer) -> None:
        """Takes in an optimizer; all ranks must register theirs in the same order.

        Raises:
            TypeError: The method is not defined for this optimizer.
        """
        if self.knows(optimizer):
            return
        stream = Stream(optimizer)
        self._streams.append(stream)
        if self.scaling is not None:
            self.scaling.adopt(optimizer)
        self._choose(stream)

    def _choose(self, stream: Stream) -> None:
        """Chooses the optimizer's method, once the module that it trains is known."""
        if stream.method is not None or not (held := self._held(stream.optimizer)):
            return
        stream.choose(self._streams.index(stream), self.methods, held)
        parameters = [parameter for group in stream.optimizer.param_groups for parameter in group["params"]]
        if stream.takeover is not None and any(id(parameter) in self._ignored for parameter in parameters):
            raise ValueError(
                "the method takes over the momentum of an optimizer that also holds parameters which DDP is told to"
                " ignore (_ddp_params_and_buffers_to_ignore): they would lose theirs. Give them an optimizer of their"
                " own, or use methods.dgc(momentum_correction=False)."
            )

    def _held(self, optimizer: Optimizer) -> NamedParameters:
        """The known parameters among an optimizer's, in named-parameter order: dictionaries keep theirs."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [known for key, known in self._known.items() if key in held]

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether this very object has been registered."""
        return any(stream.optimizer is optimizer for stream in self._streams)

    def _stream(self, optimizer: Optimizer) -> Stream:
        for stream in self._streams:
            if stream.optimizer is optimizer:
                return stream
        self.register(optimizer)
        return self._streams[-1]

    def synchronize(self, optimizer: Optimizer, max_norm: float | None = None) -> None:
        """Leaves the shared gradient in `.grad` of the optimizer's parameters, unless it is there already.

        With a loss scaler, gradients are unscaled first; and where one is not finite, the step is skipped, on all ranks
        that would communicate in it: nothing is exchanged, no memory changes, and `.grad` is not finite on any of them.

        Args:
            optimizer: Whose gradients.
            max_norm: What to clip by, where the method clips each rank's own gradient; the Trainer's where None.

        Raises:
            ValueError: The optimizer holds a parameter of no known module, which would drift apart in silence.
        """
        stream = self._stream(optimizer)
        if stream.shared:
            if self.scaling is not None:
                self.scaling.remind(optimizer, stream.skips)
            return
        changed = stream.written and stream.written != [version for _, version in stream.gradients()]
        if changed and stream.shares_gradients:
            warnings.warn(
                f"the gradients of {type(optimizer).__name__} were changed between backward and step, before they were"
                " shared: each rank changed its own, where ddp would have averaged them already. Clip with"
                " clip_gradients, or call strategy.synchronize(optimizer) before you change them.",
                stacklevel=2,
            )
        self._admit(stream)
        index = self._streams.index(stream)
        stream.max_norm = self.max_norm if max_norm is None else max_norm
        if self.scaling is not None:
            together = any(sync.meets(parameters) for sync, parameters, _ in stream.pieces)
            stream.skips = self.scaling.unscale_(optimizer, together)
        stream.norm = math.inf if stream.skips else self._asked_norm(stream)
        self.wire.step = stream.steps
        # No memory forgets, and no gradient is written, before all syncs have exchanged: a step is shared whole or not.
        with torch.no_grad(), ExitStack() as turns:
            # What goes on by itself comes first, so that the others select and code meanwhile.
            overlapping: list[Callable[[], None]] = []
            for sync, parameters, layout in sorted(stream.pieces, key=lambda piece: not piece[0].overlaps):
                round = replace(self._round(stream, layout), gradient_norm=stream.norm, max_norm=stream.max_norm)
                if stream.skips:
                    sync.skip(index, optimizer, parameters, round, self.wire)
                    continue
                exchange = turns.enter_context(sync.synchronize(index, optimizer, parameters, round, self.wire))
                if sync.overlaps:
                    overlapping.append(exchange)
                else:
                    exchange()
            for exchange in overlapping:
                exchange()
        if stream.skips:
            make_nonfinite_(stream.parameters())
        stream.shared = True
        # We have just written to gradients, which another optimizer may have a part in.
        for each in self._streams:
            each.written = []
        self.wire.ledger.steps += 1

    def unscale_(self, optimizer: Optimizer) -> bool:
        """In the place of the loss scaler's `unscale_`: whoever needs unscaled gradients needs them shared.

        Returns:
            Whether the optimizer is one that trains known parameters; others are left to the scaler.
        """
        if not self.knows(optimizer) and not self._held(optimizer):
            return False
        self.synchronize(optimizer)
        return True

    def _round(self, stream: Stream, layout: Layout) -> Round:
        rank, world_size = self.wire.rank, self.wire.world_size
        return Round(layout, stream.steps, self.epoch, self.seed, rank, world_size, warmup=self.warmup)

    def _after_step(self, stream: Stream) -> None:
        """What is communicated between an optimizer's steps, now that it has made one."""
        self._exchange_weights(stream, stream.steps, last=False)
        stream.steps += 1
        self.replicas.after_step(stream)
        self.wire.step = stream.steps
        if self.check_replicas_every is not None:
            self._compare([(stream.steps, self.replicas.in_common(stream, self.check_replicas_every))])

    def settle(self) -> None:
        """Leaves one model on all ranks, after the last step, and makes sure that it is one; they call it together.

        Raises:
            ReplicaError: Their weights differ all the same; on all ranks.
        """
        self.replicas.view_own()
        for stream in self._streams:
            self._exchange_weights(stream, max(stream.steps - 1, 0), last=True)
        # Forward passes since the last exchange have changed buffers.
        if any(stream.steps for stream in self._streams) and any(sync.averages_buffers for sync in self.syncs):
            self.replicas.average_untrained()
        self.replicas.settle()
        self._compare([(each.steps, {id(p): p for _, p in each.parameters()}) for each in self._streams])
        if self.drifts:
            self.replicas.note_end()

    def reunite(self) -> None:
        """Leaves one model again, after whoever may have changed what `settle` left on each rank."""
        if self.drifts:
            self.replicas.reunite()

    def _exchange_weights(self, stream: Stream, step: int, last: bool) -> None:
        index, untrained = self._streams.index(stream), False
        self.wire.step = step
        try:
            with torch.no_grad(), ExitStack() as turns:
                for sync, parameters, layout in stream.pieces:
                    round = replace(self._round(stream, layout), step=step)
                    exchange = sync.settle if last else sync.after_step
                    turn = exchange(index, stream.optimizer, parameters, round, self.wire)
                    untrained |= turns.enter_context(turn) and sync.averages_buffers
        except BaseException:
            # One model, the last good one, of all syncs: also after an interrupt, for changes may stand in its place.
            for sync, parameters, _ in stream.pieces:
                sync.restore(index, parameters)
            raise
        if untrained and not last:
            # Of several optimizers, the first that has an exchange.
            self._leading = self._leading or stream
            if self._leading is stream:
                self.replicas.average_untrained()

    def _admit(self, stream: Stream) -> None:
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
        self._take_in(stream, new)

    def _take_in(self, stream: Stream, new: set[int]) -> None:
        stream.members |= new
        self._choose(stream)
        assert stream.method is not None
        named = [known for key, known in self._known.items() if key in stream.members]
        self._refuse_sparse(named)
        stream.pieces = [(sync, piece, Layout.of(piece)) for sync, piece in stream.method.parts(named)]
        stream.clipping = list(parts_in([sync for sync, _, _ in stream.pieces], ClipLocalNorm))

    def outlasted(self, steps: float, epochs: float) -> list[str]:
        """Warm-ups that last longer than a run of so many steps and epochs, in words."""
        in_use = [stream.method for stream in self._streams]
        warmups = {schedule.warmup for schedule in parts_in(in_use, Schedule)}  # type: ignore[type-abstract]
        if self.warmup is not None:
            warmups = {self.warmup}
        unfinished = [warmup.unfinished(steps, epochs) for warmup in warmups if warmup is not None]
        return [words for words in unfinished if words is not None]

    @property
    def shares_gradients(self) -> bool:
        """Whether ranks meet in every step, as under ddp; else each is left to itself for some steps."""
        return all(sync.shares_gradients for sync in self.syncs)

    @property
    def drifts(self) -> bool:
        """Whether replicas may go apart."""
        return any(sync.drifts for sync in self.syncs)

    @property
    def broadcasts_buffers(self) -> bool:
        """Whether ddp's broadcast of buffers stays on."""
        return any(sync.broadcasts_buffers for sync in self.syncs)

    def begin(self) -> None:
        """Called when a module has been made equal on all ranks."""
        if any(sync.averages_buffers for sync in self.syncs):
            self.replicas.keep_untrained()

    def warn_of_long_every(self, steps: float) -> None:
        """Says so where it is certain that no exchange of weights comes before the end of a run of so many steps."""
        for stream in self._streams:
            for sync, _ in stream.method.parts(self._held(stream.optimizer)) if stream.method is not None else ():
                if isinstance(sync, DeltaSync) and (every := least_every(sync.every)) > steps:
                    self._told_of_every = True
                    _warn_of_every(every, f"the run's {steps:,.0f} optimizer steps")
                    return

    def warn_of_no_exchange(self) -> None:
        """The same at the end of a run, of whose steps nobody knew how many each of several optimizers would make."""
        for index, stream in enumerate(self._streams if not self._told_of_every else ()):
            weights = [sync for sync, _, _ in stream.pieces if isinstance(sync, DeltaSync)]
            never = [sync for sync in weights if 0 < sync.waiting(index) == stream.steps]
            if never:
                every = every_at(never[0].every, stream.steps - 1, self.epoch)
                optimizer = f"optimizer {index} ({type(stream.optimizer).__name__})"
                _warn_of_every(every, f"the {stream.steps:,} steps that {optimizer} made")

    def take_over_clipping(self, max_norm: float, by_value: bool) -> None:
        """Lets methods that clip each rank's own gradient know the Trainer's threshold.

        Raises:
            ValueError: They cannot clip so, or have another threshold of their own; or it is no number.
        """
        if math.isnan(max_norm):
            raise ValueError(
                "gradient_clip_val must be a number, the largest norm of a gradient; got nan. Use None or 0 for any."
            )
        for stream in self._streams:
            clipping = list(parts_in(stream.method, ClipLocalNorm))
            if clipping and by_value:
                raise ValueError(_BY_VALUE)
            _refuse_two_thresholds(clipping, max_norm)
        self.max_norm = max_norm

    def clips(self, optimizer: Optimizer) -> bool:
        """Whether the method clips each rank's own gradient of this optimizer, instead of the shared one."""
        self._admit(self._stream(optimizer))
        return any(sync.clips for sync, _, _ in self._stream(optimizer).pieces)

    def clipped_norm(self, optimizer: Optimizer) -> float:
        """Euclidean norm of this rank's whole gradient of the optimizer's parameters, as it was before `clip` clipped
        and shared it; infinite where the step is skipped instead."""
        return self._stream(optimizer).norm

    def _asked_norm(self, stream: Stream) -> float:
        clips = stream.max_norm is not None and any(sync.clips for sync, _, _ in stream.pieces)
        if not clips and all(memory.max_norm is None for memory in stream.clipping):
            return math.nan
        gradients = (gradient_of(name, parameter) for name, parameter in stream.parameters())
        return norm_of([gradient for gradient in gradients if gradient is not None])

    def clip(self, optimizer: Optimizer, max_norm: float, by_value: bool) -> bool:
        """Clips each rank's own gradient and shares it, where the method clips so; else only shares it.

        Args:
            optimizer: Whose gradients.
            max_norm: Threshold for the averaged gradient.
            by_value: Whether it is meant for each element, not for the norm.

        Returns:
            Whether the shared gradient is clipped already, in the method's way.

        Raises:
            ValueError: The method clips by norm only, or has shared the gradients under another threshold.
        """
        if not self.clips(optimizer):
            pieces = self._stream(optimizer).pieces
            if not by_value and len({sync.shares_gradients for sync, _, _ in pieces}) > 1:
                raise ValueError(
                    "gradients cannot be clipped by norm where a method shares some of an optimizer's gradients and"
                    " leaves the others to each rank: the norm would differ between ranks, and so would what is shared."
                    " Give the parameters of each an optimizer of their own, or clip by value."
                )
            self.synchronize(optimizer)
            return False
        if by_value:
            raise ValueError(_BY_VALUE)
        stream = self._stream(optimizer)
        _refuse_two_thresholds(stream.clipping, max_norm)
        if not stream.shared:
            self.synchronize(optimizer, max_norm)
        elif stream.max_norm != max_norm:
            raise ValueError(
                f"gradients were shared with gradient_clip_val={stream.max_norm}, and are now to be clipped by"
                f" {max_norm}: the method clips each rank's own gradient, before it is shared. Set the Trainer's"
                " gradient_clip_val; in manual optimization, clip before anything else needs the shared gradient."
            )
        return True

    def closure(self, optimizer: Optimizer, closure: Callable[[], T]) -> Callable[[], T]:
        """`closure`, after which the optimizer's gradients are shared. Each evaluation that computes new ones shares
        them anew; one that does not (the step of manual optimization) keeps what a clipping call has shared."""

        def shared_closure() -> T:
            stream = self._stream(optimizer)
            before = stream.gradients() if stream.shared else []
            result = closure()
            if not same(before, stream.gradients()):
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
        self._choose(stream)
        stepped_shared = False
        self._depth += 1
        if stream.takeover is not None:
            stream.takeover.armed = True
        try:
            yield
            stepped_shared = stream.shared
        finally:
            self._depth -= 1
            stream.shared = False
            if stream.takeover is not None:
                stream.takeover.armed = False
                stream.takeover.release()
        if not stepped_shared and self.buckets is None:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() did not call the closure that it was given, after which gradients"
                " are shared, so the replicas have drifted apart. Let its step() call the closure first, as torch's"
                " optimizers do, or call strategy.synchronize(optimizer) before it."
            )
        self._after_step(stream)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass: it must not add a local gradient to one that is already shared.

        Raises:
            RuntimeError: It did. (Two passes before clipping are fine, and so is one after `zero_grad`.)
        """
        if self.buckets is not None and self.scaling is None:
            with self._hook_failures():
                yield
            return
        scaled = self.scaling is not None
        shared = [stream for stream in self._streams if stream.shared and (stream.shares_gradients or scaled)]
        waiting = [(stream, stream.gradients()) for stream in shared]
        cleared = [all(g is None or not elements_of(g).any() for g, _ in before) for _, before in waiting]
        with self._hook_failures():
            yield
        for (stream, before), empty in zip(waiting, cleared):
            if same(before, stream.gradients()):
                continue
            if not empty:
                done = "divided by the loss scale" if scaled else "shared between ranks"
                sum_would = "be of scaled and unscaled ones" if scaled else "differ from rank to rank"
                raise RuntimeError(
                    f"a backward pass added to gradients of {type(stream.optimizer).__name__} that clipping had already"
                    f" {done}: the sum would {sum_would}. Call clip_gradients after the last backward pass before"
                    " step(), or zero_grad() first."
                )
            stream.shared = False
        for stream in self._streams if self.buckets is None else []:
            stream.written = [version for _, version in stream.gradients()]

    @contextmanager
    def _hook_failures(self) -> Iterator[None]:
        """DDP does not say whose it is; but where the hook fails, what it says is only quoted by what reaches us."""
        if self.buckets is not None:
            self.wire.step = max((stream.steps for stream in self._streams), default=0)
        try:
            yield
        except RuntimeError:
            if not self.wire.failures:
                raise
            raise self.wire.failures[0] from self.wire.failures[0].__cause__

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

    def forget(self) -> None:
        """Begins anew, with weights that were loaded: what is held belongs to others, such as those with which a
        learning rate finder has tried."""
        self.replicas.view_own()
        for sync in self.syncs:
            sync.forget()
        for stream in self._streams:
            stream.steps = 0
            stream.shared = False
            if stream.takeover is not None:
                stream.takeover.forget()
        self.begin()

    def save_number(self) -> int:
        """Names what `state_dict` gives, equally on all ranks."""
        return save_number(self.run, [stream.steps for stream in self._streams])

    def state_dict(self) -> State:
        """What this rank holds that a checkpoint of ddp has no place for: of each optimizer what syncs hold and, where
        replicas go apart, its own state; and this rank's own weights there. Tensors share storage with what holds them.
        """
        return {
            "streams": [self._state_of(index) for index in range(len(self._streams))],
            "leading": None if self._leading is None else self._streams.index(self._leading),
            "weights": self.replicas.state_dict(not self.broadcasts_buffers) if self.drifts else {},
            # Each rank scales by itself between two exchanges; else as the checkpoint says.
            "scaler": self.scaling.scaler.state_dict() if self.scaling is not None and self.drifts else {},
            "ledger": self.wire.ledger.state_dict(),
        }

    def _state_of(self, index: int) -> State:
        stream = self._streams[index]
        held: Held = {}
        for sync, _, _ in stream.pieces:
            for kind, parts in sync.state_dict(index).items():
                held.setdefault(kind, {}).update(parts)
        named = stream.parameters()
        if any(sync.drifts for sync, _, _ in stream.pieces):
            state = stream.optimizer.state
            held[_OPTIMIZER] = {name: dict(state[parameter]) for name, parameter in named if parameter in state}
        if stream.takeover is not None:
            held[_BEGUN] = {name: True for name, parameter in named if stream.takeover.has_begun(parameter)}
        return {"steps": stream.steps, "members": [name for name, _ in named], "held": held}

    def load_state_dict(self, state: State, same_world: bool) -> list[str]:
        """Takes over what `state_dict` gave, here or with another method, after the optimizers' own state is loaded.

        Args:
            state: This rank's, or the mean over the ranks of a world of another size.
            same_world: Whether it is as large as this one.

        Returns:
            What the method has no place for, in words.
        """
        self.forget()
        dropped: list[str] = []
        for index, saved in enumerate(state["streams"][: len(self._streams)]):
            dropped += self._load_stream(index, saved)
        dropped += [f"all of optimizer {index}" for index in range(len(self._streams), len(state["streams"]))]
        leading = state["leading"]
        self._leading = self._streams[leading] if leading is not None and leading < len(self._streams) else None
        if self.drifts:
            self.replicas.load_state_dict(state["weights"])
        elif state["weights"]:
            dropped.append("each rank's own weights")
        if self.scaling is not None and state["scaler"]:
            self.scaling.scaler.load_state_dict(state["scaler"])
        if same_world:
            self.wire.ledger.load_state_dict(state["ledger"])
        return dropped

    def _load_stream(self, index: int, saved: State) -> list[str]:
        stream, members = self._streams[index], set(saved["members"])
        stream.steps, held = saved["steps"], saved["held"]
        named = {name: parameter for name, parameter in self._held(stream.optimizer) if name in members}
        if not named:
            return [f"all of optimizer {index}"] if members else []
        self._take_in(stream, {id(parameter) for parameter in named.values()})
        for sync, parameters, _ in stream.pieces:
            sync.load_state_dict(index, held, parameters)
        if _OPTIMIZER in held and any(sync.drifts for sync, _, _ in stream.pieces):
            own = take(held, _OPTIMIZER, named)
            _load_optimizer(stream.optimizer, {id(parameter): own.get(name) for name, parameter in named.items()})
        begun = take(held, _BEGUN, named)
        if stream.takeover is not None:
            stream.takeover.load_begun([named[name] for name in begun])
        return [f"{kind} of {len(parts)} parameters" for kind, parts in held.items() if parts]

    def close(self) -> None:
        """Lets go of the optimizers: their steps are no longer watched."""
        if self._release is not None:
            self._release()
        if self.scaling is not None:
            self.scaling.close()
        for stream in self._streams:
            if stream.takeover is not None:
                stream.takeover.close()


def _warn_of_every(every: int, steps: str) -> None:
    warnings.warn(
        f"every={every:,} is more than {steps}: till the end of training, where what each rank has changed is exchanged"
        " once, the weights that it began with are measured and saved. Shorten `every`.",
        stacklevel=3,
    )


def _load_optimizer(optimizer: Optimizer, own: dict[int, dict[str, object] | None]) -> None:
    """Gives an optimizer other state for some parameters, by their identities, or none; torch sees to devices and
    dtypes."""
    state = optimizer.state_dict()
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for position, parameter in enumerate(members):
        if id(parameter) in own:
            state["state"].pop(position, None)
            if (values := own[id(parameter)]) is not None:
                state["state"][position] = values
    optimizer.load_state_dict(state)


def _refuse_two_thresholds(clipping: Sequence[ClipLocalNorm], max_norm: float) -> None:
    for memory in clipping:
        if memory.max_norm is not None and memory.max_norm != max_norm:
            raise ValueError(
                f"clip={memory.max_norm} of the method and {max_norm} of the Trainer's gradient_clip_val, or of a"
                " clipping call, are two thresholds for one clipping. Give only one: the method takes the other over."
            )


def _some(things: list[T], most: int = 6) -> str:
    shown = ", ".join(str(thing) for thing in things[:most])
    return shown if len(things) <= most else f"{shown}, … ({len(things)} in all)"
