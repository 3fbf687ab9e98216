"""Measures inserting a vector into a count sketch, and finding its largest elements in the table.

One process, one thread. Rows are timed in turns, so that other load on the machine hits all of them. The torch
reference is timed on the first shape only, and in fewer rounds.
"""

import argparse
import ctypes
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lightning_sparsecomm.codecs import CountSketch
from lightning_sparsecomm.kernels import SketchKernels


def steps(sketch: CountSketch, x: Tensor, count: int) -> dict[str, Callable[[], object]]:
    """The calls to time. Those that insert make a new table, as training does."""
    full = sketch.empty(x.device, x.dtype)
    sketch.insert_(full, x, 1)

    def inserted() -> Tensor:
        table = sketch.empty(x.device, x.dtype)
        sketch.insert_(table, x, 1)
        return table

    return {
        "insert": inserted,
        "query": lambda: sketch.query(full, x.numel(), 1),
        "largest": lambda: sketch.largest(full, x.numel(), count, 1),
        "insert + query": lambda: sketch.query(inserted(), x.numel(), 1),
        "insert + largest": lambda: sketch.largest(inserted(), x.numel(), count, 1),
    }


def reference(sketch: CountSketch, x: Tensor) -> dict[str, Callable[[], object]]:
    kernels, table = SketchKernels(), sketch.empty(x.device, x.dtype)
    return {
        "insert, torch": lambda: kernels.insert_(table, x, 1),
        "query, torch": lambda: kernels.query(table, x.numel(), 1),
    }


def peak_bytes(call: Callable[[], object]) -> int | None:
    """Peak resident memory during `call`, above that before it; None unless on Linux with glibc."""
    reset, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    try:
        # Freed memory is returned first: reusing it would not show.
        ctypes.CDLL(None).malloc_trim(0)
        reset.write_text("5")
        before = kilobytes(status, "VmRSS")
        call()
        return 1024 * (kilobytes(status, "VmHWM") - before)
    except (AttributeError, OSError, TypeError):
        return None


def kilobytes(status: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(f"{name}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--elements", type=int, default=6_500_000, metavar="N", help="length of the vector, float32")
    add("--count", type=int, default=200_000, metavar="K", help="how many of the largest elements to find")
    add(
        "--shapes",
        nargs="+",
        default=["5x500000", "15x180000", "1x100000"],
        metavar="RxC",
        help="shapes of the table: rows x columns",
    )
    add("--rounds", type=int, default=15, metavar="N", help="timed calls of each row, after 2 warm-up calls")
    add("--reference-rounds", type=int, default=2, metavar="N", help="rounds that also time the reference")
    add("--output", type=Path, metavar="FILE", help="JSON file for all times")
    options = parser.parse_args()
    torch.set_num_threads(1)

    x = torch.randn(options.elements, generator=torch.Generator().manual_seed(0))
    target = torch.empty_like(x)
    rows: dict[str, Callable[[], object]] = {"copy_ | ": lambda: target.copy_(x)}
    for number, shape in enumerate(options.shapes):
        sketch = CountSketch(*map(int, shape.split("x")))
        calls = steps(sketch, x, options.count) | (reference(sketch, x) if number == 0 else {})
        rows |= {f"{name} | {shape}": call for name, call in calls.items()}

    times: dict[str, list[float]] = {name: [] for name in rows}
    for number in range(2 + options.rounds):
        for name, call in rows.items():
            if "torch" in name and not 2 <= number < 2 + options.reference_rounds:
                continue
            begin = time.perf_counter()
            call()
            if number >= 2:
                times[name].append(1e3 * (time.perf_counter() - begin))
    peaks = {name: peak_bytes(call) for name, call in rows.items() if "torch" not in name}

    print(f"{options.elements:,} float32, the {options.count:,} largest, one thread; ms, median of {options.rounds}.")
    print("Memory: the peak during a call, with its result and its new table, in % of the vector's.\n")
    print("| row | shape | median | least | most | memory |\n|---|---|---|---|---|---|")
    for name, several in times.items():
        peak = peaks.get(name)
        memory = "" if peak is None else f"{100 * peak / (x.numel() * x.element_size()):.0f}"
        print(f"| {name} | {statistics.median(several):.1f} | {min(several):.1f} | {max(several):.1f} | {memory} |")
    print(f"\n{platform.processor() or platform.machine()}, torch {torch.__version__}")
    if options.output:
        settings = {**vars(options), "output": None}
        options.output.write_text(json.dumps({"options": settings, "ms": times, "peak_bytes": peaks}, indent=2))


if __name__ == "__main__":
    main()
