"""Whence, when and whither: what is exchanged for which parameters at which moment."""

import copy
import fnmatch
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.exchange.dense import WIRE_DTYPES, DenseAllReduce, WireDtype, check_wire_dtype
from lightning_sparsecomm.gradients import NamedParameters, gradient_of, write_gradients
from lightning_sparsecomm.layout import Layout, SparseVector
from lightning_sparsecomm.rounds import Round
from lightning_sparsecomm.wire import DDP_UNUSED, GradBucket, Wire


class Sync(ABC):
    """What a method does for some of the parameters. A method is one or more syncs; each parameter belongs to one.

    A sync as the user makes it is a prototype: training works on a copy of it, so that a method can be used again.

    Args:
        parameters: Shell-style patterns of parameter names, as in `module.named_parameters()`.
        exclude: Patterns of names that are left to other syncs.

    Raises:
        TypeError: A string is given where a list of patterns is meant.
    """

    def __init__(self, parameters: Sequence[str] = ("*",), exclude: Sequence[str] = ()) -> None:
        for option, patterns in (("parameters", parameters), ("exclude", exclude)):
            if isinstance(patterns, str):
                raise TypeError(
                    f"{option} must be a list of patterns; got the string {patterns!r}. Use [{patterns!r}]."
                )
        self.parameters = tuple(parameters)
        self.exclude = tuple(exclude)

    def claims(self, name: str, parameter: Parameter) -> bool:
        """Whether this parameter belongs to this sync; the same on all ranks."""
        return matches(name, self.parameters) and not matches(name, self.exclude)

    def _patterns(self) -> str:
        parts = [] if self.parameters == ("*",) else [f"parameters={list(self.parameters)!r}"]
        parts += [f"exclude={list(self.exclude)!r}"] if self.exclude else []
        return "".join(f", {part}" for part in parts)

    @abstractmethod
    def synchronize(self, stream: int, parameters: NamedParameters, round: Round, wire: Wire) -> None:
        """Called once per optimizer step: leaves the shared gradient in each parameter's `.grad`.

        Args:
            stream: Index of the optimizer. State of one stream never mixes with that of another.
            parameters: This sync's parameters among the optimizer's, in named-parameter order: all that have required
                a gradient at some time.
            round: Step, epoch and seeds; its layout is that of `parameters`.
            wire: Where to communicate.
        """

    def residual_norm(self) -> float:
        """Euclidean norm of what this rank holds back; 0 where nothing is."""
        return 0.0


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
    """

    def __init__(self, channel: Channel, parameters: Sequence[str] = ("*",), exclude: Sequence[str] = ()) -> None:
        super().__init__(parameters, exclude)
        self.channel = channel
        self._streams: dict[int, tuple[Layout, Channel]] = {}

    def synchronize(self, stream: int, parameters: NamedParameters, round: Round, wire: Wire) -> None:
        channel = self._bound(stream, parameters, round.layout)
        gradients = [gradient_of(name, parameter) for name, parameter in parameters]
        begin = time.perf_counter()
        exchanged = channel.reduce(gradients, round, wire)
        ledger = wire.ledger
        ledger.exchange_seconds += time.perf_counter() - begin
        ledger.ddp_bytes += sum(p.numel() * p.element_size() for _, p in parameters if p.requires_grad)
        ledger.elements += round.layout.size
        sent = exchanged.sent
        ledger.sent_elements += sent.indices.numel() if isinstance(sent, SparseVector) else sent.numel()
        write_gradients(parameters, exchanged, round.layout)

    def _bound(self, stream: int, parameters: NamedParameters, layout: Layout) -> Channel:
        known, channel = self._streams.get(stream, (None, None))
        if channel is None:
            channel = copy.deepcopy(self.channel)
        if known != layout:
            dtype = torch.float32
            for _, parameter in parameters:
                dtype = torch.promote_types(dtype, parameter.dtype)
            channel.bind(layout, dtype, parameters[0][1].device)
            self._streams[stream] = (layout, channel)
        return channel

    def residual_norm(self) -> float:
        return math.hypot(*(channel.residual_norm() for _, channel in self._streams.values()))

    def __repr__(self) -> str:
        return f"GradientSync({self.channel!r}{self._patterns()})"

    def state_dict(self) -> dict[int, list[dict[str, Tensor]]]:
        """Each stream's memories, by parameter name."""
        return {stream: channel.state_dict() for stream, (_, channel) in self._streams.items()}


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

    def synchronize(self, stream: int, parameters: NamedParameters, round: Round, wire: Wire) -> None:
        late = [(name, parameter) for name, parameter in parameters if id(parameter) not in self._in_buckets]
        if late:
            self._late.synchronize(stream, late, replace(round, layout=Layout.of(late)), wire)

    def __repr__(self) -> str:
        return f"BucketSync(wire_dtype={self.wire_dtype!r})"
