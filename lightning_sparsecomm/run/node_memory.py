"""Memory that the ranks of one machine share, so that what they sum does not pass through a network's layers."""

import mmap
import os
import uuid
from contextlib import suppress

import torch
from torch import Tensor

from lightning_sparsecomm.basis.ledger import INSIDE
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.run.gathered import gather_texts

# A file system in memory, on Linux.
FOLDER = "/dev/shm"

_CPU = torch.device("cpu")


class NodeMemory:
    """Stretches of memory that all ranks of a node read and write; on CPUs, where they are on one machine indeed.

    Each is a file that loses its name as soon as all ranks have opened it: nothing is left of it when they end, or are
    killed. Its pages are reserved before they are used, as a container's shared memory may be small; where that fails,
    or a rank does not find the file, all go without.

    Whoever writes calls `meet` before others read. No rank writes what another still reads: between a sum and the next
    one there is a meeting, and results alternate between two halves, of which one is left alone until the next meeting.

    Args:
        inside: Between the ranks of the node.
    """

    def __init__(self, inside: Wire) -> None:
        self._inside = inside
        self._held: dict[str, Tensor | None] = {}
        self._half = 0
        # Whether other ranks may still be reading what they sum.
        self._summing = False

    def to_sum(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """A row for each rank, `[L, elements]`, to write one's own; None for none. A collective inside the node.

        Other ranks read them after `meet`.
        """
        ranks = self._inside.world_size
        held = self._room("to sum", ranks * elements * dtype.itemsize, device)
        if held is None:
            return None
        if self._summing:
            self.meet()
        return held[: ranks * elements * dtype.itemsize].view(dtype).view(ranks, elements)

    def for_results(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """`[elements]`, for each rank to write its part; None for none. A collective inside the node.

        Other ranks read it after `meet`, and until the second call from now.
        """
        size = -(-elements * dtype.itemsize // 8) * 8
        held = self._room("results", 2 * size, device)
        if held is None:
            return None
        self._half = 1 - self._half
        half = held[: len(held) // 2] if self._half else held[len(held) // 2 :]
        return half[: elements * dtype.itemsize].view(dtype)

    def meet(self, to_sum: bool = False) -> None:
        """Waits for all ranks of the node; says whether they will read what each has written to sum. A collective."""
        self._inside.all_reduce_or_(torch.zeros(1, dtype=torch.uint8), INSIDE)
        self._summing = to_sum

    def _room(self, name: str, size: int, device: torch.device) -> Tensor | None:
        """A stretch of at least that many bytes, uint8."""
        if device.type != "cpu" or None in self._held.values():
            return None
        held = self._held.get(name)
        if held is None or len(held) < size:
            # What all had before is freed when none reads it any more.
            self._held[name] = held = _opened(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE, self._inside)
        return held


def _opened(size: int, inside: Wire) -> Tensor | None:
    """Memory that all ranks share, `[size]` uint8; None, on all of them, where one cannot. A collective."""
    own = _made(size) if inside.rank == 0 else ""
    try:
        path = gather_texts(own, inside, _CPU, INSIDE)[0]
        memory = _mapped(path, size) if path else None
        failed = torch.tensor([memory is None], dtype=torch.uint8)
        if bool(inside.all_reduce_or_(failed, INSIDE).any()):
            return None
    finally:
        if own:
            os.unlink(own)
    return memory


def _made(size: int) -> str:
    """The path of a new file of that size, all of whose pages are there; empty where that cannot be."""
    path = os.path.join(FOLDER, f"sparsecomm-{uuid.uuid4().hex}")
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError:
        return ""
    try:
        os.posix_fallocate(file, 0, size)
    except (OSError, AttributeError):
        os.unlink(path)
        return ""
    finally:
        os.close(file)
    return path


def _mapped(path: str, size: int) -> Tensor | None:
    with suppress(OSError, ValueError):
        file = os.open(path, os.O_RDWR)
        try:
            return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
        finally:
            os.close(file)
    return None
