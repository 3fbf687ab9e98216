"""What sums and gathers take around Gloo's ring, and straight from everyone to everyone, in the lab of network.py.

    python benchmarks/collectives.py --ranks 2 4 8 --rates 100mbit 1gbit --rtts 0ms 20ms 100ms

Both ways take turns, on all ranks at once. A time is that of rank 0 from a barrier to its result. Prints a Markdown
table of medians with quartiles, and writes all times to a JSON file.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from network import Lab
from runs import COMMIT, load, made_with, save, versions

from lightning_sparsecomm.basis.far import FarWire
from lightning_sparsecomm.basis.groups import destroy_all

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from command_line import at_least

BYTES = (256, 25_000, 600_000, 6_000_000)
WAYS = {"around": False, "straight": True}
WARM_UPS = 2

Times = dict[str, dict[str, list[float]]]


def measure(rank: int, world_size: int, port: int, address: str, sizes: list[int], repetitions: int) -> list[Times]:
    """For each size: seconds of each repetition, by collective and way."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=world_size)
    wire, found = FarWire(), []
    for size in sizes:
        x = torch.full((max(1, size // 4),), float(rank))
        kinds: dict[str, Callable[[], torch.Tensor]] = {
            "gather": lambda x=x: wire.all_gather(x),
            "sum": lambda x=x: wire.all_reduce_(x.clone()),
        }
        times: Times = {kind: {way: [] for way in WAYS} for kind in kinds}
        for repetition in range(WARM_UPS + repetitions):
            for kind, call in kinds.items():
                for way, is_far in WAYS.items():
                    wire.far = is_far
                    dist.barrier()
                    begin = time.perf_counter()
                    result = call()
                    seconds = time.perf_counter() - begin
                    total = sum(range(world_size))
                    expected = [float(r) for r in range(world_size)] if kind == "gather" else [float(total)]
                    assert result.view(-1, x.numel())[:, -1].tolist() == expected, (kind, way)
                    if repetition >= WARM_UPS:
                        times[kind][way].append(seconds)
        found.append(times)
    destroy_all()
    return found
