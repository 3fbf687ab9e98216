"""Measures index codecs on random positions: bits per position, and how fast they encode and decode.

One process, one thread. Rows are timed in turns, so that other load on the machine hits all of them. The reference is
timed on fewer positions: it takes about a hundred bytes of memory per bit.

`--payloads` measures whole payloads of methods instead, of a normally distributed vector in one tensor of 4,096
columns: bits per value sent, millions of the vector's elements per second that selection reads, and millions of sent
values per second that are encoded once they are selected, and decoded.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from defaults import method_of
from torch import Tensor

from lightning_sparsecomm import Method
from lightning_sparsecomm.basis import Layout, Round, Vector
from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.codecs import INDEX_CODECS, Auto, IndexCodec, IndexCoding, SparseCodec
from lightning_sparsecomm.codecs.sparse import encode_sparse
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


def codec_of(method: Method) -> SparseCodec:
    """The codec of a method's payloads. Raises `ValueError` where it has none, or several."""
    codecs = list(parts_in(method, SparseCodec))
    if len(codecs) != 1:
        raise ValueError(f"payloads must be methods with one sparse codec; got {method!r}. Use 'sparse_loco()'.")
    return codecs[0]


def payloads(names: list[str], elements: int, rounds: int) -> str:
    """A table of whole payloads: a row for each method, given by its call, of a vector of about so many elements."""
    shape = (max(1, elements // 4096), 4096)
    context = Round(Layout([("weight", shape)]))
    vector = Vector(torch.randn(shape, generator=torch.Generator().manual_seed(0)).flatten())
    calls: dict[str, tuple[tuple[int, int, int], list[Callable[[], object]]]] = {}
    bits: dict[str, float] = {}
    for name in names:
        codec = codec_of(method_of(name))
        selected, values = codec.select(vector, context), codec.value_codec(context)
        encode = partial(encode_sparse, selected, context.layout, values, codec.indices)
        payload = encode()
        sent, size = selected.indices.numel(), vector.values.numel()
        select, decode = partial(codec.select, vector, context), partial(codec.decode, payload, size)
        calls[name] = (size, sent, sent), [select, encode, decode]
        bits[name] = 8 * payload.numel() / sent
    times: dict[str, list[list[float]]] = {name: [[], [], []] for name in names}
    for number in range(2 + rounds):
        for name, (_, row) in calls.items():
            for taken, call in zip(times[name], row, strict=True):
                begin = time.perf_counter()
                call()
                if number >= 2:
                    taken.append(time.perf_counter() - begin)
    lines = ["| method | values sent | bits a value | select | encode | decode |", "|---|---:|---:|---:|---:|---:|"]
    for name, (counts, _) in calls.items():
        speeds = [spread(count, taken) for count, taken in zip(counts, times[name], strict=True)]
        cells = [f"`{name}`", f"{counts[1]:,}", f"{bits[name]:.3f}", *speeds]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(count: int, seconds_of: list[float]) -> str:
    """Millions a second: the median, and the least and the most."""
    rates = [count / taken / 1e6 for taken in seconds_of]
    return f"{statistics.median(rates):.3g} ({min(rates):.3g} to {max(rates):.3g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--positions", type=int, default=1_000_000, metavar="K", help="number of positions")
    add("--reference-positions", type=int, default=20_000, metavar="K", help="number of positions for the reference")
    add("--densities", type=float, nargs="+", default=[0.1, 0.01, 0.001], metavar="P", help="fractions of all elements")
    add("--rounds", type=int, default=15, metavar="N", help="timed calls of each row, after 2 warm-up calls")
    add("--output", type=Path, metavar="FILE", help="JSON file for all times")
    add("--payloads", nargs="+", metavar="METHOD", help="whole payloads of these methods, such as 'sparse_loco()'")
    add("--elements", type=int, default=10_000_000, metavar="N", help="length of the vector for --payloads")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.payloads:
        try:
            print(payloads(options.payloads, options.elements, options.rounds))
        except ValueError as error:
            parser.error(str(error))
        print(f"\n{platform.processor() or platform.machine()}, torch {torch.__version__}")
        return

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
        keys = [f"{name} | {column}" for column in columns]
        shown = [spread(cells[key][0], times[key]) for key in keys]
        print(f"| {name} | {length:.3f} | {' | '.join(shown)} |")
    print(f"\n{platform.processor() or platform.machine()}, torch {torch.__version__}")
    if options.output:
        settings = {**vars(options), "output": None}
        options.output.write_text(json.dumps({"options": settings, "bits": lengths, "seconds": times}, indent=2))


if __name__ == "__main__":
    main()
