"""For tools that a launcher starts once per rank, without a Trainer: a wire between them, and messages of two ranks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from lightning_sparsecomm.basis.far import FarWire
from lightning_sparsecomm.basis.groups import destroy_all
from lightning_sparsecomm.basis.wire import Waiting, Wire


@contextmanager
def joined(timeout: timedelta) -> Iterator[Wire]:
    """A wire as trainings have between the processes that a launcher such as torchrun has started, on Gloo.

    Raises:
        ValueError: No launcher has set the environment, or it is wrong.
        ConnectionError: The ranks do not find each other.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} must be set in the environment, which tells each process who it is. Start this under"
            " torchrun, for example, with --node-rank=1 on the second machine: torchrun --nnodes=2 --nproc-per-node=1"
            " --node-rank=0 --master-addr=HOST --no-python sparsecomm probe"
        )
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not os.environ[name].isdecimal():
            raise ValueError(
                f"{name} must be a whole number; got {os.environ[name]!r}. Leave it to a launcher such as torchrun."
            )
    if not 0 < int(os.environ["MASTER_PORT"]) < 2**16:
        raise ValueError(
            f"MASTER_PORT must be from 1 to 65535; got {os.environ['MASTER_PORT']}. Use 29500, for example."
        )
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank >= world_size:
        raise ValueError(
            f"RANK must be from 0 to WORLD_SIZE − 1; got {rank}, and {world_size} ranks. Leave both to the launcher."
        )
    try:
        dist.init_process_group("gloo", timeout=timeout, rank=rank, world_size=world_size)
    except dist.DistError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ConnectionError(
            f"MASTER_ADDR:MASTER_PORT must be reached by all {os.environ['WORLD_SIZE']} ranks within"
            f" {timeout.total_seconds():.0f} s; got {address}, and: {error}. Start all machines at about the same time"
            " with one --master-addr and --master-port, and see `sparsecomm doctor` for the network card."
        ) from error
    try:
        yield FarWire.apart()
    finally:
        destroy_all()


def ping(wire: Wire, peer: int, tensor: Tensor) -> None:
    """Sends `tensor` to another rank and back again. Both call it, with tensors of one size; it is overwritten.

    For measuring: it is not entered in the ledger.
    """
    first, second = (dist.send, dist.recv) if wire.rank < peer else (dist.recv, dist.send)
    with Waiting(wire, f"ping of {tensor.numel() * tensor.element_size():,} bytes between ranks"):
        first(tensor, peer, group=wire.group)
        second(tensor, peer, group=wire.group)
