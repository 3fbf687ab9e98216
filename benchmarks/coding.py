"""Measures index codecs on random positions: bits per position, and how fast they encode and decode.

One process, one thread. Rows are timed in turns, so that other load on the machine hits all of them. The reference is
timed on fewer positions: it takes about a hundred bytes of memory per bit.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from lightning_sparsecomm.codecs import INDEX_CODECS, Auto, IndexCodec, IndexCoding
from lightning_sparsecomm.kernels import PositionKernels, position_kernels_for


def positions(count: int, density: float) -> tuple[Tensor, int]:
    """Random positions, and the size of the vector they belong to."""
    size = max(count, round(count / density))
    generator = torch.Generator().manual_seed(0)
    runs = torch.empty(2 * count + 1000, dtype=torch.float64).geometric_(density, generator=generator).long()
    indices = runs.cumsum(0).sub_(1)
    return indices[indices < size], size


def coded(coding: IndexCoding, indices: Tensor, size: int) -> tuple[list[Callable[[], object]], int]:
    """Calls that encode (with the choice of the codec) and decode, and the bytes of the result."""
    count = indices.numel()
    codec: IndexCodec = coding.chosen(indices, size)
    section = codec.encode(indices, size)
    parameter = codec.parameter(count, size)
    encode = lambda: coding.encoded(indices, size)  # noqa: E731
    return [encode, lambda: codec.decode(section, count, size, parameter)], section.numel()


def seconds(call: Callable[[], object], kernels: PositionKernels) -> float:
    """How long `call` takes with these kernels."""

    def chosen(device: torch.device) -> PositionKernels:
        return kernels

    with (
        mock.patch("lightning_sparsecomm.codecs.indices.position_kernels_for", chosen),
        mock.patch("lightning_sparsecomm.codecs.adaptive.position_kernels_for", chosen),
    ):
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--positions", type=int, default=1_000_000, metavar="K", help="number of positions")
    add("--reference-positions", type=int, default=20_000, metavar="K", help="number of positions for the reference")
    add("--densities", type=float, nargs="+", default=[0.1, 0.01, 0.001], metavar="P", help="fractions of all elements")
    add("--rounds", type=int, default=15, metavar="N", help="timed calls of each row, after 2 warm-up calls")
    add("--output", type=Path, metavar="FILE", help="JSON file for all times")
    options = parser.parse_args()
    torch.set_num_threads(1)

    codings: list[IndexCoding] = [*INDEX_CODECS.values(), Auto()]
    cells: dict[str, tuple[int, Callable[[], object]]] = {}
    lengths: dict[str, float] = {}
    for density in options.densities:
        for kernels, wanted in (("numba", options.positions), ("torch", options.reference_positions)):
            indices, size = positions(wanted, density)
            count = indices.numel()
            for coding in codings:
                calls, section_bytes = coded(coding, indices, size)
                name = f"{coding!r} | {density:g}"
                if kernels == "numba":
                    lengths[name] = 8 * section_bytes / count
                for direction, call in zip(("encode", "decode"), calls):
                    cells[f"{name} | {direction}, {kernels}"] = count, call

    fastest = position_kernels_for(torch.device("cpu"))
    times: dict[str, list[float]] = {name: [] for name in cells}
    for number in range(2 + options.rounds):
        for name, (_, call) in cells.items():
            taken = seconds(call, fastest if name.endswith("numba") else PositionKernels())
            if number >= 2:
                times[name].append(taken)

    columns = [f"{direction}, {kernels}" for kernels in ("numba", "torch") for direction in ("encode", "decode")]
    print(f"{options.positions:,} random positions ({options.reference_positions:,} in torch), one thread;", end=" ")
    print(f"million positions per second, median (least to most) of {options.rounds}\n")
    print(f"| codec | density | bits per position | {' | '.join(columns)} |\n|{'---|' * 7}")
    for name, length in lengths.items():
        shown = []
        for column in columns:
            count = cells[f"{name} | {column}"][0]
            rates = [count / taken / 1e6 for taken in times[f"{name} | {column}"]]
            shown.append(f"{statistics.median(rates):.3g} ({min(rates):.3g} to {max(rates):.3g})")
        print(f"| {name} | {length:.3f} | {' | '.join(shown)} |")
    print(f"\n{platform.processor() or platform.machine()}, torch {torch.__version__}")
    if options.output:
        settings = {**vars(options), "output": None}
        options.output.write_text(json.dumps({"options": settings, "bits": lengths, "seconds": times}, indent=2))


if __name__ == "__main__":
    main()
