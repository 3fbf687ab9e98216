"""Whence, when and whither: what is exchanged for which parameters at which moment."""

import copy
import fnmatch
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer

from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.checks import check_switches
from lightning_sparsecomm.exchange.dense import WIRE_DTYPES, DenseAllReduce, WireDtype, check_wire_dtype
from lightning_sparsecomm.gradients import (
    NamedParameters,
    gradient_of,
    has_sparse_gradient,
    write_gradients,
    write_sparse_gradients,
)
from lightning_sparsecomm.held import Held, prefixed, within
from lightning_sparsecomm.layout import Layout, SparseVector
from lightning_sparsecomm.local_mode import LOCAL_MODES
from lightning_sparsecomm.memory import ClipLocalNorm, Momentum
from lightning_sparsecomm.rounds import Round
from lightning_sparsecomm.takeover import mask_momentum_, momentum_rules
from lightning_sparsecomm.wire import DDP_UNUSED, GradBucket, Ledger, Wire


class Sync(ABC):
    """What a method does for some of the parameters. A method is one or more syncs; each parameter belongs to one.

    A sync as the user makes it is a prototype: training works on a copy of it, so that a method can be used again.

    Args:
        parameters: Shell-style patterns of parameter names, as in `module.named_parameters()`.
        exclude: Patterns of names that are left to other syncs.
        min_dimensions: Parameters of fewer dimensions are left to other syncs.
        rest: Whether it takes what no other sync of the method takes, whatever the patterns.

    Raises:
        TypeError: A string is given where a list of patterns is meant.
    """

    takes_sparse: bool | None = False
    """Whether it takes the parameters whose gradients are sparse tensors, and no others; None takes both kinds."""

    drifts = False
    """Whether the gradients it leaves differ between ranks, so that replicas go apart."""

    shares_gradients = True
    """Whether what it leaves in `.grad` is no longer this rank's own gradient."""

    def __init__(
        self,
        parameters: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        min_dimensions: int = 0,
        rest: bool = False,
    ) -> None:
        for option, patterns in (("parameters", parameters), ("exclude", exclude)):
            if isinstance(patterns, str):
                raise TypeError(
                    f"{option} must be a list of patterns; got the string {patterns!r}. Use [{patterns!r}]."
                )
            if not isinstance(patterns, Sequence) or not all(isinstance(each, str) for each in patterns):
                raise TypeError(
                    f"{option} must be a list of patterns of parameter names; got {patterns!r}. Use [] for none."
                )
        check_switches(rest=rest)
        if type(min_dimensions) is not int or min_dimensions < 0:
            raise ValueError(
                f"min_dimensions must be a whole number, 0 or more; got {min_dimensions!r}. Use 2 for weights only."
            )
        self.parameters = tuple(parameters)
        self.exclude = tuple(exclude)
        self.min_dimensions = min_dimensions
        self.rest = rest
        self.within: tuple[tuple[str, ...], ...] = ()
        self.outside: tuple[str, ...] = ()

    def limited(self, within: Sequence[str] = ("*",), outside: Sequence[str] = ()) -> "Sync":
        """The same sync for only those of its parameters that the patterns `within` match, and none of `outside`."""
        sync = copy.copy(self)
        sync.within, sync.outside = (*self.within, tuple(within)), (*self.outside, *outside)
        return sync

    def may_take(self, name: str, parameter: Parameter) -> bool:
        """Whether it could take this parameter, were it the only sync."""
        if self.takes_sparse is not None and self.takes_sparse != has_sparse_gradient(parameter):
            return False
        return all(matches(name, patterns) for patterns in self.within) and not matches(name, self.outside)

    def claims(self, name: str, parameter: Parameter) -> bool:
        """Whether this parameter belongs to this sync, of itself; the same on all ranks."""
        if self.rest or parameter.dim() < self.min_dimensions or not self.may_take(name, parameter):
            return False
        return matches(name, self.parameters) and not matches(name, self.exclude)

    def _patterns(self) -> str:
        parts = [f"within={list(patterns)!r}" for patterns in self.within if patterns != ("*",)]
        parts += [f"outside={list(self.outside)!r}"] if self.outside else []
        parts += [] if self.parameters == ("*",) else [f"parameters={list(self.parameters)!r}"]
        parts += [f"exclude={list(self.exclude)!r}"] if self.exclude else []
        parts += [f"min_dimensions={self.min_dimensions}"] if self.min_dimensions else []
        parts += ["rest=True"] if self.rest else []
        return "".join(f", {part}" for part in parts)

    broadcasts_buffers = True
    """Whether ddp's broadcast of buffers before forward passes stays on, if ddp's own options say so."""

    averages_buffers = False
    """Whether floating-point buffers are averaged whenever it has exchanged weights."""

    @property
    def corrects_momentum(self) -> bool:
        """Whether it applies the optimizer's momentum in the optimizer's place."""
        return False

    def accompany(self, stream: int, clip: ClipLocalNorm | None, momentum: Momentum | None) -> str | None:
        """Asks it to do with this stream what another sync does in the optimizer's place, for all its parameters.

        Args:
            stream: Index of the optimizer.
            clip: How each rank's own gradient is clipped; None where it is not.
            momentum: What applies momentum to what is shared; None where the optimizer does.

        Returns:
            Why it cannot, and what to do; None where it will.
        """
        return "both are the optimizer's own there. Give its parameters an optimizer of their own."

    @property
    def clips(self) -> bool:
        """Whether it clips each rank's own gradient, in the place of clipping the shared one."""
        return False

    def objection(self, optimizer: Optimizer) -> str | None:
        """Why it is not defined for an optimizer, and what to use instead; None where it is."""
        return None

    def check(self, parameters: NamedParameters) -> None:  # noqa: B027
        """Refuses parameters that it cannot take, all of which belong to it.

        Raises:
            ValueError: As said.
        """

    @abstractmethod
    def synchronize(
        self, stream: int, optimizer: Optimizer, parameters: NamedParameters, round: Round, wire: Wire
    ) -> AbstractContextManager[Callable[[], None]]:
        """Entered once per optimizer step; calling what that gives exchanges. Left once all syncs of the optimizer
        have: then it puts the shared gradient into each parameter's `.grad`. Left by an error, its own or another's, it
        changes nothing.

        Args:
            stream: Index of the optimizer. State of one stream never mixes with that of another.
            optimizer: Whose step it is.
            parameters: This sync's parameters among the optimizer's, in named-parameter order: all that have required
                a gradient at some time.
            round: Step, epoch and seeds; its layout is that of `parameters`.
            wire: Where to communicate.
        """

    @property
    def overlaps(self) -> bool:
        """Whether `synchronize`, once entered, has set its exchange going, which others need not wait for."""
        return False

    def meets(self, parameters: NamedParameters) -> bool:
        """Whether ranks communicate in `synchronize`, so that they must agree beforehand that none skips it."""
        return self.shares_gradients

    def skip(  # noqa: B027
        self, stream: int, optimizer: Optimizer, parameters: NamedParameters, round: Round, wire: Wire
    ) -> None:
        """Called in the place of `synchronize` in a step that the loss scaler skips, since some gradient is not finite:
        exchanges nothing, and leaves memories as they are. The step counts, and `after_step` follows."""

    def after_step(
        self, stream: int, optimizer: Optimizer, parameters: NamedParameters, round: Round, wire: Wire
    ) -> AbstractContextManager[bool]:
        """Entered and left after each optimizer step, as `synchronize` is before it.

        Returns:
            Within the context, whether weights are exchanged, and so are equal on all ranks after it.
        """
        return nullcontext(False)

    def settle(
        self, stream: int, optimizer: Optimizer, parameters: NamedParameters, round: Round, wire: Wire
    ) -> AbstractContextManager[bool]:
        """Entered and left once after the last step: exchanges what is left to exchange.

        Returns:
            As `after_step`.
        """
        return nullcontext(False)

    def shared_model(self, stream: int, parameters: NamedParameters) -> list[tuple[Tensor, Tensor]] | None:
        """Each weight with the value that all ranks share, where it keeps one apart from their own weights; without a
        collective. Empty where they are equal now. None where it keeps none."""
        return None

    def restore(self, stream: int, parameters: NamedParameters) -> None:  # noqa: B027
        """Sets weights back to the values that all ranks share, where it keeps such, after an error."""

    def state_dict(self, stream: int) -> Held:
        """What is held for one stream."""
        return {}

    def load_state_dict(self, stream: int, state: Held, parameters: NamedParameters) -> None:  # noqa: B027
        """Takes out of `state` what was held for these parameters, before the stream's next step."""

    @abstractmethod
    def forget(self) -> None:
        """Begins anew: nothing is held of what has been trained."""

    def residual_norm(self) -> float:
        """Euclidean norm of what this rank holds back; 0 where nothing is."""
        return 0.0


def nothing_to_wait_for() -> None:
    """What `Sync.synchronize` gives where nothing is exchanged."""


def _gathered_bytes(gradient: Tensor) -> int:
    """What DDP hands to an all-gather for a sparse gradient: its indices and its values."""
    values, indices = gradient.values(), gradient.indices()
    return values.numel() * values.element_size() + indices.numel() * indices.element_size()


def wide_dtype(parameters: NamedParameters) -> torch.dtype:
    """The dtype of what is held for parameters: float32, or wider where one of them is."""
    dtype = torch.float32
    for _, parameter in parameters:
        dtype = torch.promote_types(dtype, parameter.dtype)
    return dtype


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether any shell-style pattern matches; case counts."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


class GradientSync(Sync):
    """Exchanges gradients through a channel once per optimizer step, when the first reader needs the shared gradient.

    Until then every rank's gradients stay its own: several backward passes, accumulation and unused parameters need
    no care, and a memory takes in exactly what the optimizer consumes.

    Args:
        channel: Memories and exchange.
        parameters: Patterns of the parameters that go through it.
        exclude: Patterns of those that do not.
        min_dimensions: Parameters of fewer dimensions do not go through it.
        rest: Whether all that no other sync takes goes through it, whatever the patterns.
        local: What the optimizer sees of a rank's own gradient; see `LocalMode`. All but "none" let replicas drift.
        mask_momentum: Whether the momentum that the optimizer itself keeps (SGD's `momentum_buffer`, Adam's
            `exp_avg`) is set to zero wherever the shared gradient holds something that was sent.
        sparse: Whether it takes, of the parameters that match, exactly those whose gradients are sparse tensors (of
            layers with `sparse=True`), which stay sparse for the optimizer. Else it takes exactly the others.

    Raises:
        ValueError: Unknown `local`; or `sparse` with memories, a local mode, or an exchange of dense vectors only.
    """

    def __init__(
        self,
        channel: Channel,
        parameters: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        min_dimensions: int = 0,
        rest: bool = False,
        local: Literal["none", "sum", "partial"] = "none",
        mask_momentum: bool = False,
        sparse: bool = False,
    ) -> None:
        super().__init__(parameters, exclude, min_dimensions, rest)
        check_switches(mask_momentum=mask_momentum, sparse=sparse)
        if local not in LOCAL_MODES:
            raise ValueError(
                f"local must be one of {', '.join(LOCAL_MODES)}; got {local!r}."
                " The paper's 'error' is 'partial' in a channel without ErrorFeedback."
            )
        if sparse and (channel.memories or not channel.exchange.takes_sparse or local != "none"):
            raise ValueError(
                "sparse=True needs a channel without memories, which are dense, an exchange that takes sparse vectors,"
                f" such as BlockReduce(), and local='none'; got {channel!r} and local={local!r}."
            )
        self.takes_sparse = sparse
        self.channel = channel
        self.local = local
        self.mask_momentum = mask_momentum
        self.drifts = LOCAL_MODES[local].drifts
        self._streams: dict[int, tuple[Layout | None, Channel]] = {}
        self._accompanied: dict[int, tuple[ClipLocalNorm | None, Momentum | None]] = {}

    @property
    def corrects_momentum(self) -> bool:
        return self.channel.corrects_momentum

    def accompany(self, stream: int, clip: ClipLocalNorm | None, momentum: Momentum | None) -> str | None:
        if self.takes_sparse or self.local != "none" or self.mask_momentum:
            return (
                "a sync of sparse gradients, with a local mode, or that masks the optimizer's momentum, leaves both"
                " to the optimizer. Give its parameters an optimizer of their own."
            )
        self._accompanied[stream] = (clip, momentum)
        return None

    @property
    def clips(self) -> bool:
        return self.channel.clips

    @property
    def overlaps(self) -> bool:
        return self.channel.exchange.overlaps

    def objection(self, optimizer: Optimizer) -> str | None:
        if isinstance(optimizer, LBFGS):
            return (
                "it evaluates the gradient several times per step, so 'once per step' has no meaning for it and a"
                " residual would be counted more than once. Use methods.dense() or methods.federated_averaging(), or a"
                " first-order optimizer."
            )
        return self.channel.objection(optimizer)

    def check(self, parameters: NamedParameters) -> None:
        objection = self.channel.exchange.objection(Layout.of(parameters))
        if objection is not None:
            raise ValueError(objection)

    @contextmanager
    def synchronize(
        self, stream: int, optimizer: Optimizer, parameters: NamedParameters, round: Round, wire: Wire
    ) -> Iterator[Callable[[], None]]:
        channel = self._bound(stream, parameters, round.layout)
        if channel.corrects_momentum:
            round = replace(round, momentum=momentum_rules(optimizer, parameters))
        gradients = [gradient_of(name, parameter) for name, parameter in parameters]
        ledger = wire.ledger
        with ExitStack() as turn:
            with ledger.exchanging():
                reduction = turn.enter_context(channel.reducing(gradients, round, wire, bool(self.takes_sparse)))
            yield ledger.exchanging()(reduction.exchange)
        with ledger.exchanging():
            exchanged = reduction.finish()
        self._count(gradients, parameters, ledger)
        sent = exchanged.sent
        ledger.sent_elements += sent.indices.numel() if isinstance(sent, SparseVector) else sent.numel()
        if self.mask_momentum:
            # Where replicas stay equal, so must their momentum: at what anyone has sent. Else at what this rank has.
            mask_momentum_(optimizer, parameters, exchanged.sent if self.drifts else exchanged.shared, round.layout)
        if self.takes_sparse:
            write_sparse_gradients(parameters, exchanged, round.layout)
        else:
            write_gradients(parameters, exchanged, round.layout, LOCAL_MODES[self.local], wire.world_size)

    def skip(self, stream: int, optimizer: Optimizer, parameters: NamedParameters, round: Round, wire: Wire) -> None:
        """Sends nothing, where ddp sends gradients before it finds that they are not finite."""
        self._count([gradient_of(name, parameter) for name, parameter in parameters], parameters, wire.ledger)

    def _count(self, gradients: Sequence[Tensor | None], parameters: NamedParameters, ledger: Ledger) -> None:
        """Enters what ddp would send."""
        if self.takes_sparse:
            ledger.ddp_gathered_bytes += sum(_gathered_bytes(each) for each in gradients if each is not None)
        else:
            ledger.ddp_bytes += sum(p.numel() * p.element_size() for _, p in parameters if p.requires_grad)
        ledger.elements += sum(p.numel() for _, p in parameters)

    def _bound(self, stream: int, parameters: NamedParameters, layout: Layout) -> Channel:
        known, channel = self._streams.get(stream) or (None, self._channel_for(stream))
        if known != layout:
            channel.bind(layout, wide_dtype(parameters), parameters[0][1].device)
            self._streams[stream] = (layout, channel)
        return channel

    def _channel_for(self, stream: int) -> Channel:
        """A channel that holds nothing yet."""
        channel = copy.deepcopy(self.channel)
        first, last = copy.deepcopy(self._accompanied.get(stream, (None, None)))
        more = [memory for memory in (first, *channel.memories, last) if memory is not None]
        return Channel(channel.exchange, more)

    def forget(self) -> None:
        self._streams.clear()

    def residual_norm(self) -> float:
        return math.hypot(*(channel.residual_norm() for _, channel in self._streams.values()))

    def __repr__(self) -> str:
        options = f", local={self.local!r}" if self.local != "none" else ""
        options += ", mask_momentum=True" if self.mask_momentum else ""
        options += ", sparse=True" if self.takes_sparse else ""
        return f"GradientSync({self.channel!r}{self._patterns()}{options})"

    def state_dict(self, stream: int) -> Held:
        if stream not in self._streams:
            return {}
        return prefixed(type(self).__name__, self._streams[stream][1].state_dict())

    def load_state_dict(self, stream: int, state: Held, parameters: NamedParameters) -> None:
        channel = self._channel_for(stream)
        channel.load_state_dict(within(type(self).__name__, state), [name for name, _ in parameters])
        self._streams[stream] = (None, channel)


class BucketSync(Sync):
    """Averages DDP's buckets by all-reduce inside its communication hook, overlapping the backward pass as DDP does.

    For methods without memory only: the hook also sees gradients that no optimizer consumes. It must claim all
    parameters. Parameters that DDP does not know, since they were frozen when it was set up, are averaged at the step;
    stock DDP lets replicas drift there.

    Args:
        wire_dtype: Dtype on the wire: "same" as the gradient, or a narrower one that it is rounded to.

    Raises:
        ValueError: Unknown `wire_dtype`.
    """

    def __init__(self, wire_dtype: WireDtype = "same") -> None:
        super().__init__()
        check_wire_dtype(wire_dtype)
        self.wire_dtype = wire_dtype
        self._in_buckets: set[int] = set()
        self._late = GradientSync(Channel(DenseAllReduce(wire_dtype)))

    def limited(self, within: Sequence[str] = ("*",), outside: Sequence[str] = ()) -> Sync:
        """At the step instead of in DDP's buckets, which hold all parameters."""
        return GradientSync(Channel(DenseAllReduce(self.wire_dtype))).limited(within, outside)

    def attach(self, in_buckets: Sequence[Parameter], finds_unused: bool, wire: Wire) -> None:
        """Says what DDP reduces in buckets, and where to communicate.

        Args:
            in_buckets: The parameters that DDP's reducer knows.
            finds_unused: Whether DDP agrees on unused parameters after each backward pass.
            wire: Where to communicate.
        """
        self._in_buckets = {id(parameter) for parameter in in_buckets}
        self._finds_unused = finds_unused
        self._wire = wire

    # DDP checks the hook's signature: the argument must be called `bucket`, and annotations must not be strings.
    def hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """DDP communication hook: the mean of one bucket over ranks."""
        ledger, buffer = self._wire.ledger, bucket.buffer()
        dtype = WIRE_DTYPES[self.wire_dtype] or buffer.dtype
        ledger.ddp_bytes += buffer.numel() * buffer.element_size()
        ledger.elements += buffer.numel()
        ledger.sent_elements += buffer.numel()
        if self._finds_unused and bucket.is_last():
            # DDP's own all-reduce of one 32-bit integer for each parameter.
            ledger.record(DDP_UNUSED, "all_reduce", 4 * len(self._in_buckets))
        # Divided before the sum, so that float16 does not overflow where the mean would not.
        sending = buffer.div_(self._wire.world_size).to(dtype)
        begin = time.perf_counter()

        def received(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            ledger.exchange_seconds += time.perf_counter() - begin
            reduced: Tensor = future.value()[0]
            return buffer if reduced.dtype == buffer.dtype else buffer.copy_(reduced)

        return self._wire.all_reduce_future(sending).then(received)

    def synchronize(
        self, stream: int, optimizer: Optimizer, parameters: NamedParameters, round: Round, wire: Wire
    ) -> AbstractContextManager[Callable[[], None]]:
        late = self._not_in_buckets(parameters)
        if not late:
            return nullcontext(nothing_to_wait_for)
        return self._late.synchronize(stream, optimizer, late, replace(round, layout=Layout.of(late)), wire)

    def state_dict(self, stream: int) -> Held:
        return self._late.state_dict(stream)

    def load_state_dict(self, stream: int, state: Held, parameters: NamedParameters) -> None:
        self._late.load_state_dict(stream, state, parameters)

    def meets(self, parameters: NamedParameters) -> bool:
        """In buckets, what is not finite on one rank is so on all by now: it has been added up."""
        return bool(self._not_in_buckets(parameters))

    def skip(self, stream: int, optimizer: Optimizer, parameters: NamedParameters, round: Round, wire: Wire) -> None:
        self._late.skip(stream, optimizer, self._not_in_buckets(parameters), round, wire)

    def _not_in_buckets(self, parameters: NamedParameters) -> NamedParameters:
        return [(name, parameter) for name, parameter in parameters if id(parameter) not in self._in_buckets]

    def forget(self) -> None:
        self._late.forget()

    def __repr__(self) -> str:
        return f"BucketSync(wire_dtype={self.wire_dtype!r})"
