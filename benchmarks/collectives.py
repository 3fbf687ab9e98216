"""What sums and gathers take around Gloo's ring, and straight from everyone to everyone, in the lab of network.py.

    python benchmarks/collectives.py --ranks 2 4 8 --rates 100mbit 1gbit --rtts 0ms 20ms 100ms

Both ways take turns, on all ranks at once. A time is that of rank 0 from a barrier to its result. Prints a Markdown
table of medians with quartiles, and writes all times to a JSON file.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
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
WAYS = {"around": 0.0, "straight": 100.0}  # how far the wire takes the way to be
WARM_UPS = 2

Times = dict[str, dict[str, list[float]]]


def measure(rank: int, world_size: int, store: str, sizes: list[int], repetitions: int) -> list[Times]:
    """For each size: seconds of each repetition, by collective and way."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
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
                for way, far in WAYS.items():
                    wire.far = far
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


def table(runs: list[dict[str, Any]]) -> str:
    """Milliseconds of both ways: medians, and quartiles of the straight one."""
    lines = [
        "| ranks | rate | round trip | bytes of a rank | gather: ring | straight | quartiles | sum: ring | straight"
        " | quartiles |",
        "|---:|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for run in runs:
        cells = []
        for kind in ("gather", "sum"):
            around, straight = (sorted(1000 * each for each in run["seconds"][kind][way]) for way in WAYS)
            first, middle, last = statistics.quantiles(straight, n=4, method="inclusive")
            cells += [f"{statistics.median(around):.1f}", f"{middle:.1f}", f"{first:.1f} – {last:.1f}"]
        cell = (str(run["ranks"]), run["rate"], run["rtt"], f"{run['bytes']:,}", *cells)
        lines.append(f"| {' | '.join(cell)} |")
    return "\n".join(lines)


def main() -> None:
    """Measures what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=at_least(2), default=[2, 4, 8])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--rtts", nargs="+", default=["0ms", "20ms", "100ms"])
    parser.add_argument("--bytes", nargs="+", type=at_least(1), default=list(BYTES))
    parser.add_argument("--repetitions", type=at_least(3), default=7)
    parser.add_argument("--output", type=Path, default=Path("collectives.json"))
    parser.add_argument("--resume", action="store_true", help="keep what is in --output")
    parser.add_argument("--only-print", action="store_true", help="print the table of --output")
    options = parser.parse_args()
    settings = {"repetitions": options.repetitions} | versions()
    runs = load(options.output, settings, options.resume or options.only_print)
    cells = itertools.product(options.ranks, options.rates, options.rtts)
    for ranks, rate, rtt in () if options.only_print else cells:
        if any((each["ranks"], each["rate"], each["rtt"]) == (ranks, rate, rtt) for each in runs):
            continue
        cable = rate if rtt == "0ms" else f"{rate}, rtt {rtt}"
        with tempfile.TemporaryDirectory() as folder, Lab(ranks, cable) as lab:
            arguments = (ranks, f"{folder}/store", options.bytes, options.repetitions)
            found = lab.run(measure, *arguments, timeout=540)[0]
        cell = {"ranks": ranks, "rate": rate, "rtt": rtt, "commit": COMMIT}
        runs += [{**cell, "bytes": size, "seconds": times} for size, times in zip(options.bytes, found)]
        save(runs, options.output, settings)
        print(ranks, rate, rtt, file=sys.stderr, flush=True)
    print(f"{table(runs)}\n\n{made_with(each['commit'] for each in runs)}")


if __name__ == "__main__":
    main()
