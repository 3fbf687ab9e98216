"""Collectives, and the ledger of what they moved. The only file that imports torch.distributed."""

import copy
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket as GradBucket

Collective = Literal["all_reduce", "all_gather", "broadcast", "send"]
CheckLength = Callable[[int, int], None]
"""Refuses, by an exception, the length of what a rank is about to send; is given both."""

# Ledger rows. The first three are ours; a ratio is computed from them alone.
GRADIENTS = "gradients"
UPDATES = "weight updates"
PARAMETERS = "parameters"
OURS = (GRADIENTS, UPDATES, PARAMETERS)
SETUP = "set-up"
COMPARISON = "comparison of replicas"
DDP_SETUP = "DDP set-up"
DDP_BUFFERS = "DDP buffers"
DDP_UNUSED = "DDP unused-parameter map"
LIGHTNING = "Lightning, metrics"

BACKENDS = ("gloo", "nccl")

# What Gloo and NCCL say where another rank is the reason; they raise RuntimeError for everything, a wrong dtype too.
_GONE = re.compile(
    r"connection|timed out|timeout|broken pipe|no route to host|remote (worker|process)|nccl(Remote|System)Error",
    re.IGNORECASE,
)


class PeerError(RuntimeError):
    """Another rank is gone, or did not come within the process group's timeout. What it was waited for, and for how
    long, is in the message; the backend's own error is the cause."""


def link_bytes(collective: Collective, handed_bytes: float, world_size: int) -> float:
    """Bytes that one rank puts on the link, averaged over ranks, for `handed_bytes` that each rank hands over.

    A model, by the collective's published algorithm: a ring all-reduce sends every byte 2(W-1)/W times (Patarasuk &
    Yuan 2009), an all-gather sends it to W-1 others, and a broadcast crosses the network W-1 times in all. What is
    sent to one other rank crosses once.
    """
    if collective == "send":
        return handed_bytes
    if collective == "all_reduce":
        return handed_bytes * 2 * (world_size - 1) / world_size
    if collective == "all_gather":
        return handed_bytes * (world_size - 1)
    return handed_bytes * (world_size - 1) / world_size


@dataclass
class Traffic:
    """Totals of one kind of collective.

    Attributes:
        calls: How often it was called.
        handed_bytes: Bytes in the tensors that this rank handed over, padding and headers included.
    """

    calls: int = 0
    handed_bytes: int = 0


_TOTALS = ("ddp_bytes", "ddp_gathered_bytes", "sent_elements", "elements", "exchange_seconds", "steps")


class Ledger:
    """What crossed the wire, by purpose and collective.

    Rows are purposes: `gradients`, `weight updates` and `parameters` (averages of what goes apart) are what the method
    sent, the others what DDP and Lightning send whatever the method. Bytes handed over are exact; bytes on the link
    follow from them by `link_bytes`.

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.rows: dict[str, dict[Collective, Traffic]] = {}
        self.ddp_bytes = 0
        self.ddp_gathered_bytes = 0
        self.sent_elements = 0
        self.elements = 0
        self.exchange_seconds = 0.0
        self.steps = 0

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Adds the time in its context to `exchange_seconds`."""
        begin = time.perf_counter()
        yield
        self.exchange_seconds += time.perf_counter() - begin

    def record(self, row: str, collective: Collective, handed_bytes: int) -> None:
        """Enters one call."""
        traffic = self.rows.setdefault(row, {}).setdefault(collective, Traffic())
        traffic.calls += 1
        traffic.handed_bytes += handed_bytes

    def handed_bytes(self, row: str = GRADIENTS) -> int:
        """Bytes that this rank handed to the backend for one purpose."""
        return sum(traffic.handed_bytes for traffic in self.rows.get(row, {}).values())

    def link_bytes(self, row: str = GRADIENTS) -> float:
        """Bytes that this rank put on the link for one purpose, by the collectives' published algorithms.

        Every collective in use is symmetric on average over ranks: as much comes in.
        """
        return sum(
            link_bytes(kind, traffic.handed_bytes, self.world_size) for kind, traffic in self.rows.get(row, {}).items()
        )

    @property
    def ddp_link_bytes(self) -> float:
        """Bytes that DDP's all-reduce of the same gradients, in their own dtype, would have put on the link, and its
        all-gather of those that are sparse."""
        gathered = link_bytes("all_gather", self.ddp_gathered_bytes, self.world_size)
        return link_bytes("all_reduce", self.ddp_bytes, self.world_size) + gathered

    @property
    def sent_link_bytes(self) -> float:
        """Bytes that this rank put on the link for the method, whatever it sent."""
        return sum(self.link_bytes(row) for row in OURS)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank handed to the backend for the method: what the papers count as upstream."""
        return sum(self.handed_bytes(row) for row in OURS)

    def compression_ratio(self) -> float:
        """Link bytes over link bytes: DDP's for the same steps, by ours. `nan` in a world of one: nothing is sent."""
        sent = self.sent_link_bytes
        return self.ddp_link_bytes / sent if sent else float("nan")

    def state_dict(self) -> dict[str, Any]:
        """All totals, as plain numbers."""
        rows = {row: {kind: list(vars(t).values()) for kind, t in kinds.items()} for row, kinds in self.rows.items()}
        return {"rows": rows, **{name: getattr(self, name) for name in _TOTALS}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Adds the totals of an earlier run in a world of the same size, which this one goes on with."""
        for row, kinds in state["rows"].items():
            for kind, (calls, handed_bytes) in kinds.items():
                traffic = self.rows.setdefault(row, {}).setdefault(kind, Traffic())
                traffic.calls += calls
                traffic.handed_bytes += handed_bytes
        for name in _TOTALS:
            setattr(self, name, getattr(self, name) + state[name])

    def density(self) -> float:
        """Elements sent by elements trained, over all steps. `nan` before the first."""
        return self.sent_elements / self.elements if self.elements else float("nan")


class Waiting:
    """From when a rank hands something over until it has what it waits for, in a `with` statement.

    Args:
        wire: Who waits.
        call: What for, in words.

    Raises:
        PeerError: In the place of an error within it whose reason is another rank.
    """

    def __init__(self, wire: "Wire", call: str) -> None:
        self._wire = wire
        self._call = call
        self._begin = time.monotonic()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, PeerError) or not _GONE.search(str(error)):
            return
        wire, seconds = self._wire, time.monotonic() - self._begin
        if wire.failures:
            # A broken connection stays broken: whatever is tried next, such as to save, fails for the first reason.
            raise wire.failures[0] from wire.failures[0].__cause__
        when = "before the first optimizer step" if wire.step is None else f"in optimizer step {wire.step}"
        failure = PeerError(
            f"rank {wire.rank} waited {seconds:.1f} s in vain for its {self._call} {when}. Another rank is gone, or did"
            " not come within the process group's timeout: look for the first error in the logs of all ranks. Where one"
            " is only slow at times, give the strategy a longer timeout=datetime.timedelta(hours=1)."
        )
        wire.failures.append(failure)
        raise failure from error


class Wire:
    """Collectives over one process group; every call is entered in the ledger.

    Each raises a `PeerError` where another rank is gone, or does not come within the group's timeout.

    Args:
        ledger: Where the calls are entered; a new one by default.
        group: Process group; the default group where None.
        row: The purpose under which they are entered, where a call names none.

    Attributes:
        step: Optimizer steps finished before the one that is at work, for messages; None before the first.
        failures: The first peer error, if there was one.

    Raises:
        ValueError: The group's backend is not one that these collectives are written for.
    """

    def __init__(
        self, ledger: Ledger | None = None, group: dist.ProcessGroup | None = None, row: str = GRADIENTS
    ) -> None:
        backend = dist.get_backend(group)
        if backend not in BACKENDS:
            raise ValueError(
                f"process_group_backend must be one of {', '.join(BACKENDS)}, on which the collectives are tested;"
                f" got {backend!r}. Use gloo on CPUs and nccl on NVIDIA GPUs."
            )
        self.group = group
        self.row = row
        self.backend = backend
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.ledger = ledger if ledger is not None else Ledger(self.world_size)
        self.step: int | None = None
        self.failures: list[PeerError] = []

    def under(self, row: str) -> "Wire":
        """The same wire, whose calls are entered under another purpose."""
        wire = copy.copy(self)
        wire.row = row
        return wire

    def calling(self, collective: Collective, handed_bytes: int, row: str | None = None, peer: str = "") -> Waiting:
        """Enters one call in the ledger; it is to be made, and waited for, within the context."""
        row = row or self.row
        self.ledger.record(row, collective, handed_bytes)
        return Waiting(self, f"{collective}{peer} of {handed_bytes:,} bytes ({row})")

    def _calling(self, collective: Collective, tensor: Tensor, row: str | None, peer: str = "") -> Waiting:
        return self.calling(collective, tensor.numel() * tensor.element_size(), row, peer)

    def all_reduce_(self, tensor: Tensor, row: str | None = None) -> Tensor:
        """Sums `tensor` over ranks, in place. Bit-equal on all ranks."""
        with self._calling("all_reduce", tensor, row):
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_reduce_later_(self, tensor: Tensor, row: str | None = None) -> Callable[[], None]:
        """Begins to sum `tensor` over ranks, in place; calling what it gives waits until that is done."""
        waiting = self._calling("all_reduce", tensor, row)
        with waiting:
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None

        def wait() -> None:
            with waiting:
                work.wait()

        return wait

    def all_reduce_future(self, tensor: Tensor, row: str | None = None) -> "torch.futures.Future[list[Tensor]]":
        """Begins to sum `tensor` over ranks, in place; the future holds `[tensor]`.

        An error reaches whoever waits for the future as torch's own, of which a `PeerError` is but a part of the text:
        it is in `failures`.
        """
        waiting = self._calling("all_reduce", tensor, row)
        with waiting:
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None

        def received(future: torch.futures.Future[list[Tensor]]) -> list[Tensor]:
            with waiting:
                return future.value()

        future: torch.futures.Future[list[Tensor]] = work.get_future()
        return future.then(received)

    def all_reduce_or_(self, tensor: Tensor, row: str | None = None) -> Tensor:
        """The bitwise OR of `tensor` (uint8) over ranks. In place on Gloo; NCCL has none, so all are gathered there."""
        if self.backend != "gloo":
            gathered = self.all_gather(tensor, row)
            for other in gathered[1:]:
                gathered[0].bitwise_or_(other)
            return gathered[0]
        with self._calling("all_reduce", tensor, row):
            dist.all_reduce(tensor, op=dist.ReduceOp.BOR, group=self.group)
        return tensor

    def send(self, payload: Tensor, rank: int, row: str | None = None) -> None:
        """Sends `payload` (`[bytes]` uint8) to one rank, which calls `receive`; before it its length, 8 bytes."""
        self._meet(rank, payload, None, None, row)

    def receive(self, rank: int, device: torch.device, check: CheckLength) -> Tensor:
        """The payload that one rank sends; `check` is given its length and the rank before it is made room for."""
        return self._meet(rank, None, device, check, None)

    def swap(self, payload: Tensor, rank: int, check: CheckLength, row: str | None = None) -> Tensor:
        """Sends `payload` (`[bytes]` uint8) to a rank that does the same, and gives what that sent, as `receive`."""
        return self._meet(rank, payload, payload.device, check, row)

    def _meet(
        self, rank: int, payload: Tensor | None, device: torch.device | None, check: CheckLength | None, row: str | None
    ) -> Tensor:
        peer = rank if self.group is None else dist.get_global_rank(self.group, rank)
        received = torch.zeros(1, dtype=torch.int64, device=device)
        for part in ("length", "payload"):
            operations, waiting = [], None
            if payload is not None:
                going = payload if part == "payload" else torch.tensor([payload.numel()], device=payload.device)
                waiting = self._calling("send", going, row, f" to rank {rank}")
                operations.append(dist.P2POp(dist.isend, going, peer, self.group))
            if device is not None:
                if part == "payload":
                    assert check is not None
                    check(int(received), rank)
                    received = torch.empty(int(received), dtype=torch.uint8, device=device)
                operations.append(dist.P2POp(dist.irecv, received, peer, self.group))
            expected = received.numel() * received.element_size()
            with waiting or Waiting(self, f"receive from rank {rank} of {expected:,} bytes ({row or self.row})"):
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
        return received

    def all_gather(self, tensor: Tensor, row: str | None = None) -> Tensor:
        """Every rank's `tensor`, `[W, *tensor.shape]`; shapes must be equal on all ranks."""
        gathered = tensor.new_empty((self.world_size, *tensor.shape))
        with self._calling("all_gather", tensor, row):
            dist.all_gather_single(gathered.view(-1), tensor.reshape(-1), group=self.group)
        return gathered
