"""Peak memory of a training step with ddp and with each method, in multiples of the model's float32 parameters.

Each row trains a small and a large model, and divides the difference of their peaks by the difference of their sizes.
So what every process needs (Python, torch, compiled kernels) does not count. The peak is rank 0's largest resident
memory between the set-up and the end of a few steps. Prints a Markdown table. Needs Linux.
"""

import argparse
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from runs import COMMIT, forget_most_memory, made_with, most_memory_bytes, versions
from torch import nn

from lightning_sparsecomm import Method, methods
from lightning_sparsecomm.strategies.lightning_fabric import SparseCommStrategy

BASELINE = "ddp"

ROWS: dict[str, Callable[[], Method] | None] = {
    BASELINE: None,
    "dgc(0.001)": lambda: methods.dgc(0.001, warmup_steps=0),
    "dgc(0.001), begins to warm up": lambda: methods.dgc(0.001, warmup_steps=1000),
    "gradient_dropping(0.01)": lambda: methods.gradient_dropping(0.01),
    "gradient_dropping(0.01), begins to warm up": lambda: methods.gradient_dropping(0.01, warmup_steps=1000),
    "sketched_sgd(0.001)": lambda: methods.sketched_sgd(0.001),
    "s2_reducer()": methods.s2_reducer,
    "sbc1()": methods.sbc1,
    "default(), 300 steps": lambda: methods.default(every=1, residual_in_weights=True),
    "default(every=1), 300 steps": methods.default,
    "default(), 4,000 steps": lambda: methods.default(every=2, residual_in_weights=True),
    "default(every=1), 4,000 steps": lambda: methods.default(every=1),
    "default(every=4), 4,000 steps": lambda: methods.default(every=4),
}

LAYERS = 4
STEPS = 3
SAMPLES = 8

LENGTHS = {"default(), 300 steps": 300, "default(every=1), 300 steps": 300}
"""Steps of the run that the first ones belong to, which densities follow; 4,000 where not named."""


def peak_bytes(row: str, ranks: int, width: int) -> int:
    """Rank 0's peak memory in its first steps, with a model of `LAYERS` · `width`² parameters."""
    method = ROWS[row]
    strategy: DDPStrategy = (
        DDPStrategy(start_method="fork")
        if method is None
        else SparseCommStrategy(method=method(), start_method="fork", length=LENGTHS.get(row, 4000))
    )
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=ranks)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "peak"
        fabric.launch(train, width, path)
        return int(path.read_text())


def train(fabric: Fabric, width: int, path: Path) -> None:
    """What each process does. Rank 0 writes its peak to a file, since Fabric starts the processes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    module, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), 1e-3, momentum=0.9))
    forget_most_memory()
    for _ in range(STEPS):
        optimizer.zero_grad()
        fabric.backward(module(torch.randn(SAMPLES, width)).square().mean())
        optimizer.step()
    if fabric.global_rank == 0:
        path.write_text(str(most_memory_bytes()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4], metavar="N", help="numbers of processes, one thread each")
    add("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="NAME", help="rows of the table")
    widths = f"widths of the two models, of {LAYERS} linear layers each"
    add("--widths", type=int, nargs=2, default=[1000, 2000], metavar=("SMALL", "LARGE"), help=widths)
    options = parser.parse_args()
    small, large = options.widths
    if min(options.ranks) < 2 or not 0 < small < large:
        parser.error("--ranks must be at least 2, and --widths two positive numbers, the larger one last")
    if not sys.platform.startswith("linux"):
        sys.exit(f"peak memory is read from /proc, which needs Linux; this is {sys.platform}.")
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    vector_bytes = 4 * LAYERS * (large**2 - small**2)
    names = ("lightning_sparsecomm", "torch", "python")
    print(
        f"{LAYERS * small**2:,} and {LAYERS * large**2:,} float32, {STEPS} steps of SGD with momentum;"
        f" {', '.join(f'{name} {number}' for name, number in versions().items() if name in names)}\n"
    )
    print("| method | ranks | vectors at the peak | above ddp |\n|---|---:|---:|---:|")
    for ranks in options.ranks:
        ddp: float | None = None
        for row in options.rows:
            vectors = (peak_bytes(row, ranks, large) - peak_bytes(row, ranks, small)) / vector_bytes
            ddp = vectors if row == BASELINE else ddp
            above = "—" if ddp is None or row == BASELINE else f"{vectors - ddp:+.2f}"
            print(f"| `{row}` | {ranks} | {vectors:.2f} | {above} |", flush=True)
    print(f"\n{made_with([COMMIT])}")


if __name__ == "__main__":
    main()
