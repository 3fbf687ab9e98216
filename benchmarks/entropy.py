"""How many bits the positions take that trainings select, in our codes and in others, and how fast these are.

Trains each task of `tasks.py` for 300 steps with 4 processes, and takes what rank 0 sends in five of its exchanges:
with SGD at each density as `strategy="sparsecomm"` does, and with AdamW as `sparse_loco(every=10)` does, 64 of 4,096.
They are kept in `--folder` for the next call. Bits are those of whole sections by positions, over all five. Speed is
that of one thread, on all selections of a density, one after another up to 100,000 positions; the best of some calls in
turns, which are short so that other work interrupts few of them.
"""

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from range_coder import decode, encode
from selections import Selection, selections
from tasks import TASKS
from torch import Tensor

from lightning_sparsecomm.basis import Layout
from lightning_sparsecomm.codecs import AdaptiveGolomb, Auto, Bitmap, Golomb, IndexCodec, ShortThreeBit, ThreeBit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from command_line import at_least, folder

SPARSE_LOCO = 0.0
"""Stands for `sparse_loco` among the densities."""

NO_LAYOUT = Layout([])

Runs = NDArray[np.int64]


def entropy_bits(count: int, size: int) -> float:
    """The entropy if each of `size` elements is selected with the same probability."""
    if count in (0, size):
        return 0.0
    return count * math.log2(size / count) + (size - count) * math.log2(size / (size - count))


def runs_of(indices: Tensor) -> Runs:
    """The zeros before each position."""
    return torch.diff(indices, prepend=torch.tensor([-1])).numpy() - 1


def tensor_counts(selection: Selection) -> list[tuple[int, int]]:
    """How many of each tensor's elements are selected, and how many it has."""
    ends = np.cumsum([0, *selection.sizes])
    counts = np.diff(np.searchsorted(selection.indices.numpy(), ends))
    return [(int(count), size) for count, size in zip(counts, selection.sizes)]


def golomb_by_tensor_bits(selection: Selection) -> float:
    """One Golomb code for each tensor, without what naming them takes."""
    bits, begin = 0.0, 0
    indices = selection.indices
    for size in selection.sizes:
        own = indices[(indices >= begin) & (indices < begin + size)] - begin
        bits += 8 * min(Golomb().section_bytes(own, size), Bitmap().section_bytes(own, size))
        begin += size
    return bits


@numba.njit
def interpolative_bits(indices: Runs, size: int) -> int:
    """Binary interpolative coding (Moffat and Stuiver 2000): the middle position, then both halves."""
    bits = 0
    stack = [(0, indices.size, 0, size)]
    while len(stack):
        first, last, low, high = stack.pop()
        if last == first or last - first == high - low:
            continue
        middle = (first + last) // 2
        least = low + middle - first
        width = high - (last - middle - 1) - least
        whole = 0
        while 1 << whole < width:
            whole += 1
        # The shorter words are those in the centre.
        short = (1 << whole) - width
        bits += whole - int(abs(2 * (indices[middle] - least) - width + 1) < short)
        stack.append((first, middle, low, indices[middle]))
        stack.append((middle + 1, last, indices[middle] + 1, high))
    return bits


@numba.njit
def ideal_bits(runs: Runs) -> float:
    """What an arithmetic code would take that learns as it goes; its context is the mean logarithm of the last runs."""
    counts = np.full((16, 128), 0.02)
    bits, mean = 0.0, 0.0
    for run in runs:
        number, plain = run, 0
        if run >= 8:
            while run >> (plain + 1) > 3:
                plain += 1
            number = 4 * plain + (run >> plain)
        row = counts[min(15, int(mean / 2))]
        bits += plain - math.log2(row[number] / row.sum())
        row[number] += 1
        if row.sum() > 4000:
            row /= 2
        mean += (number - mean) / 8
    return bits


def range_coded(runs: Runs) -> NDArray[np.uint8]:
    """The bytes of the range coder, padded."""
    out = np.zeros(8 * runs.size + 64, np.uint8)
    length = encode(runs, out)
    read = np.zeros_like(runs)
    decode(out[: length + 16], read)
    assert (read == runs).all()
    return out[: length + 16]


def before(indices: Tensor, size: int) -> IndexCodec:
    """What `Auto` chose without `AdaptiveGolomb`."""
    return min(Auto().codecs()[:-1], key=lambda codec: codec.section_bytes(indices, size))


COLUMNS: dict[str, Callable[[Selection], float]] = {
    "equally likely: entropy": lambda s: entropy_bits(s.indices.numel(), s.size),
    "… within each tensor": lambda s: sum(itertools.starmap(entropy_bits, tensor_counts(s))),
    "Golomb or bitmap": lambda s: 8 * before(s.indices, s.size).section_bytes(s.indices, s.size),
    "… for each tensor": golomb_by_tensor_bits,
    "interpolative": lambda s: interpolative_bits(s.indices.numpy(), s.size),
    "range coder": lambda s: 8 * (range_coded(runs_of(s.indices)).size - 16),
    "ideal arithmetic": lambda s: ideal_bits(runs_of(s.indices)),
    "**AdaptiveGolomb**": lambda s: 8 * AdaptiveGolomb().section_bytes(s.indices, s.size),
    "`Auto`": lambda s: 8 * Auto().chosen(s.indices, s.size).section_bytes(s.indices, s.size),
}


def named(density: float) -> str:
    """A density for a table."""
    return "`sparse_loco`" if density == SPARSE_LOCO else f"{density:g}"


def print_bits(found: dict[tuple[str, float], list[Selection]]) -> None:
    """A row for each training."""
    print("Bits a position:\n")
    print(f"| task | density | positions | {' | '.join(COLUMNS)} |\n|---|---:|---:|{'---:|' * len(COLUMNS)}")
    for (task, density), each in found.items():
        count = sum(selection.indices.numel() for selection in each)
        bits = [sum(map(column, each)) / count for column in COLUMNS.values()]
        shown = " | ".join(f"{number:.2f}" for number in bits)
        print(f"| {task} | {named(density)} | {count // len(each):,} | {shown} |")


def print_value_bits(found: dict[tuple[str, float], list[Selection]]) -> None:
    """A row for each training whose values take three bits."""
    codecs = ThreeBit(), ShortThreeBit()
    print(f"\nBits a value:\n\n| task | density | {' | '.join(f'`{type(codec).__name__}`' for codec in codecs)} |")
    print("|---|---:|---:|---:|")
    for (task, density), each in found.items():
        if density != SPARSE_LOCO:
            count = sum(selection.indices.numel() for selection in each)
            lengths = [sum(codec.encode(s.values, s.indices, NO_LAYOUT).numel() for s in each) for codec in codecs]
            print(f"| {task} | {named(density)} | {' | '.join(f'{8 * length / count:.2f}' for length in lengths)} |")


def joined(each: list[Selection], positions: int) -> tuple[Tensor, int]:
    """Selections one after another, and again, up to so many positions."""
    parts, size, count = [], 0, 0
    for selection in itertools.cycle(each):
        if count >= positions:
            break
        parts.append(selection.indices + size)
        size += selection.size
        count += selection.indices.numel()
    return torch.cat(parts), size


def value_calls(codec: ThreeBit, values: Tensor) -> list[Callable[[], object]]:
    """Calls that encode and decode values."""
    indices = torch.arange(values.numel())
    section = codec.encode(values, indices, NO_LAYOUT)
    return [
        lambda: codec.encode(values, indices, NO_LAYOUT),
        lambda: codec.decode(section, values.numel(), codec.parameter),
    ]


def print_speed(each: list[Selection], density: float, positions: int, rounds: int) -> None:
    """A row for each code."""
    indices, size = joined(each, positions)
    values = torch.cat([selection.values for selection in each]).repeat(-(-positions // 1000))[: indices.numel()]
    count, runs = indices.numel(), runs_of(indices)
    golomb, adaptive = Golomb(), AdaptiveGolomb()
    section, blocks, coded = golomb.encode(indices, size), adaptive.encode(indices, size), range_coded(runs)
    shift, out, read = golomb.parameter(count, size), np.zeros(8 * count + 64, np.uint8), np.zeros_like(runs)
    calls: dict[str, list[Callable[[], object]]] = {
        "`Golomb`": [
            lambda: golomb.section_bytes(indices, size),
            lambda: golomb.encode(indices, size),
            lambda: golomb.decode(section, count, size, shift),
        ],
        "`AdaptiveGolomb`": [
            lambda: adaptive.section_bytes(indices, size),
            lambda: adaptive.encode(indices, size),
            lambda: adaptive.decode(blocks, count, size, 0),
        ],
        "`Auto` without it": [
            lambda: before(indices, size),
            lambda: before(indices, size).encode(indices, size),
        ],
        "`Auto`": [
            lambda: Auto().chosen(indices, size),
            lambda: Auto().encoded(indices, size),
        ],
        "`ThreeBit`": [lambda: None, *value_calls(ThreeBit(), values)],
        "`ShortThreeBit`": [lambda: None, *value_calls(ShortThreeBit(), values)],
        "range coder": [lambda: None, lambda: encode(runs, out), lambda: decode(coded, read)],
    }
    least = {name: [math.inf] * len(own) for name, own in calls.items()}
    for _ in range(rounds + 1):
        for name, own in calls.items():
            for i, call in enumerate(own):
                begin = time.perf_counter()
                call()
                least[name][i] = min(least[name][i], time.perf_counter() - begin)
    for name, seconds in least.items():
        # A call that does nothing takes no time worth a number.
        rates = [f"{count / each / 1e6:,.0f}" if each > 1e-6 else "" for each in seconds]
        print(f"| {named(density)} | {name} | {' | '.join(rates + [''] * (3 - len(rates)))} |")


def main() -> None:
    """Trains what is missing in the folder, and prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=folder, default=Path("data"), help="Fashion-MNIST and shakespeare.txt")
    parser.add_argument("--folder", type=Path, default=Path("selections"), help="for what was selected")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["teacher", "convolution", "lstm", "gpt"])
    parser.add_argument(
        "--densities",
        nargs="+",
        type=float,
        default=[0.21, 0.08, 0.03, 0.01, SPARSE_LOCO],
        help="fractions of all elements; 0 for sparse_loco",
    )
    parser.add_argument("--positions", type=at_least(1), default=100_000, help="for the speed")
    parser.add_argument("--rounds", type=at_least(1), default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    found = {
        (task, density): selections(task, density or None, options.data_dir, options.folder)
        for task in options.tasks
        for density in options.densities
    }
    print_bits(found)
    print_value_bits(found)
    print("\nMillion positions or values a second:\n")
    print("| density | code | length | encode | decode |\n|---|---|---:|---:|---:|")
    for density in options.densities:
        each = [selection for (_, own), some in found.items() for selection in some if own == density]
        print_speed(each, density, options.positions, options.rounds)


if __name__ == "__main__":
    main()
