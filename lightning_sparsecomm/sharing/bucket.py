"""Gradients averaged in DDP's buckets, inside its communication hook."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sparsecomm.basis import DDP_UNUSED, Wire
from lightning_sparsecomm.basis.wire import GradBucket, Waiting
from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.exchange import DenseAllReduce
from lightning_sparsecomm.exchange.dense import WIRE_DTYPES, WireDtype, addend_limit, check_wire_dtype
from lightning_sparsecomm.sharing.gradient import GradientSync
from lightning_sparsecomm.sharing.gradients import NamedParameters
from lightning_sparsecomm.sharing.share import Share
from lightning_sparsecomm.sharing.sync import Sync


class BucketSync(Sync):
    """Averages DDP's buckets by all-reduce inside its communication hook, which overlaps the backward pass.

    For methods without memory only: the hook also sees gradients that no optimizer consumes. It must claim all
    parameters. Parameters that DDP does not know, since they were frozen at set-up, are averaged at the step; stock DDP
    lets replicas drift there.

    >>> BucketSync(wire_dtype="bfloat16")
    BucketSync(wire_dtype='bfloat16')

    Args:
        wire_dtype: Dtype on the wire: "same" as the gradient, or a narrower one that it is rounded to.

    Raises:
        ValueError: Unknown `wire_dtype`.
    """

    def __init__(self, wire_dtype: WireDtype = "same") -> None:
        super().__init__()
        check_wire_dtype(wire_dtype)
        self.wire_dtype = wire_dtype

    def dtype(self, tensor: Tensor) -> torch.dtype:
        """The dtype on the wire for a gradient such as this."""
        return WIRE_DTYPES[self.wire_dtype] or tensor.dtype

    def limited(self, inside: Sequence[str] = ("*",), outside: Sequence[str] = ()) -> Sync:
        """At the step instead of in DDP's buckets, which hold all parameters."""
        return self._at_step().limited(inside, outside)

    def start(self, optimizer: Optimizer, parameters: NamedParameters, wire: Wire) -> Share:
        """The share of parameters that are in no bucket."""
        return self._at_step().start(optimizer, parameters, wire)

    def _at_step(self) -> GradientSync:
        return GradientSync(Channel(DenseAllReduce(self.wire_dtype)))


class BucketHook:
    """Runs a `BucketSync` in DDP's hook, for all optimizers together.

    Finite values beyond float16's range are clamped and counted, unless a loss scaler `scales_loss`: it has to see the
    infinities that they become, and lowers the scale.

    Attributes:
        sync: What runs in it.
        first, last: When the first and the last bucket of the last backward pass were ready, by `time.perf_counter`.
    """

    def __init__(self, sync: BucketSync, wire: Wire, scales_loss: bool = False) -> None:
        self.sync = sync
        self.first = self.last = 0.0
        self._wire = wire
        self._scales_loss = scales_loss
        self._started: list[tuple[Waiting, torch.futures.Future[list[Tensor]]]] = []
        self._parameters: list[Parameter] = []
        self._in_buckets: set[int] = set()
        self._finds_unused = False

    def attach(self, in_buckets: Sequence[Parameter], finds_unused: bool) -> None:
        """Says which parameters DDP's reducer knows, and whether DDP agrees on unused ones after each backward pass."""
        self._parameters = list(in_buckets)
        self._in_buckets = {id(parameter) for parameter in in_buckets}
        self._finds_unused = finds_unused

    @property
    def would_wait(self) -> bool:
        """Whether DDP's reducer would wait for a gradient that the last backward pass has not given."""
        return not self._finds_unused and any(parameter.grad is None for parameter in self._parameters)

    def not_in_buckets(self, parameters: NamedParameters) -> NamedParameters:
        """Those of the parameters that have to be averaged at the step."""
        return [(name, parameter) for name, parameter in parameters if id(parameter) not in self._in_buckets]

    # DDP checks the hook's signature: the argument must be called `bucket`, and annotations must not be strings.
    def hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """DDP communication hook: the mean of one bucket over ranks."""
        ledger, buffer = self._wire.ledger, bucket.buffer()
        self.last = time.perf_counter()
        if not self._started:
            self.first = self.last
        dtype = self.sync.dtype(buffer)
        ledger.ddp_bytes += buffer.nbytes
        ledger.elements += buffer.numel()
        ledger.sent_elements += buffer.numel()
        if self._finds_unused and bucket.is_last():
            # DDP's own all-reduce of one 32-bit integer for each parameter.
            ledger.record(DDP_UNUSED, "all_reduce", 4 * len(self._in_buckets))
        # Divided before the sum, so that float16 does not overflow where the mean would not.
        sending = buffer.div_(self._wire.world_size).to(dtype)
        if dtype == torch.float16 and buffer.dtype != dtype and not self._scales_loss:
            self._clamp_(sending, buffer)
        waiting, work = self._wire.start_sum(sending)
        future: torch.futures.Future[list[Tensor]] = work.get_future()
        self._started.append((waiting, future))
        # Python that runs when a sum is done competes with the backward pass, so it is short.
        if sending.dtype == buffer.dtype:
            return future.then(lambda done: done.value()[0])
        return future.then(lambda done: buffer.copy_(done.value()[0]))

    def begin(self) -> None:
        """Call it before each backward pass."""
        self._started = []

    def finish(self) -> None:
        """Call it after each backward pass: notes how long it has waited for the last buckets."""
        if self._started:
            self._wire.ledger.clock.seconds["wait"] += time.perf_counter() - self.last

    def raise_failure(self) -> None:
        """Raises the `PeerError` of a sum that has failed, if one has."""
        # Gloo fails the future, which is what DDP waits for, before it says that the work is completed.
        for waiting, future in self._started:
            if future.done():
                with waiting:
                    future.value()

    def _clamp_(self, sending: Tensor, exact: Tensor) -> None:
        limit = addend_limit(sending.dtype, self._wire.world_size)
        # One pass where all fits. What is not finite stays so, as under ddp.
        if not bool(torch.linalg.vector_norm(exact, torch.inf) <= limit):
            beyond = exact.isfinite().logical_and_(exact.abs() > limit)
            sending.copy_(torch.where(beyond, exact.clamp(-limit, limit), exact))
            self._wire.ledger.clamp(int(beyond.sum()), limit)
