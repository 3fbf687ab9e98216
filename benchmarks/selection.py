"""Measures updating a residual and finding its largest elements, next to copying a vector of the same length.

One process, one thread. Rows are timed in turns, so that other load on the machine hits all of them.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout, Round, SparseVector
from lightning_sparsecomm.channel import (
    Contribution,
    ErrorFeedback,
    Memory,
    MomentumCorrection,
    MomentumRule,
    StepSettings,
)
from lightning_sparsecomm.codecs import TopK
from lightning_sparsecomm.exchange import Exchanged


def layout_of(shape: str, size: int) -> Layout:
    """One tensor, or 54 as in a network of that size."""
    if shape == "one":
        return Layout([("weight", (size,))])
    # Sizes span three orders of magnitude, as in a convolutional network.
    shares = [1.13**layer for layer in range(54)]
    return Layout((f"layer_{i}", (int(share / sum(shares) * size),)) for i, share in enumerate(shares))


def ours(layout: Layout, gradients: list[Tensor], density: float, momentum: bool) -> Callable[[int], None]:
    """One step: the residual takes in the gradient, and its largest elements are found, read and forgotten."""
    memories: list[Memory] = [MomentumCorrection()] if momentum else []
    memories.append(ErrorFeedback())
    for memory in memories:
        memory.bind(layout, torch.float32, gradients[0].device)
    selector = TopK(density, scope="tensor")
    settings = StepSettings([MomentumRule(0.9)] * len(layout.segments))
    present = [True] * len(layout.segments)

    def step(number: int) -> None:
        context = Round(layout, number)
        parts = layout.views(gradients[number % len(gradients)])
        contribution = Contribution(parts, settings, wanted=selector.wanted(context))
        for memory in memories:
            contribution = memory.prepare(contribution, context)
        assert contribution.flat is not None
        indices = selector.select_hinted(contribution.flat, context, contribution.hints)
        sent = SparseVector(indices, contribution.flat[indices], layout.size)
        for memory in memories:
            memory.commit(Exchanged(sent, sent, present), context)

    return step


def torch_topk(layout: Layout, gradients: list[Tensor], density: float, momentum: bool) -> Callable[[int], None]:
    """The same with torch's own operations, in buffers allocated beforehand."""
    velocity, residual, magnitudes = (torch.zeros(layout.size, device=gradients[0].device) for _ in range(3))

    def step(number: int) -> None:
        gradient = gradients[number % len(gradients)]
        if momentum:
            residual.add_(velocity.mul_(0.9).add_(gradient))
        else:
            residual.add_(gradient)
        torch.abs(residual, out=magnitudes)
        found = []
        for segment, part in zip(layout.segments, layout.flats(magnitudes)):
            k = max(1, round(density * segment.size))
            found.append(torch.topk(part, k, sorted=False).indices + segment.offset)
        indices = torch.cat(found)
        residual[indices]
        residual.index_fill_(0, indices, 0.0)
        velocity.index_fill_(0, indices, 0.0)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--elements", type=int, default=25_000_000, metavar="N", help="length of the vector, float32")
    add("--density", type=float, default=0.001, metavar="P", help="fraction of elements to find")
    add("--rounds", type=int, default=15, metavar="N", help="timed steps of each row, after 3 warm-up steps")
    add("--output", type=Path, metavar="FILE", help="JSON file for all times")
    options = parser.parse_args()
    torch.set_num_threads(1)

    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(options.elements, generator=generator) for _ in range(2)]
    target = torch.zeros(options.elements)
    rows: dict[str, Callable[[int], None]] = {"copy_": lambda number: target.copy_(gradients[number % 2])}
    for shape, words in (("one", "one tensor"), ("many", "54 tensors")):
        layout = layout_of(shape, options.elements)
        views = [gradient[: layout.size] for gradient in gradients]
        for momentum in (False, True):
            kind = f"{words}, {'momentum and residual' if momentum else 'residual'}"
            rows[f"{kind}: fused"] = ours(layout, views, options.density, momentum)
            rows[f"{kind}: torch.topk"] = torch_topk(layout, views, options.density, momentum)

    times: dict[str, list[float]] = {name: [] for name in rows}
    for number in range(3 + options.rounds):
        for name, step in rows.items():
            begin = time.perf_counter()
            step(number)
            if number >= 3:
                times[name].append(1e3 * (time.perf_counter() - begin))

    print(f"{options.elements:,} float32, density {options.density}, one thread; ms, median of {options.rounds}\n")
    print("| row | median | least | most | of copy_ | torch.topk by fused |\n|---|---|---|---|---|---|")
    base = statistics.median(times["copy_"])
    for name, several in times.items():
        median = statistics.median(several)
        other = times.get(name.replace("fused", "torch.topk"))
        ratio = f"{statistics.median(other) / median:.1f}" if other is not None and "fused" in name else ""
        print(f"| {name} | {median:.1f} | {min(several):.1f} | {max(several):.1f} | {median / base:.2f} | {ratio} |")
    print(f"\n{platform.processor() or platform.machine()}, torch {torch.__version__}")
    if options.output:
        options.output.write_text(json.dumps({"options": {**vars(options), "output": None}, "ms": times}, indent=2))


if __name__ == "__main__":
    main()
