"""Collectives, entered in a ledger. With `groups`, `launched` and testing.ranks, the only file that imports
torch.distributed."""

import copy
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket as GradBucket
from torch._C._distributed_c10d import Work as Work

from lightning_sparsecomm.basis.groups import (
    Closing,
    all_gather_single,
    default_timeout,
    group_beside,
    new_group,
    own_group,
)
from lightning_sparsecomm.basis.ledger import GRADIENTS, Collective, Ledger
from lightning_sparsecomm.basis.meeting import meet
from lightning_sparsecomm.basis.peers import PeerError as PeerError
from lightning_sparsecomm.basis.peers import Peers
from lightning_sparsecomm.basis.phases import phase

BACKENDS = ("gloo", "nccl")

# What Gloo and NCCL say when another rank is the cause. They raise RuntimeError for everything, wrong dtypes too.
_GONE = re.compile(
    r"connection|timed out|timeout|broken pipe|no route to host|remote (worker|process)|nccl(Remote|System)Error",
    re.IGNORECASE,
)
_LATE = re.compile("timed out|timeout", re.IGNORECASE)


class Waiting:
    """A `with` block in which a rank waits for others. A `PeerError` replaces an error that another rank has caused."""

    def __init__(self, wire: "Wire", call: str) -> None:
        self._wire = wire
        self._call = call
        self._begin = time.monotonic()

    def __enter__(self) -> None:
        self._phase = phase("wait")
        self._phase.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._phase.__exit__(kind, error, traceback)
        if not isinstance(error, RuntimeError) or isinstance(error, PeerError) or not _GONE.search(str(error)):
            return
        wire = self._wire
        if wire.failures:
            # A broken connection stays broken: later calls, such as those of a save, fail for the first reason.
            raise wire.failures[0] from wire.failures[0].__cause__
        seconds, late = time.monotonic() - self._begin, bool(_LATE.search(str(error)))
        raise wire.failed(wire.peers.error(f"{self._call} {wire.when}", seconds, late)) from error


class Wire:
    """Collectives over one process group, each entered in the ledger; they raise `PeerError` where a rank is gone.

    >>> run_ranks(2, lambda rank: Wire().all_gather(torch.tensor([rank])).tolist())[0]
    [[0], [1]]

    Args:
        ledger: Where calls are entered; a new one by default.
        group: Process group; None for the default group.
        row: Row of the ledger for calls that name none.

    Attributes:
        mirrors: Whether there are no other ranks, and what they say is what this one does: for rehearsals.
        far: Seconds of a round trip between ranks, where it is long; see `FarWire`. Otherwise 0.
        step: Optimizer steps finished, for messages; None before the first step.
        step_group: Process group for calls in optimizer steps; None for the same as for others.
        place: Where the run is between optimizer steps, for messages; None in training.
        failures: The first `PeerError`, if there was one.
        closing: Called by `close`, the last one first.

    Raises:
        ValueError: These collectives do not support the group's backend.
    """

    mirrors: ClassVar[bool] = False
    far: float = 0.0
    place: str | None = None
    step_group: dist.ProcessGroup | None = None
    _apart: Sequence[Sequence[int]] = ()  # The ranks of this group, and of those made with it by `within`.

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
        self.peers = Peers(self.rank, self.world_size)
        self.closing: Closing = []

    @classmethod
    def apart(cls) -> "Wire":
        """A wire with two process groups of its own: one for optimizer steps, one for all other calls. A collective.

        A rank may be in a step while another validates, or has ended. Calls of the two then wait for each other until
        the timeout, which is that of the default group. In one group they would exchange what was meant for others.
        """
        wire = cls()
        if wire.world_size > 1:
            timeout = default_timeout()
            wire.step_group, wire.group = (new_group(timeout, wire.closing) for _ in range(2))
            store, name = dist.distributed_c10d._get_default_store(), wire.step_group.group_name
            wire.peers = Peers(wire.rank, wire.world_size, store, name, timeout)
        return wire

    def beside(self) -> "Wire":
        """A wire with a group, whose calls keep an order of their own, and a ledger: for a thread. A collective."""
        other = copy.copy(self)
        other.ledger, other.step_group = Ledger(self.world_size), None
        other.group = group_beside(self.group, self._apart, self.closing)
        return other

    def close(self) -> None:
        """Closes the process groups that this wire has made. Ranks that still wait in them fail at once."""
        backends = []
        while self.closing:
            backends.append(self.closing.pop()())
        self.step_group = self.group = None
        backends.clear()

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """A context of calls that belong to an optimizer step."""
        outside = self.group
        if self.step_group is not None:
            self.group = self.step_group
        try:
            yield
        finally:
            self.group = outside

    @property
    def when(self) -> str:
        """Where this rank is, for messages."""
        if self.place is None:
            return "before the first optimizer step" if self.step is None else f"in optimizer step {self.step}"
        return f"in {self.place}, after {self.step or 0} optimizer steps"

    def failed(self, failure: PeerError) -> PeerError:
        """Notes the first failure, after which nothing waits any more."""
        self.failures.append(failure)
        return failure

    def check_after(self, call: str, seconds: float) -> None:
        """Raises `PeerError` if a call past this wire waited until the timeout, and other ranks say where they waited.

        For calls of Lightning's own that ignore their errors. Costs nothing where `call` took less.
        """
        if not self.failures and seconds > 0.9 * self.peers.timeout.total_seconds() and self.peers.places():
            raise self.failed(self.peers.error(f"{call} {self.when}", seconds, late=True))

    def under(self, row: str) -> "Wire":
        """The same wire, with another row of the ledger for its calls."""
        wire = copy.copy(self)
        wire.row = row
        return wire

    def calling(self, collective: Collective, handed_bytes: int, row: str | None = None) -> Waiting:
        """Enters one call in the ledger. Make the call, and wait for it, in the block that this opens."""
        row = row or self.row
        self.ledger.record(row, collective, handed_bytes)
        return Waiting(self, f"{collective} of {handed_bytes:,} bytes ({row})")

    def _calling(self, collective: Collective, tensor: Tensor, row: str | None) -> Waiting:
        return self.calling(collective, tensor.nbytes, row)

    def all_reduce_(self, tensor: Tensor, row: str | None = None) -> Tensor:
        """Sums `tensor` over ranks, in place. Bit-equal on all ranks."""
        with self._calling("all_reduce", tensor, row):
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_reduce_later_(self, tensor: Tensor, row: str | None = None) -> Callable[[], None]:
        """Starts to sum `tensor` over ranks, in place. Call what it returns to wait until that is done."""
        waiting, work = self.start_sum(tensor, row)

        def wait() -> None:
            with waiting:
                work.wait()

        return wait

    def start_sum(self, tensor: Tensor, row: str | None = None) -> tuple[Waiting, Work]:
        """Starts to sum `tensor` over ranks, in place. Wait for the work within the context that comes with it."""
        waiting = self._calling("all_reduce", tensor, row)
        with waiting:
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None
        return waiting, work

    def all_reduce_or_(self, tensor: Tensor, row: str | None = None) -> Tensor:
        """The bitwise OR of `tensor` (uint8) over ranks; in place on Gloo. NCCL has no OR, so it gathers there."""
        if self.backend != "gloo":
            gathered = self.all_gather(tensor, row)
            for other in gathered[1:]:
                gathered[0].bitwise_or_(other)
            return gathered[0]
        with self._calling("all_reduce", tensor, row):
            dist.all_reduce(tensor, op=dist.ReduceOp.BOR, group=self.group)
        return tensor

    def all_gather(self, tensor: Tensor, row: str | None = None) -> Tensor:
        """Every rank's `tensor`, `[W, *tensor.shape]`; shapes must be equal on all ranks."""
        gathered = tensor.new_empty((self.world_size, *tensor.shape))
        with self._calling("all_gather", tensor, row):
            all_gather_single(gathered.view(-1), tensor.reshape(-1), self.group)
        return gathered

    def all_to_all(self, tensor: Tensor, row: str | None = None) -> Tensor:
        """Row i of the result is what rank i has for this one in its own `tensor`, `[W, ...]`; of one shape on all."""
        with self._calling("all_to_all", tensor, row):
            received, work = self.start_all_to_all(tensor)
            work.wait()
        return received

    def all_to_all_of(self, parts: Sequence[Tensor], lengths: Sequence[int], row: str | None = None) -> list[Tensor]:
        """What each rank has for this one, of so many elements. This one's own `parts`, 1-D, are one for each rank."""
        sending = torch.cat(list(parts))
        received = sending.new_empty(sum(lengths))
        sizes = [part.numel() for part in parts]
        with self.calling("send", sending.nbytes - parts[self.rank].nbytes, row):
            dist.all_to_all_single(received, sending, list(lengths), sizes, group=self.group)
        return list(received.split(list(lengths)))

    def start_all_to_all(self, tensor: Tensor) -> tuple[Tensor, Work]:
        """Starts `all_to_all`. The caller enters it in the ledger, and waits within the context that this gives."""
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        work = dist.all_to_all_single(received.view(-1), tensor.reshape(-1), group=self.group, async_op=True)
        assert work is not None
        return received, work

    def meet(self, place: str, seconds: float) -> bool:
        """Waits for all ranks to come to a place, for so many seconds. Whether they came is equal on all that did.

        It goes through the store that the ranks have joined by. So a rank that does not come may make other calls
        meanwhile, and waits for no one. A place serves once.
        """
        if self.world_size == 1:
            return True
        return meet(dist.distributed_c10d._get_default_store(), place, self.rank, self.world_size, seconds)


def within(wire: Wire, groups: Sequence[Sequence[int]], row: str = GRADIENTS) -> Wire:
    """A wire between the ranks of this rank's group, which count from 0. A collective of all ranks.

    It shares the ledger and the first failure with `wire`, which closes it.

    Args:
        wire: Between all ranks.
        groups: Ranks; each rank is in one group.
        row: As for `Wire`.
    """
    # torch numbers a group's ranks in ascending order, whatever the order in which they are given.
    other, ranks = copy.copy(wire), next(sorted(ranks) for ranks in groups if wire.rank in ranks)
    other.group, other.step_group = own_group(groups, wire.rank, default_timeout(), wire.closing), None
    other.rank, other.world_size, other.row = ranks.index(wire.rank), len(ranks), row
    other._apart = groups

    def let_go() -> None:
        other.group = None

    wire.closing.append(let_go)
    return other
